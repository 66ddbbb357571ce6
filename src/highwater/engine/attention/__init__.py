"""Data plane: exact attention, fast and as the reference that the fast ones must equal."""

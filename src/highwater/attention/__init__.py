"""Data plane: exact attention, reference and fast."""

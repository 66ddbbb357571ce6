"""Data plane: exact attention, as fast kernels and as the plain reference that they must equal."""

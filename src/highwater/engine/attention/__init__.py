"""Data plane: exact attention, as fast kernels and as a plain reference to compare with."""

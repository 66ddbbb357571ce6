"""Data plane: process groups and how parameters, gradients and sequences are spread over ranks."""

"""Data plane: one step on fake tensors, and every allocation it makes."""

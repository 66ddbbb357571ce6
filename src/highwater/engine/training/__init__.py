"""Data plane: the training step, the loops around it, and the files that they write and read."""

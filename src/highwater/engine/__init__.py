"""Data plane: one training step, and the worker that measures it."""

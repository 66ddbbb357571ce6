"""Memory snapshots of PyTorch: read without PyTorch, and what was alive in them at the peak."""

"""Memory snapshots of PyTorch, read without PyTorch, and the allocations alive at their peaks."""

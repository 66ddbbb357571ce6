"""Read PyTorch's memory snapshots without PyTorch; find the allocations live at their peaks."""

"""Control plane: which length to try next, in which order, and when a cell has its answer."""

"""Control plane: what a machine has, and how trials are started, classified and ended on it."""

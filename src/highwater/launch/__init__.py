"""Control plane: what a machine has, and how trials are started, judged and ended on it."""

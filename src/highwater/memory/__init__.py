"""Control plane: peak memory and capacity without a GPU."""

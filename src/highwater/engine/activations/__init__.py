"""Data plane: which activations a layer keeps for its backward pass, and which it recomputes."""

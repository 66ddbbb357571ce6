"""Data plane: what a layer keeps for its backward pass, and what it computes anew."""

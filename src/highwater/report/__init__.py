"""Control plane: answers as tables."""

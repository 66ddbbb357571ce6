"""Control plane: the study on disk."""

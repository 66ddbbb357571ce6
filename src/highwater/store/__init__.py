"""Control plane: studies and training runs on disk."""

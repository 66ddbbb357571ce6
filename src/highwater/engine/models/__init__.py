"""Data plane: build models from their config; their weights and their loss."""

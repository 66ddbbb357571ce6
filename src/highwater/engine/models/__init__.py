"""Data plane: models built from their config, their weights and their loss."""

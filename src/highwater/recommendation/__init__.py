"""Control plane: from capacities and predictions to settings."""

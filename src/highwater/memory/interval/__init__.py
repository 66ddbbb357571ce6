"""Control plane: how far a prediction may be off, learned from measured trials."""

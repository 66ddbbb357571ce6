"""Control plane: the report of a study."""

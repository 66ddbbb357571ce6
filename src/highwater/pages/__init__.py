"""Control plane: everything that is drawn, and what is gathered for it."""

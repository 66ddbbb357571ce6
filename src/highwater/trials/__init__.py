"""Control plane: probe a machine; start trials on it, classify how they end, and end them."""

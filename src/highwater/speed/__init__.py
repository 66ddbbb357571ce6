"""How long a step takes, predicted without a GPU."""

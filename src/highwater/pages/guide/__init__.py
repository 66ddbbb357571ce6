"""Control plane: the guide of many models and GPUs."""

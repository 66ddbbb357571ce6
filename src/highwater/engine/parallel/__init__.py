"""Data plane: sharding over ranks, for a model that is already built."""

"""Data plane: parts of a model computed with less memory, each tested against the plain part."""

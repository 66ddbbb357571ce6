"""Data plane: parts of a model computed with less memory, each proven equal to the plain part."""

"""The nouns of the project: frozen, validated at construction, encoded by ``codec``."""

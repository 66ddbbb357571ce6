"""The nouns (docs/concepts/words.md): frozen, validated at construction, encoded by ``codec``."""

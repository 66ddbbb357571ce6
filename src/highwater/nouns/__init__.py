"""The nouns of the project: frozen, validated at construction, encoded by ``codec``. Their words
are in docs/concepts/words.md.
"""

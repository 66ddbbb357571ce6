"""The shared records (docs/concepts/words.md): frozen, validated when made, stored as JSON."""

"""The benchmark of attentions: who takes part, whether each is right, and what it holds."""

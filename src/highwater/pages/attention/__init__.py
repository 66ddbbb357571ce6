"""What a benchmark of attentions found, as text, tables and pictures."""

"""Training step, the loops around it, and what they write and read back."""

"""Benchmark of attentions: the contenders, their correctness, and their memory and time."""

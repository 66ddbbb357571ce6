"""Bounds: the most of each count that is read, from a user or from a file: far above what anybody trains.

What is counted by a user is listed, multiplied and drawn: without a bound one number too long takes all memory, or never ends.
"""

MOST_GPUS = 65_536
"""In one trial. The largest jobs that are published of had 16,384 (Llama 3 405B) to 24,576 GPUs."""
MOST_NAMED = 256
"""Numbers of GPUs, or degrees, that one search names."""
MOST_LENGTHS = 1 << 20
"""On one grid: every token up to 1,048,576."""
MOST_SEQUENCES = 1 << 20
"""In one micro-batch, and tiles of an MLP: as many as a micro-batch of that many tokens could have."""
MOST_STATE_BYTES = 1 << 10
"""Of one parameter, its gradient and its optimizer states: float64 with ten states has 96."""
MOST_STEPS = 1_000_000
"""Of a trial, and micro-batches of a step."""
MOST_REPEATS = 1_000
"""That confirm an edge."""

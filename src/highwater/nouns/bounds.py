"""Bounds: the most of each count that is read, far above what anybody trains.

Counts come from a user or from a file, and are listed, multiplied and drawn: without a bound one
number too long takes all memory, or never ends.
"""

MOST_GPUS = 65_536
"""GPUs of one trial.

The largest jobs that were published had 16,384 (Llama 3 405B) to 24,576 GPUs.
"""
MOST_GPUS_OF_A_MACHINE = 16
"""GPUs of one machine at the most."""
MOST_GPUS_PREDICTED = 1_024
"""GPUs that one prediction is about: copies of what some machines hold."""
MOST_NAMED = 256
"""Numbers of GPUs, or degrees, that one search names."""
MOST_LENGTHS = 1 << 20
"""Lengths of one grid: every token up to 1,048,576."""
MOST_SEQUENCES = 1 << 20
"""Sequences of one micro-batch, and tiles of an MLP.

As many as a micro-batch of that many tokens could have.
"""
MOST_STEPS = 1_000_000
"""Steps of a trial, and micro-batches of a step."""
MOST_REPEATS = 1_000
"""Repeats that confirm an edge."""

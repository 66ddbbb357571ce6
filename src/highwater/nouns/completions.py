"""Completions: how many sequences TRL's GRPO generates together, which is what it then trains on.

A generated batch is whole groups, and a step's micro-batches are that batch. Source:
``num_generations`` and ``generation_batch_size`` in ``trl/trainer/grpo_config.py`` of trl 1.16.0.
"""

import math

GENERATIONS = 8
"""``num_generations`` of GRPOConfig: a generation batch is a multiple of it."""


def generation_micro_batches(rows: int, gpus: int, generations: int = GENERATIONS) -> int:
    """Micro-batches of ``rows`` sequences on each of so many GPUs that hold whole groups."""
    together = rows * gpus
    return math.lcm(generations, together) // together

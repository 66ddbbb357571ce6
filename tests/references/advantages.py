"""Advantages of a group's documents, and of tokens by generalised advantage estimation."""

from collections import defaultdict

import torch
from torch import Tensor

STD_FLOOR = 1e-6
"""Added to a group's standard deviation: verl's ``compute_grpo_outcome_advantage``."""
VARIANCE_FLOOR = 1e-8
"""Added to the variance when whitening: verl's and TRL's ``masked_whiten``. verl adds 1e-8 to the
number of tokens too, against a division by zero: one part in 1e8 times that number, which neither
the definition nor TRL has."""


def standardised_in_groups(rewards: list[float], groups: list[int]) -> Tensor:
    """One advantage a document: its reward less its group's mean, by the group's unbiased
    deviation.

    A group of one has nothing to be compared with: its mean counts as 0 and its deviation as 1.
    """
    members = defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        members[group].append(reward)
    advantages = []
    for reward, group in zip(rewards, groups, strict=True):
        of_group = torch.tensor(members[group], dtype=torch.float64)
        mean, deviation = (
            (of_group.mean().item(), of_group.std().item()) if len(of_group) > 1 else (0.0, 1.0)
        )
        advantages.append((reward - mean) / (deviation + STD_FLOOR))
    return torch.tensor(advantages, dtype=torch.float64)


def generalised(
    values: Tensor, reward: float, *, discount: float = 1.0, decay: float = 0.95
) -> Tensor:
    """Advantage of each trained token of one document, whose reward comes with the last of them.

    The sum over later tokens of ``(discount * decay) ** distance`` times their temporal-difference
    errors. Tokens between two trained ones that are not trained themselves are no steps of the
    policy: they count as no distance.
    """
    tokens = len(values)
    after = torch.cat([values[1:], values.new_zeros(1)])
    rewards = values.new_zeros(tokens)
    if tokens:
        rewards[-1] = reward
    errors = rewards + discount * after - values
    distance = torch.arange(tokens)[None, :] - torch.arange(tokens)[:, None]
    weights = torch.where(distance >= 0, (discount * decay) ** distance.clamp(min=0).double(), 0.0)
    return weights @ errors


def whitened(advantages: Tensor) -> Tensor:
    """Mean 0 and variance 1 over all trained tokens of a step."""
    if len(advantages) < 2:
        raise ValueError(f"a variance needs two tokens, not {len(advantages)}")
    return (advantages - advantages.mean()) / (
        advantages.var(unbiased=True) + VARIANCE_FLOOR
    ).sqrt()

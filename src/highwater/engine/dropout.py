"""Dropout: each rank draws from a stream of its own in every step, the same each time; nothing is drawn without a gradient.

Ranks that share a sequence have different tokens of it, so that no two ranks need the same draws: dropout inside attention, where
they would, is refused before a trial starts (spec/families.py).
"""

import hashlib
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def seeded(*, seed: int, rank: int, step: int, device: torch.device) -> Generator[None]:
    """PyTorch's random numbers of one rank in one step; those of a user's data source go on afterwards where they were."""
    stream = int.from_bytes(hashlib.sha256(f"dropout {seed} {rank} {step}".encode()).digest()[:7], "big")
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(stream)
        yield


@contextmanager
def without_dropout(model: nn.Module) -> Generator[None]:
    """The model as it is evaluated; afterwards as it was."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)


def draws_in_training(modules: nn.Module) -> bool:
    """Whether any module draws random numbers in training, so that its recomputation has to draw the same.

    Many families keep their rate as an attribute for PyTorch's functional dropout; noise on a router's inputs is told by its name,
    whatever its rate: some routers sample in any case.
    """
    return any(_draws(module) for module in modules.modules())


def _draws(module: nn.Module) -> bool:
    if isinstance(module, nn.Dropout):
        return module.p > 0
    rates = {name: value for name, value in vars(module).items() if isinstance(value, int | float)}
    return any("jitter" in name or ("drop" in name and value > 0) for name, value in rates.items())

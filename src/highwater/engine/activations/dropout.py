"""Dropout with a random stream of its own for each rank and step, the same in every run.

Nothing is drawn in passes without a gradient. Ranks that share a sequence hold different tokens of
it, so that no two ranks need the same draws. Dropout inside attention would need them, and is
refused before a trial starts (model/families.py).
"""

import hashlib
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def seeded(*, seed: int, rank: int, step: int, device: torch.device) -> Generator[None]:
    """Run the block with PyTorch's random numbers seeded by ``seed``, rank and step.

    The generators' state before the block is restored after it: a user's data source goes on
    undisturbed.
    """
    # A digest, not a sum: seed + rank + step would give rank 1 in step 0 what rank 0 has in step 1.
    # 56 bits fit the seed of any generator.
    stream = int.from_bytes(
        hashlib.sha256(f"dropout {seed} {rank} {step}".encode()).digest()[:7], "big"
    )
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(stream)
        yield


@contextmanager
def without_dropout(model: nn.Module) -> Generator[None]:
    """Evaluate the model without dropout inside the block, and restore its mode after it."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)


def draws_in_training(modules: nn.Module) -> bool:
    """Whether any module draws random numbers in training, which a recomputation has to repeat.

    Many families keep their dropout rate as an attribute for PyTorch's functional dropout. Noise on
    a router's inputs ("jitter") counts whatever its rate, since some routers sample in any case.
    """
    return any(_draws(module) for module in modules.modules())


def _draws(module: nn.Module) -> bool:
    if isinstance(module, nn.Dropout):
        return module.p > 0
    rates = {name: value for name, value in vars(module).items() if isinstance(value, int | float)}
    return any("jitter" in name or ("drop" in name and value > 0) for name, value in rates.items())

"""Recompute: decoder layers that keep only their input, and optionally their attention's output,
and run again in the backward pass. Also dropout, with a random stream for each rank and step that
is the same in every run.

No random numbers are drawn in passes without a gradient. Ranks that share a sequence hold different
tokens of it, so that no two need equal random numbers. Dropout inside attention would need them,
and is refused before a trial starts (model/families.py).
"""

import hashlib
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,  # pyright: ignore[reportUnknownVariableType]
)

from highwater.engine.activations.host import ContextFunction, HostActivations, Kept


@contextmanager
def seeded(*, seed: int, rank: int, step: int, device: torch.device) -> Generator[None]:
    """Context manager: seed PyTorch's random numbers from ``seed``, rank and step.

    The generators' state is restored afterwards, so that a user's data source is not disturbed.
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
    """Context manager: turn off a model's dropout, and restore its mode afterwards."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)


def draws_in_training(modules: nn.Module) -> bool:
    """True if any module draws random numbers in training, which a recomputation must repeat.

    Many families keep their dropout rate as an attribute for PyTorch's functional dropout. Noise on
    a router's inputs ("jitter") counts even at rate 0, since some routers always sample.
    """
    return any(_draws(module) for module in modules.modules())


def _draws(module: nn.Module) -> bool:
    if isinstance(module, nn.Dropout):
        return module.p > 0
    rates = {name: value for name, value in vars(module).items() if isinstance(value, int | float)}
    return any("jitter" in name or ("drop" in name and value > 0) for name, value in rates.items())


PREFIX = "_checkpoint_wrapped_module."
"""Prefix that PyTorch's checkpoint wrapper puts before parameter names."""


def recompute_layers(
    layers: nn.ModuleList,
    *,
    keeping: ContextFunction | None = None,
    host: HostActivations | None = None,
) -> None:
    """Wrap every layer for recomputation, in place.

    The wrapper goes on before FSDP, which then gathers a layer's parameters once for both its
    recomputation and its gradient. Results computed in the contexts of ``keeping`` may stay in
    memory: those of attention, the one part whose time is quadratic in the length. With ``host``
    the tensors that a layer keeps are in host memory.
    """
    # Without random draws no generator's state has to be saved for every layer.
    how: dict[str, Any] = {"preserve_rng_state": draws_in_training(layers)}
    if host is None and keeping is not None:
        how["context_fn"] = lambda: keeping(Kept())
    for index, layer in enumerate(layers):
        if host is not None:
            place = {"index": index, "layers": len(layers), "keeping": keeping}
            how["checkpoint_fn"] = partial(host.checkpoint, **place)
        layers[index] = checkpoint_wrapper(
            layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **how
        )

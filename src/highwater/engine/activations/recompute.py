"""Recompute: decoder layers that keep only their input and run again in the backward pass.

They may keep the output of their attention too.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,  # pyright: ignore[reportUnknownVariableType]
)

from highwater.engine.activations.dropout import draws_in_training

PREFIX = "_checkpoint_wrapped_module."
"""What PyTorch's checkpoint wrapper puts before parameter names."""
ContextFunction = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Function that gives two contexts: for a layer's forward pass and for its recomputation."""


def recompute_layers(layers: nn.ModuleList, *, keeping: ContextFunction | None = None) -> None:
    """Wrap every layer for recomputation, in place.

    The wrapper goes on before FSDP, which then gathers a layer's parameters once for both its
    recomputation and its gradient. What is computed within the contexts of ``keeping`` may stay in
    memory: of attention, the one part whose time grows with the square of the length.
    """
    # Without draws there is nothing to repeat, and no generator's state to save for every layer.
    draws = draws_in_training(layers)
    contexts = {} if keeping is None else {"context_fn": keeping}
    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(
            layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT, preserve_rng_state=draws, **contexts
        )

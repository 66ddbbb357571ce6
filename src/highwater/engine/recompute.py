"""Recompute: decoder layers that keep only their input and run again in the backward pass."""

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,  # pyright: ignore[reportUnknownVariableType]
)

PREFIX = "_checkpoint_wrapped_module."
"""What the wrapper adds to parameter names."""


def recompute_layers(layers: nn.ModuleList) -> None:
    """Wrap every layer, in place.

    The wrapper goes on before FSDP, which then gathers a layer's parameters once for both its recomputation and its gradient.
    """
    dropout = any(isinstance(module, nn.Dropout) and module.p > 0 for module in layers.modules())
    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT, preserve_rng_state=dropout)

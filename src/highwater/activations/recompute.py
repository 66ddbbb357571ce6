"""Recompute: decoder layers that keep only their input and run again in the backward pass.

With ``keep_attention`` they keep the output of their attention too.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,  # pyright: ignore[reportUnknownVariableType]
)
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from highwater.activations.dropout import draws_in_training

PREFIX = "_checkpoint_wrapped_module."
"""What PyTorch's checkpoint wrapper puts before parameter names."""
_aten: Any = torch.ops.aten
_ATTENTION = [
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""Every operator that attention/dense.py may end in, on GPUs and on the CPU."""


def recompute_layers(layers: nn.ModuleList, *, keep_attention: bool = False) -> None:
    """Wrap every layer for recomputation, in place.

    The wrapper goes on before FSDP, which then gathers a layer's parameters once for both its
    recomputation and its gradient. With ``keep_attention`` the outputs of the attention kernels
    stay in memory: the one part whose time grows with the square of the length.
    """
    # Without draws there is nothing to repeat, and no generator's state to save for every layer.
    draws = draws_in_training(layers)
    keeping = (
        {"context_fn": partial(create_selective_checkpoint_contexts, _ATTENTION)}
        if keep_attention
        else {}
    )
    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(
            layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT, preserve_rng_state=draws, **keeping
        )

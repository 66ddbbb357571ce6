"""Buffers: what a module holds besides its parameters, computed as its family's own class does.

A model on meta has none: RoPE's frequencies, the scale of an embedding, the correction of a router.
transformers has the same lack when it loads files, and fills it by each class's ``_init_weights``,
which leaves alone what is marked as initialised.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_MARK = "_is_hf_initialized"


@torch.no_grad()
def fill_buffers(
    causal_lm: PreTrainedModel, module: nn.Module, *, device: torch.device
) -> Sequence[str]:
    """Fill a module's own buffers on ``device``, and return the names that stay unfilled.

    They are there even where the parameters are on the host.
    """
    names = [name for name, _ in module.named_buffers(recurse=False)]
    if not names:
        return ()
    for name in names:
        setattr(module, name, torch.empty_like(cast(Tensor, getattr(module, name)), device=device))
    versions = {name: _version(module, name) for name in names}
    parameters: list[Any] = list(module.parameters(recurse=False))
    for parameter in parameters:
        setattr(parameter, _MARK, True)
    try:
        # Private, but every family's own class overrides it.
        causal_lm._init_weights(module)  # pyright: ignore[reportPrivateUsage]
    finally:
        for parameter in parameters:
            delattr(parameter, _MARK)
    unfilled = [name for name in names if _version(module, name) == versions[name]]
    return [name for name in unfilled if not _fill_with_its_scalar(module, name)]


def _fill_with_its_scalar(module: nn.Module, name: str) -> bool:
    """Fill a buffer of one number that the module has as a float, too; say whether it does.

    Source: ``XIELUActivation`` of transformers, the activation of Apertus.
    """
    value = getattr(module, f"_{name}_scalar", None)
    buffer = cast(Tensor, getattr(module, name))
    if buffer.ndim or not isinstance(value, float):
        return False
    buffer.fill_(value)
    return True


def _version(module: nn.Module, name: str) -> tuple[int, int]:
    """A value that changes when a buffer is written to, or replaced."""
    buffer = cast(Tensor, getattr(module, name))
    return id(buffer), buffer._version

"""Gates: ``silu(gate) * up`` of a gated MLP, and its gradient, each written over its inputs.

A GPU runs two Triton kernels that read and write every element once; otherwise PyTorch runs in
blocks of rows. Both compute in float32 (float64 for float64) and round once.

Shapes:  T tokens  F intermediate size
"""

import importlib.util
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from highwater.units import MIB

BLOCK_BYTES = MIB
"""Bytes of one float32 block of rows; a few blocks are alive at a time."""


@cache
def triton_twin(module: str) -> Any:
    """Import the Triton kernels of ``module`` (``module_triton``); RuntimeError without Triton."""
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError("Triton is missing: it comes with PyTorch's CUDA builds for Linux")
    return importlib.import_module(f"{module}_triton")


_triton = partial(triton_twin, __name__)


def product_(gate_TF: Tensor, up_TF: Tensor) -> None:
    """Overwrite ``gate_TF`` with ``silu(gate) * up``."""
    if gate_TF.is_cuda and gate_TF.dtype != torch.float64:
        _triton().product_(gate_TF, up_TF)
        return
    wide = torch.promote_types(gate_TF.dtype, torch.float32)
    for gate, up in _blocks(gate_TF, up_TF):
        gate.copy_(F.silu(gate.to(wide)).mul_(up))


def backward_(gate_TF: Tensor, up_TF: Tensor, gradient_TF: Tensor) -> None:
    """Overwrite gate and up with their gradients, and their product's gradient with the product.

    ``d silu(x) / dx = s + x s (1 - s)`` with ``s = sigmoid(x)``.
    """
    if gate_TF.is_cuda and gate_TF.dtype != torch.float64:
        _triton().backward_(gate_TF, up_TF, gradient_TF)
        return
    wide = torch.promote_types(gate_TF.dtype, torch.float32)
    for gate, up, gradient in _blocks(gate_TF, up_TF, gradient_TF):
        # Wide inputs are not copied here, so nothing is written before all is computed.
        x, y, g = gate.to(wide), up.to(wide), gradient.to(wide)
        s = x.sigmoid()
        silu = x * s
        results = (g * y * (s + silu * (1 - s)), g * silu, silu * y)
        for target, result in zip((gate, up, gradient), results, strict=True):
            target.copy_(result)


def _blocks(*tensors: Tensor) -> Any:
    rows = max(1, BLOCK_BYTES // (4 * tensors[0].shape[1]))
    return zip(*(t.split(rows) for t in tensors), strict=True)

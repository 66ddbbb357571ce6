"""Norm: rows divided by their root mean square and weighted, also by weights in a wider dtype than
the rows, as in families that add 1.

A GPU runs two Triton kernels that read and write every element once; otherwise PyTorch runs in
blocks of rows. Both compute in float32 (float64 for float64), round once and keep one value per
row.

Shapes:  N rows  E size of a row, the last dimension of ``x``
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from highwater.engine.kernels.gates import BLOCK_BYTES, triton_twin

PARTS = 256
"""Partial sums of the weight's gradient on a GPU, each over some of the rows."""

_triton = partial(triton_twin, __name__)


class RowNorm(torch.autograd.Function):
    """Autograd function of ``normed`` and ``backward``, for ``x``, weight and epsilon. It keeps the
    input and one value per row for the backward pass, not the output.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """Return the normed rows."""
        out, scales_N1 = normed(x, weight_E, eps)
        ctx.save_for_backward(x, weight_E, scales_N1)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return gradients of ``x`` and of the weight."""
        return *backward(gradients[0], *ctx.saved_tensors), None


def normed(x: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``x / rms(x) * weight`` in the dtype of ``x``, and ``1 / rms`` of each row, (N, 1)."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    wide = torch.promote_types(x.dtype, torch.float32)
    rows_NE, target_NE = (each.reshape(-1, x.shape[-1]) for each in (x, out))
    scales_N1 = torch.empty(len(rows_NE), 1, dtype=wide, device=x.device)
    if x.is_cuda and wide == torch.float32:
        _triton().normed(rows_NE, weight_E, eps, target_NE, scales_N1)
        return out, scales_N1
    for rows, scale, target in _blocks(rows_NE, scales_N1, target_NE):
        inputs = rows.to(wide)
        scale.copy_(inputs.square().mean(-1, keepdim=True).add_(eps).rsqrt_())
        target.copy_(inputs.mul(scale).mul_(weight_E))
    return out, scales_N1


def backward(
    gradient: Tensor, x: Tensor, weight_E: Tensor, scales_N1: Tensor
) -> tuple[Tensor, Tensor]:
    """Return gradients of ``x`` and of the weight, from the gradient of ``normed``'s output."""
    x_gradient = torch.empty_like(x, memory_format=torch.contiguous_format)
    sides = [each.reshape(-1, x.shape[-1]) for each in (gradient, x, x_gradient)]
    if x.is_cuda and scales_N1.dtype == torch.float32:
        sums_PE = torch.empty(PARTS, x.shape[-1], dtype=torch.float32, device=x.device)
        _triton().backward(*sides[:2], weight_E, scales_N1, sides[2], sums_PE)
        return x_gradient, sums_PE.sum(0).to(weight_E.dtype)
    weight_gradient_E = torch.zeros_like(weight_E, dtype=scales_N1.dtype)
    for rows_gradient, rows, target, scale in _blocks(*sides, scales_N1):
        unit, wide = rows * scale, rows_gradient.to(scale.dtype)
        weight_gradient_E += (wide * unit).sum(dim=0)
        # The output does not depend on a row's length: the gradient has no part along the row.
        wide = wide * weight_E
        target.copy_((wide - unit * (wide * unit).mean(-1, keepdim=True)).mul_(scale))
    return x_gradient, weight_gradient_E.to(weight_E.dtype)


def _blocks(*tensors: Tensor) -> Any:
    """Split tensors by rows into blocks; a block of the first has ``BLOCK_BYTES`` in float32."""
    rows = max(1, BLOCK_BYTES // (4 * tensors[0].shape[-1]))
    return zip(*(each.split(rows) for each in tensors), strict=True)

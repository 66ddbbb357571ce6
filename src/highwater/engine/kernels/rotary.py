"""Rotary: RMS norm of every head and its rotation by position (RoPE) in one pass, or no norm.

A GPU runs two Triton kernels that read and write every element once; otherwise PyTorch runs in
blocks of tokens. Both compute in float32 (float64 for float64) and round once.

Shapes:  T tokens  H heads  D head size
Source: Su et al., RoFormer, https://arxiv.org/abs/2104.09864, with the halves of a head rotated
against each other, as Hugging Face's models do.
"""

from functools import partial

import torch
from torch import Tensor

from highwater.engine.kernels.gates import BLOCK_BYTES, triton_twin

PARTS = 1024
"""Partial sums of the norm's gradient on a GPU, each over some of the tokens.

Their number is fixed, so that their memory does not grow with the length."""

_triton = partial(triton_twin, __name__)


def rotate(
    x_THD: Tensor, weight_D: Tensor | None, eps: float, cosines_TD: Tensor, sines_TD: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Normalise the heads if there is a weight, and rotate them.

    With a weight, ``1 / rms`` of each head before the norm is returned too, of shape (T, H).
    """
    tokens, heads, _ = x_THD.shape
    wide = torch.promote_types(x_THD.dtype, torch.float32)
    out_THD = torch.empty_like(x_THD, memory_format=torch.contiguous_format)
    scales_TH = (
        None if weight_D is None else torch.empty(tokens, heads, dtype=wide, device=x_THD.device)
    )
    if x_THD.is_cuda and x_THD.dtype != torch.float64:
        _triton().rotate(x_THD, weight_D, eps, cosines_TD, sines_TD, out_THD, scales_TH)
        return out_THD, scales_TH
    for part in _blocks(x_THD):
        x = x_THD[part].to(wide)
        if weight_D is not None and scales_TH is not None:
            scales_TH[part] = x.square().mean(-1).add_(eps).rsqrt_()
            x = x * scales_TH[part][..., None] * weight_D
        out_THD[part] = x * cosines_TD[part, None] + _turned(x) * sines_TD[part, None]
    return out_THD, scales_TH


def backward(
    gradient_THD: Tensor,
    x_THD: Tensor,
    weight_D: Tensor | None,
    scales_TH: Tensor | None,
    cosines_TD: Tensor,
    sines_TD: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Return gradients of ``x`` and of the weight, from the gradient of ``rotate``'s output.

    The last dimension of ``gradient_THD`` must be dense.
    """
    if not x_THD.is_cuda or x_THD.dtype == torch.float64:
        return _backward_in_blocks(gradient_THD, x_THD, weight_D, scales_TH, cosines_TD, sines_TD)
    x_gradient_THD = torch.empty_like(x_THD, memory_format=torch.contiguous_format)
    sums_PD = None
    if weight_D is not None:
        wide = torch.promote_types(x_THD.dtype, torch.float32)
        sums_PD = torch.empty(PARTS, x_THD.shape[-1], dtype=wide, device=x_THD.device)
    _triton().backward(
        gradient_THD, x_THD, weight_D, scales_TH, cosines_TD, sines_TD, x_gradient_THD, sums_PD
    )
    if weight_D is None or sums_PD is None:
        return x_gradient_THD, None
    return x_gradient_THD, sums_PD.sum(0).to(weight_D.dtype)


def _backward_in_blocks(
    gradient_THD: Tensor,
    x_THD: Tensor,
    weight_D: Tensor | None,
    scales_TH: Tensor | None,
    cosines_TD: Tensor,
    sines_TD: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Compute ``backward`` in PyTorch, a block of tokens at a time."""
    x_gradient_THD = torch.empty_like(x_THD, memory_format=torch.contiguous_format)
    wide = torch.promote_types(x_THD.dtype, torch.float32)
    weight_gradient_D = None if weight_D is None else torch.zeros_like(weight_D, dtype=wide)
    for part in _blocks(x_THD):
        # The transpose of a rotation: each half takes back what the other got, by the other's sine.
        turned_back = gradient_THD[part].to(wide)
        turned_back = turned_back * cosines_TD[part, None] - _turned(
            turned_back * sines_TD[part, None]
        )
        if weight_D is not None and scales_TH is not None and weight_gradient_D is not None:
            scale = scales_TH[part][..., None]
            unit = x_THD[part] * scale
            weight_gradient_D += (turned_back * unit).sum((0, 1))
            turned_back = turned_back * weight_D
            # The output does not depend on a head's length: drop the gradient's part along it.
            turned_back = (turned_back - unit * (turned_back * unit).mean(-1, keepdim=True)) * scale
        x_gradient_THD[part] = turned_back
    if weight_D is None or weight_gradient_D is None:
        return x_gradient_THD, None
    return x_gradient_THD, weight_gradient_D.to(weight_D.dtype)


def _turned(x: Tensor) -> Tensor:
    """Rotate every pair by a quarter, (-second half, first half); the inverse is its negative."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _blocks(x_THD: Tensor) -> list[slice]:
    tokens = len(x_THD)
    rows = max(1, BLOCK_BYTES // (4 * x_THD.shape[1] * x_THD.shape[2]))
    return [slice(start, min(tokens, start + rows)) for start in range(0, tokens, rows)]

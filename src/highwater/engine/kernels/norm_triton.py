"""Triton kernels of norm.py: a program computes some whole rows at a time, which it reads once.

Shapes:  N rows  E size of a row  P programs of the backward pass
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUMBERS = 2048
"""Numbers that a program computes at a time; at least one row."""
_WARPS = 8


def normed(x_NE: Tensor, weight_E: Tensor, eps: float, out_NE: Tensor, scales_N1: Tensor) -> None:
    """Write results to the last two arguments; see ``norm.normed``."""
    count, size = x_NE.shape
    rows, numbers = _tile(size)
    if count:
        with torch.cuda.device(x_NE.device):
            _norm_kernel[(triton.cdiv(count, rows),)](
                *(_dense(x_NE), weight_E.contiguous(), out_NE, scales_N1),
                *(_dense(x_NE).stride(0), count, size, eps),
                ROWS=rows,
                NUMBERS=numbers,
                num_warps=_WARPS,
            )


def backward(
    gradient_NE: Tensor,
    x_NE: Tensor,
    weight_E: Tensor,
    scales_N1: Tensor,
    x_gradient_NE: Tensor,
    sums_PE: Tensor,
) -> None:
    """Write to the last two arguments: the gradient of ``x``, and partial sums of the weight's."""
    count, size = x_NE.shape
    rows, numbers = _tile(size)
    gradient_NE, x_NE = _dense(gradient_NE), _dense(x_NE)
    with torch.cuda.device(x_NE.device):
        _norm_backward_kernel[(len(sums_PE),)](
            *(gradient_NE, x_NE, weight_E.contiguous(), scales_N1, x_gradient_NE, sums_PE),
            *(gradient_NE.stride(0), x_NE.stride(0), count, size),
            PROGRAMS=len(sums_PE),
            ROWS=rows,
            NUMBERS=numbers,
            num_warps=_WARPS,
        )


def _tile(size: int) -> tuple[int, int]:
    """Number of rows that a program computes at once, and of elements of a row, a power of two."""
    numbers = triton.next_power_of_2(size)
    return max(1, _NUMBERS // numbers), numbers


def _dense(rows_NE: Tensor) -> Tensor:
    """Make each row's elements contiguous; the rows themselves need not be."""
    return rows_NE if rows_NE.stride(-1) == 1 else rows_NE.contiguous()


@triton.jit
def _norm_kernel(
    x, weight, out, scales, x_stride, count, size, eps, ROWS: tl.constexpr, NUMBERS: tl.constexpr
):
    # Rows times their size passes 2**31 within the lengths we train: offsets are 64 bits wide.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    numbers = tl.arange(0, NUMBERS)
    inside = (rows < count)[:, None] & (numbers < size)[None, :]
    a = tl.load(x + rows[:, None] * x_stride + numbers[None, :], mask=inside, other=0.0)
    a = a.to(tl.float32)
    scale = tl.rsqrt(tl.sum(a * a, axis=1) / size + eps)
    tl.store(scales + rows, scale, mask=rows < count)
    w = tl.load(weight + numbers, mask=numbers < size, other=0.0).to(tl.float32)
    target = out + rows[:, None] * size + numbers[None, :]
    tl.store(target, (a * scale[:, None] * w[None, :]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward_kernel(
    gradients,
    x,
    weight,
    scales,
    x_gradients,
    sums,
    gradient_stride,
    x_stride,
    count,
    size,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, NUMBERS)
    w = tl.load(weight + numbers, mask=numbers < size, other=0.0).to(tl.float32)[None, :]
    # The weight's gradient stays in registers over all rows of a program and is stored once: no
    # atomic additions, so that the same inputs give the same bits.
    total = tl.zeros((ROWS, NUMBERS), tl.float32)
    for turn in range(tl.cdiv(count - program * ROWS, PROGRAMS * ROWS)):
        rows = (turn * PROGRAMS + program) * ROWS + tl.arange(0, ROWS)
        inside = (rows < count)[:, None] & (numbers < size)[None, :]
        scale = tl.load(scales + rows, mask=rows < count, other=0.0)[:, None]
        a = tl.load(x + rows[:, None] * x_stride + numbers[None, :], mask=inside, other=0.0)
        unit = a.to(tl.float32) * scale
        place = gradients + rows[:, None] * gradient_stride + numbers[None, :]
        g = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        total += g * unit
        g = g * w
        # The output does not depend on a row's length: the gradient has no part along the row.
        along = tl.sum(g * unit, axis=1)[:, None] / size
        target = x_gradients + rows[:, None] * size + numbers[None, :]
        tl.store(target, ((g - unit * along) * scale).to(x_gradients.dtype.element_ty), mask=inside)
    tl.store(sums + program * size + numbers, tl.sum(total, axis=0), mask=numbers < size)

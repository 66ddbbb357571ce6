"""Triton kernels of rows.py: one program per row, one read of each logit.

Only 3 N values are stored in float32.

Shapes:  N rows  V vocabulary
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from highwater.model.families import LogitTransform

_BLOCK = 4096
_WARPS = 8


def statistics(
    logits_NV: Tensor, labels_N: Tensor, transform: LogitTransform
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``rows.statistics``: three float32 tensors of shape N."""
    rows, vocabulary = logits_NV.shape
    out_3N = torch.empty(3, rows, dtype=torch.float32, device=logits_NV.device)
    if rows:
        _row_statistics_kernel[(rows,)](
            logits_NV,
            labels_N,
            *out_3N,
            logits_NV.stride(0),
            vocabulary,
            transform.scale,
            transform.soft_cap or 1.0,
            CAPPED=transform.soft_cap is not None,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    return out_3N[0], out_3N[1], out_3N[2]


def backward_(
    logits_NV: Tensor,
    labels_N: Tensor,
    of: tuple[Tensor, Tensor, Tensor],
    logprob_gradient_N: Tensor,
    entropy_gradient_N: Tensor,
    transform: LogitTransform,
) -> None:
    """Overwrite the logits as ``rows.backward_`` does."""
    rows, vocabulary = logits_NV.shape
    if rows:
        _row_backward_kernel[(rows, triton.cdiv(vocabulary, _BLOCK))](
            logits_NV,
            labels_N,
            of[1],
            of[2],
            logprob_gradient_N,
            entropy_gradient_N,
            logits_NV.stride(0),
            vocabulary,
            transform.scale,
            transform.soft_cap or 1.0,
            CAPPED=transform.soft_cap is not None,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )


@triton.jit
def _tanh(x):
    # A series near 0, where 1 - exp(-2x) would lose most of its digits.
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    near = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.2, near, tl.where(x < 0.0, -far, far))


@triton.jit
def _tanh_slope(x):
    # 1 - tanh(x)^2 without that difference, which has no digits left far beyond the cap.
    e = tl.exp(-2.0 * tl.abs(x))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def _transformed(x, scale, cap, CAPPED: tl.constexpr):
    # Without scaling this is a product with 1, which is exact.
    y = x * scale
    if CAPPED:
        y = cap * _tanh(y / cap)
    return y


@triton.jit
def _row_statistics_kernel(
    logits,
    labels,
    logprobs,
    log_normalizers,
    entropies,
    row_stride,
    vocabulary,
    scale,
    cap,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Rows times vocabulary passes 2**31 well within the lengths we train: offsets are 64 bits wide.
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    offsets = tl.arange(0, BLOCK)
    # One running maximum, sum of exponentials and sum of exponentials times logits per lane, merged
    # once at the end.
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocabulary, BLOCK):
        inside = first + offsets < vocabulary
        x = tl.load(start + first + offsets, mask=inside, other=float("-inf")).to(tl.float32)
        x = _transformed(x, scale, cap, CAPPED)
        if CAPPED:  # capping has made minus infinity, beyond the row's end, finite
            x = tl.where(inside, x, float("-inf"))
        new_largest = tl.maximum(largest, x)
        # A lane that has seen only -inf would compute exp(-inf - -inf), and 0 times -inf.
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        kept = tl.exp(largest - shift)
        weight = tl.exp(x - shift)
        total = total * kept + weight
        weighted = weighted * kept + weight * tl.where(x == float("-inf"), 0.0, x)
        largest = new_largest
    peak = tl.max(largest, axis=0)
    # The lanes' sums are each relative to its own maximum: bring them to the largest of all.
    share = tl.exp(largest - peak)
    normalizer = tl.sum(total * share, axis=0)
    log_normalizer = peak + tl.log(normalizer)
    picked = tl.load(start + tl.load(labels + row)).to(tl.float32)
    tl.store(logprobs + row, _transformed(picked, scale, cap, CAPPED) - log_normalizer)
    tl.store(log_normalizers + row, log_normalizer)
    tl.store(entropies + row, log_normalizer - tl.sum(weighted * share, axis=0) / normalizer)


@triton.jit
def _row_backward_kernel(
    logits,
    labels,
    log_normalizers,
    entropies,
    logprob_gradients,
    entropy_gradients,
    row_stride,
    vocabulary,
    scale,
    cap,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Offsets of 64 bits again, and no sum over the row: the forward pass left its results.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    pointers = logits + row * row_stride + columns
    x = tl.load(pointers, mask=inside, other=float("-inf")).to(tl.float32)
    y = _transformed(x, scale, cap, CAPPED)
    log_p = y - tl.load(log_normalizers + row)
    p = tl.exp(log_p)
    surprise = tl.where(p == 0.0, 0.0, log_p) + tl.load(entropies + row)
    for_logprob = tl.load(logprob_gradients + row)
    onehot = tl.where(columns == tl.load(labels + row), 1.0, 0.0)
    gradient = for_logprob * (onehot - p) - tl.load(entropy_gradients + row) * p * surprise
    gradient = gradient * scale
    if CAPPED:
        gradient = gradient * _tanh_slope(x * scale / cap)
    tl.store(pointers, gradient.to(logits.dtype.element_ty), mask=inside)

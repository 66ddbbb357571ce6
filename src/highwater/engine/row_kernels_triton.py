"""The Triton half of row_kernels.py: one program per row, one read of each logit, nothing stored in float32 but N numbers.

Shapes:  N rows  V vocabulary
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8


def logprob(logits_NV: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """See row_kernels.logprob."""
    rows, vocabulary = logits_NV.shape
    out_2N = torch.empty(2, rows, dtype=torch.float32, device=logits_NV.device)
    _logprob_kernel[(rows,)](
        logits_NV, labels_N, out_2N[0], out_2N[1], logits_NV.stride(0), vocabulary, BLOCK=_BLOCK, num_warps=_WARPS
    )
    return out_2N[0], out_2N[1]


def logprob_backward_(logits_NV: Tensor, labels_N: Tensor, log_normalizer_N: Tensor, gradient_N: Tensor) -> None:
    """See row_kernels.logprob_backward_."""
    rows, vocabulary = logits_NV.shape
    _backward_kernel[(rows, triton.cdiv(vocabulary, _BLOCK))](
        logits_NV, labels_N, log_normalizer_N, gradient_N, logits_NV.stride(0), vocabulary, BLOCK=_BLOCK, num_warps=_WARPS
    )


@triton.jit
def _logprob_kernel(logits, labels, logprobs, log_normalizers, row_stride, vocabulary, BLOCK: tl.constexpr):
    # Rows times vocabulary passes 2**31 well within the lengths we train: offsets are 64 bits wide.
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    offsets = tl.arange(0, BLOCK)
    # One running maximum and sum per lane, merged once at the end.
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocabulary, BLOCK):
        x = tl.load(start + first + offsets, mask=first + offsets < vocabulary, other=float("-inf")).to(tl.float32)
        new_largest = tl.maximum(largest, x)
        # A lane that has seen only -inf would compute exp(-inf - -inf).
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        total = total * tl.exp(largest - shift) + tl.exp(x - shift)
        largest = new_largest
    peak = tl.max(largest, axis=0)
    log_normalizer = peak + tl.log(tl.sum(total * tl.exp(largest - peak), axis=0))
    picked = tl.load(start + tl.load(labels + row)).to(tl.float32)
    tl.store(logprobs + row, picked - log_normalizer)
    tl.store(log_normalizers + row, log_normalizer)


@triton.jit
def _backward_kernel(logits, labels, log_normalizers, gradients, row_stride, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    pointers = logits + row * row_stride + columns
    x = tl.load(pointers, mask=inside, other=float("-inf")).to(tl.float32)
    probability = tl.exp(x - tl.load(log_normalizers + row))
    onehot = tl.where(columns == tl.load(labels + row), 1.0, 0.0)
    slope = (onehot - probability) * tl.load(gradients + row)
    tl.store(pointers, slope.to(logits.dtype.element_ty), mask=inside)

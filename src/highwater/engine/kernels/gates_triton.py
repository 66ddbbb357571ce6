"""Triton kernels of gates.py: one pass over contiguous tensors, in place.

Shapes:  T tokens  F intermediate size
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_WARPS = 8


def product_(gate_TF: Tensor, up_TF: Tensor) -> None:
    """Overwrite ``gate_TF`` with ``silu(gate) * up``, as ``gates.product_`` does."""
    assert all(t.is_contiguous() for t in (gate_TF, up_TF)), "products of a tile are whole"
    count = gate_TF.numel()
    if count:
        _gate_product_kernel[(triton.cdiv(count, _BLOCK),)](
            gate_TF, up_TF, count, BLOCK=_BLOCK, num_warps=_WARPS
        )


def backward_(gate_TF: Tensor, up_TF: Tensor, gradient_TF: Tensor) -> None:
    """Overwrite all three arguments, as ``gates.backward_`` does."""
    assert all(t.is_contiguous() for t in (gate_TF, up_TF, gradient_TF)), (
        "products of a tile are whole"
    )
    count = gate_TF.numel()
    if count:
        _gate_backward_kernel[(triton.cdiv(count, _BLOCK),)](
            gate_TF, up_TF, gradient_TF, count, BLOCK=_BLOCK, num_warps=_WARPS
        )


@triton.jit
def _gate_product_kernel(gates, ups, count, BLOCK: tl.constexpr):
    # Tokens times width passes 2**31 in one tile of a whole batch: offsets are 64 bits wide.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    x = tl.load(gates + offsets, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(ups + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(gates + offsets, (x * tl.sigmoid(x) * y).to(gates.dtype.element_ty), mask=inside)


@triton.jit
def _gate_backward_kernel(gates, ups, gradients, count, BLOCK: tl.constexpr):
    # The same arithmetic as in PyTorch's path: float32 throughout, rounded once when stored.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    x = tl.load(gates + offsets, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(ups + offsets, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradients + offsets, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(x)
    silu = x * s
    tl.store(
        gates + offsets, (g * y * (s + silu * (1.0 - s))).to(gates.dtype.element_ty), mask=inside
    )
    tl.store(ups + offsets, (g * silu).to(ups.dtype.element_ty), mask=inside)
    tl.store(gradients + offsets, (silu * y).to(gradients.dtype.element_ty), mask=inside)

"""Two passes over rows of logits: log-probability of a label, and its gradient written over the logits.

On a GPU two Triton kernels read each logit once and store nothing in float32; elsewhere PyTorch does the same in blocks of
rows. Both compute in float32 (float64 for float64 logits).

Shapes:  N rows  V vocabulary
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = 16 * 1024**2
"""Float32 temporaries of the PyTorch path, at the most a few times this."""


def logprob(logits_NV: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """``log softmax(logits)[label]`` and ``log sum exp(logits)`` of each row, both of shape N."""
    if logits_NV.is_cuda and logits_NV.dtype != torch.float64:
        return _triton().logprob(logits_NV, labels_N)
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    normalizers = [block.to(wide).logsumexp(dim=-1) for block in logits_NV.split(_block_rows(logits_NV))]
    log_normalizer_N = torch.cat(normalizers)
    picked_N = logits_NV.gather(1, labels_N[:, None])[:, 0].to(wide)
    return picked_N - log_normalizer_N, log_normalizer_N


def logprob_backward_(logits_NV: Tensor, labels_N: Tensor, log_normalizer_N: Tensor, gradient_N: Tensor) -> None:
    """Overwrite the logits with their gradient: ``(onehot(label) - softmax(logits)) * gradient``."""
    if logits_NV.is_cuda and logits_NV.dtype != torch.float64:
        _triton().logprob_backward_(logits_NV, labels_N, log_normalizer_N, gradient_N)
        return
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    rows = _block_rows(logits_NV)
    for block, labels, log_normalizer, gradient in zip(
        *(t.split(rows) for t in (logits_NV, labels_N, log_normalizer_N, gradient_N)), strict=True
    ):
        slope = block.to(wide).sub_(log_normalizer[:, None]).exp_().mul_(-gradient[:, None])
        slope.scatter_add_(1, labels[:, None], gradient[:, None].to(wide))
        block.copy_(slope)


def _block_rows(logits_NV: Tensor) -> int:
    return max(1, BLOCK_BYTES // (4 * logits_NV.shape[1]))


def _triton() -> Any:
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError("Triton is missing: it comes with PyTorch's CUDA builds for Linux")
    from highwater.engine import row_kernels_triton

    return row_kernels_triton

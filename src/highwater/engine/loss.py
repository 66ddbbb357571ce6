"""Log-probabilities of given tokens from hidden states, without ever holding logits in float32, or (chunked) at all.

Only this is fused; objectives are ordinary functions of the log-probabilities (engine/objective.py).

Shapes:  N tokens whose log-probability is wanted  E hidden size  V vocabulary
Bytes per N x V, forward and backward, at 2 bytes an element: ``full`` 2 (the logits, overwritten by their own gradient),
``chunked`` 0. Measured by bench/loss.py on a GPU.
"""

from typing import Any

import torch
from torch import Tensor

from highwater.engine import row_kernels
from highwater.spec.settings import Loss

CHUNK_BYTES = {"cuda": 512 * 1024**2, "cpu": 32 * 1024**2}
"""Logits alive in the chunked loss: enough rows for efficient matrix products on the device."""


def token_logprobs(hidden_NE: Tensor, weight_VE: Tensor, labels_N: Tensor, *, loss: Loss) -> Tensor:
    """Log-probability of each label, shape N, float32 (float64 for float64 hidden states); differentiable once.

    ``full`` computes the logits once and keeps them for the backward pass; ``chunked`` keeps one number per token and
    computes each chunk's logits twice. Both give the same values and gradients up to the order of summation.
    """
    rows = max(1, len(labels_N)) if loss == "full" else chunk_rows(weight_VE)
    return _TokenLogprobs.apply(hidden_NE, weight_VE, labels_N, rows, loss == "full")


def chunk_rows(weight_VE: Tensor) -> int:
    """Tokens in one chunk of logits: a multiple of 128 that fits ``CHUNK_BYTES``, 128 at least."""
    row_bytes = weight_VE.shape[0] * weight_VE.element_size()
    return max(128, CHUNK_BYTES[weight_VE.device.type] // row_bytes // 128 * 128)


class _TokenLogprobs(torch.autograd.Function):
    """The one place where logits exist."""

    @staticmethod
    def forward(ctx: Any, hidden_NE: Tensor, weight_VE: Tensor, labels_N: Tensor, rows: int, keep_logits: bool) -> Tensor:
        logprobs, log_normalizers = [], []
        logits_NV = None
        for hidden, labels in zip(hidden_NE.split(rows), labels_N.split(rows), strict=True):
            logits_NV = hidden @ weight_VE.T
            logprob_N, log_normalizer_N = row_kernels.logprob(logits_NV, labels)
            logprobs.append(logprob_N)
            log_normalizers.append(log_normalizer_N)
        ctx.rows = rows
        # Not a saved tensor: the backward pass overwrites it, which autograd forbids for tensors it saved.
        ctx.logits_NV = logits_NV if keep_logits else None
        ctx.keep_logits = keep_logits
        ctx.save_for_backward(hidden_NE, weight_VE, labels_N, torch.cat(log_normalizers))
        return torch.cat(logprobs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_NE, weight_VE, labels_N, log_normalizer_N = ctx.saved_tensors
        chunks = zip(*(t.split(ctx.rows) for t in (hidden_NE, labels_N, log_normalizer_N, gradients[0].contiguous())), strict=True)
        if ctx.keep_logits:
            assert ctx.logits_NV is not None, "token_logprobs is differentiable once: its logits were overwritten"
            logits_NV, ctx.logits_NV = ctx.logits_NV, None
            [(hidden, labels, log_normalizer, gradient)] = chunks
            row_kernels.logprob_backward_(logits_NV, labels, log_normalizer, gradient)
            return logits_NV @ weight_VE, logits_NV.T @ hidden, None, None, None
        hidden_gradient_NE = torch.empty_like(hidden_NE)
        weight_gradient_VE = _WeightGradient(weight_VE)
        for gradient_slice, (hidden, labels, log_normalizer, gradient) in zip(
            hidden_gradient_NE.split(ctx.rows), chunks, strict=True
        ):
            logits_NV = hidden @ weight_VE.T
            row_kernels.logprob_backward_(logits_NV, labels, log_normalizer, gradient)
            torch.mm(logits_NV, weight_VE, out=gradient_slice)
            weight_gradient_VE.add(logits_NV, hidden)
        return hidden_gradient_NE, weight_gradient_VE.total(), None, None, None


class _WeightGradient:
    """Sum over chunks of ``logits.T @ hidden``, accumulated in float32 when the weight is narrower."""

    def __init__(self, weight_VE: Tensor) -> None:
        self.dtype = weight_VE.dtype
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.sum_VE = torch.zeros_like(weight_VE, dtype=self.wide)

    def add(self, logits_NV: Tensor, hidden_NE: Tensor) -> None:
        """Add one chunk's share."""
        if self.dtype == self.wide:
            self.sum_VE.addmm_(logits_NV.T, hidden_NE)
        elif logits_NV.is_cuda:
            torch.addmm(self.sum_VE, logits_NV.T, hidden_NE, out_dtype=self.wide, out=self.sum_VE)
        else:
            self.sum_VE += logits_NV.T @ hidden_NE

    def total(self) -> Tensor:
        """The gradient in the weight's own dtype."""
        return self.sum_VE.to(self.dtype)

"""Log-probabilities and entropies of tokens, from hidden states.

Logits are never held in float32, and in the chunked loss never as a whole. Only log-probability and
entropy are fused; objectives are ordinary functions of both (engine/training/objectives.py).

Shapes:  N tokens whose log-probability is computed  E hidden size  V vocabulary

Bytes per N x V, forward and backward, at 2 bytes an element: ``full`` 2 (the logits, overwritten by
their own gradient), ``chunked`` 0; the entropy adds none. Measured by benchmarks/loss.py on a GPU.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from highwater.engine.kernels import rows as row_kernels
from highwater.engine.kernels.rows import RowStatistics
from highwater.engine.models.fused.adapted_linear import WeightGradient
from highwater.model.families import PLAIN, LogitTransform
from highwater.nouns.layout import CHUNK_BYTES
from highwater.nouns.settings import Loss


class TokenStatistics(NamedTuple):
    """Log-probability and entropy of each token, from which objectives are computed.

    float32 (float64 for float64 hidden states); differentiable once.
    """

    logprobs_N: Tensor
    """Log-probability of each label."""
    entropies_N: Tensor
    """Entropy of each token's distribution, in nats."""


class LogitRange:
    """Smallest and largest logit given to the softmax since the last reset, and sums over tokens of
    each token's smallest and largest. Costs a pass over the logits, and four values on the device.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Drop all logits seen so far."""
        self._seen: Tensor | None = None

    def see(self, logits_NV: Tensor, transform: LogitTransform = PLAIN) -> None:
        """Extend the range by these logits of the head, transformed as for the softmax."""
        if not len(logits_NV):
            return
        least_N, largest_N = (
            row_kernels.transformed(each_N.double(), transform)
            for each_N in logits_NV.aminmax(dim=1)
        )
        seen = torch.stack((least_N.min(), largest_N.max(), least_N.sum(), largest_N.sum()))
        if self._seen is not None:
            seen[0] = torch.minimum(seen[0], self._seen[0])
            seen[1] = torch.maximum(seen[1], self._seen[1])
            seen[2:] += self._seen[2:]
        self._seen = seen

    def read(self) -> tuple[float | None, ...]:
        """Return the smallest logit, the largest, and the sums of each token's smallest and
        largest; without a token the first two are None. The host waits for the device.
        """
        return (None, None, 0.0, 0.0) if self._seen is None else (*self._seen.tolist(),)


def token_statistics(
    hidden_NE: Tensor,
    weight_VE: Tensor,
    labels_N: Tensor,
    *,
    loss: Loss,
    transform: LogitTransform = PLAIN,
    logprob_gradient: float | None = None,
    logit_range: LogitRange | None = None,
) -> TokenStatistics:
    """Statistics of the distribution of each token, ``softmax(transform(hidden @ weight.T))``.

    ``full`` computes the logits once and keeps them for the backward pass; ``chunked`` keeps three
    values per token and computes each chunk's logits twice. Both give the same values and gradients
    up to the order of summation.

    ``logprob_gradient`` is the derivative of the caller's loss by each log-probability, if it is
    known beforehand and the entropies are not part of the loss. Then ``chunked`` computes logits
    only once: gradients are computed in the forward pass, and the backward pass returns them,
    ignoring the gradient that it is given. Without autograd nothing is kept, and both losses run in
    chunks. ``logit_range`` is updated by the logits.
    """
    if logprob_gradient is not None and loss == "chunked" and torch.is_grad_enabled():
        return TokenStatistics(
            *_StatisticsOfKnownGradient.apply(
                hidden_NE,
                weight_VE,
                labels_N,
                chunk_rows(weight_VE),
                transform,
                logprob_gradient,
                logit_range,
            )
        )
    keep_logits = loss == "full" and torch.is_grad_enabled()
    rows = max(1, len(labels_N)) if keep_logits else chunk_rows(weight_VE)
    return TokenStatistics(
        *_TokenStatistics.apply(
            hidden_NE, weight_VE, labels_N, rows, transform, keep_logits, logit_range
        )
    )


def chunk_rows(weight_VE: Tensor) -> int:
    """Tokens in one chunk of logits: a multiple of 128 that fits ``CHUNK_BYTES``, 128 at least."""
    row_bytes = weight_VE.shape[0] * weight_VE.element_size()
    return max(128, CHUNK_BYTES[weight_VE.device.type] // row_bytes // 128 * 128)


class _TokenStatistics(torch.autograd.Function):
    """Autograd function that keeps the logits, or recomputes them in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: Tensor,
        weight_VE: Tensor,
        labels_N: Tensor,
        rows: int,
        transform: LogitTransform,
        keep_logits: bool,
        logit_range: LogitRange | None,
    ) -> tuple[Tensor, Tensor]:
        chunks: list[RowStatistics] = []
        logits_NV = None
        for hidden, labels in zip(hidden_NE.split(rows), labels_N.split(rows), strict=True):
            logits_NV = hidden @ weight_VE.T
            if logit_range is not None:
                logit_range.see(logits_NV, transform)
            chunks.append(row_kernels.statistics(logits_NV, labels, transform))
        whole = RowStatistics(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))
        ctx.rows, ctx.transform = rows, transform
        # Not a saved tensor: autograd forbids to overwrite those, as the backward pass does.
        ctx.logits_NV = logits_NV if keep_logits else None
        ctx.keep_logits = keep_logits
        ctx.save_for_backward(hidden_NE, weight_VE, labels_N, *whole)
        return whole.logprob_N, whole.entropy_N

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        hidden_NE, weight_VE, labels_N, *saved = ctx.saved_tensors
        whole = RowStatistics(*saved)
        for_logprob_N, for_entropy_N = (gradient.contiguous() for gradient in gradients)
        if ctx.keep_logits:
            assert ctx.logits_NV is not None, (
                "token_statistics is differentiable once: its logits were overwritten"
            )
            logits_NV, ctx.logits_NV = ctx.logits_NV, None
            row_kernels.backward_(
                logits_NV, labels_N, whole, for_logprob_N, for_entropy_N, ctx.transform
            )
            of_weight_VE = logits_NV.T @ hidden_NE if ctx.needs_input_grad[1] else None
            return logits_NV @ weight_VE, of_weight_VE, None, None, None, None, None
        hidden_gradient_NE = torch.empty_like(hidden_NE)
        weight_gradient_VE = WeightGradient(weight_VE) if ctx.needs_input_grad[1] else None
        per_token = (hidden_gradient_NE, hidden_NE, labels_N, for_logprob_N, for_entropy_N, *whole)
        for hidden_gradient, hidden, labels, for_logprob, for_entropy, *of in zip(
            *(t.split(ctx.rows) for t in per_token), strict=True
        ):
            logits_NV = hidden @ weight_VE.T
            row_kernels.backward_(
                logits_NV, labels, RowStatistics(*of), for_logprob, for_entropy, ctx.transform
            )
            torch.mm(logits_NV, weight_VE, out=hidden_gradient)
            if weight_gradient_VE is not None:
                weight_gradient_VE.add(logits_NV, hidden)
        return hidden_gradient_NE, _total(weight_gradient_VE), None, None, None, None, None


class _StatisticsOfKnownGradient(torch.autograd.Function):
    """Autograd function that computes its gradients in the forward pass, from the same logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: Tensor,
        weight_VE: Tensor,
        labels_N: Tensor,
        rows: int,
        transform: LogitTransform,
        logprob_gradient: float,
        logit_range: LogitRange | None,
    ) -> tuple[Tensor, Tensor]:
        chunks: list[RowStatistics] = []
        hidden_gradient_NE = torch.empty_like(hidden_NE)
        weight_gradient_VE = WeightGradient(weight_VE) if ctx.needs_input_grad[1] else None
        for hidden, labels, hidden_gradient in zip(
            *(t.split(rows) for t in (hidden_NE, labels_N, hidden_gradient_NE)), strict=True
        ):
            logits_NV = hidden @ weight_VE.T
            if logit_range is not None:
                logit_range.see(logits_NV, transform)
            of = row_kernels.statistics(logits_NV, labels, transform)
            chunks.append(of)
            logprob_gradients_N, nothing_N = (
                torch.full_like(of.logprob_N, logprob_gradient),
                torch.zeros_like(of.entropy_N),
            )
            row_kernels.backward_(logits_NV, labels, of, logprob_gradients_N, nothing_N, transform)
            torch.mm(logits_NV, weight_VE, out=hidden_gradient)
            if weight_gradient_VE is not None:
                weight_gradient_VE.add(logits_NV, hidden)
        ctx.gradients = hidden_gradient_NE, _total(weight_gradient_VE)
        entropies_N = torch.cat([of.entropy_N for of in chunks])
        ctx.mark_non_differentiable(entropies_N)
        return torch.cat([of.logprob_N for of in chunks]), entropies_N

    @staticmethod
    def backward(
        ctx: Any, *_: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None, None, None, None]:
        assert ctx.gradients is not None, (
            "token_statistics is differentiable once: its gradients were handed over"
        )
        (hidden_gradient_NE, weight_gradient_VE), ctx.gradients = ctx.gradients, None
        return hidden_gradient_NE, weight_gradient_VE, None, None, None, None, None


def _total(gradient: WeightGradient | None) -> Tensor | None:
    """Return the gradient of the head's weight; None if it is frozen."""
    return None if gradient is None else gradient.total()

"""Rows: statistics of each row of logits, and their gradient, written over the logits.

The statistics are the log-probability of a label, the log of the normalizer, and the entropy of the
distribution. A GPU runs two Triton kernels that read each logit once and store in float32 only
three values per row; otherwise PyTorch does the same in blocks of rows. Both compute in float32
(float64 for float64 logits). Logits stay as the head makes them: if a family scales or caps them,
both passes do so as they read, and no second buffer is as wide as the vocabulary.

Shapes:  N rows  V vocabulary
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from highwater.engine.kernels.gates import triton_twin
from highwater.model.families import PLAIN, LogitTransform
from highwater.units import MIB

_LOGITS_BYTES = 16 * MIB
"""Bytes of one float32 block of logits in the PyTorch path; a few blocks are alive at a time."""

_triton = partial(triton_twin, __name__)


class RowStatistics(NamedTuple):
    """Log-probability of the label, log-sum-exp and entropy of each row of logits."""

    logprob_N: Tensor
    """``log softmax(logits)[label]``."""
    log_normalizer_N: Tensor
    """``log sum exp(logits)``."""
    entropy_N: Tensor
    """``- sum p log p`` with ``p = softmax(logits)``, in nats."""


def statistics(
    logits_NV: Tensor, labels_N: Tensor, transform: LogitTransform = PLAIN
) -> RowStatistics:
    """Compute the statistics of every row of logits, scaled and capped by ``transform``.

    A logit of minus infinity has probability 0 and adds nothing, unless it is capped.
    """
    if logits_NV.is_cuda and logits_NV.dtype != torch.float64:
        return RowStatistics(*_triton().statistics(logits_NV, labels_N, transform))
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    normalizers, entropies = [], []
    for block in logits_NV.split(_block_rows(logits_NV)):
        log_p = transformed(block.to(wide), transform)
        log_normalizer = log_p.logsumexp(dim=-1)
        log_p = log_p - log_normalizer[:, None]
        p = log_p.exp()
        normalizers.append(log_normalizer)
        entropies.append(-_finite(log_p, p).mul_(p).sum(dim=-1))
    log_normalizer_N = torch.cat(normalizers)
    picked_N = transformed(logits_NV.gather(1, labels_N[:, None])[:, 0].to(wide), transform)
    return RowStatistics(picked_N - log_normalizer_N, log_normalizer_N, torch.cat(entropies))


def backward_(
    logits_NV: Tensor,
    labels_N: Tensor,
    of: RowStatistics,
    logprob_gradient_N: Tensor,
    entropy_gradient_N: Tensor,
    transform: LogitTransform = PLAIN,
) -> None:
    """Overwrite the logits with their gradient, from the gradients of log-probability and entropy.

    ``d logprob / d y_j = [j = label] - p_j`` and ``d entropy / d y_j = - p_j (log p_j + entropy)``
    for a transformed logit y; ``d y / d x = scale (1 - (y / cap)^2)`` for the original logit x.
    """
    if logits_NV.is_cuda and logits_NV.dtype != torch.float64:
        _triton().backward_(
            logits_NV, labels_N, of, logprob_gradient_N, entropy_gradient_N, transform
        )
        return
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    rows = _block_rows(logits_NV)
    gradients = (logprob_gradient_N, entropy_gradient_N)
    whole = (logits_NV, labels_N, of.log_normalizer_N, of.entropy_N, *gradients)
    for block, labels, log_normalizer, entropy, for_logprob, for_entropy in zip(
        *(tensor.split(rows) for tensor in whole), strict=True
    ):
        log_p = transformed(block.to(wide), transform) - log_normalizer[:, None]
        p = log_p.exp()
        # -p (entropy_gradient (log p + entropy) + logprob_gradient), all in place.
        gradient = _finite(log_p, p).add_(entropy[:, None]).mul_(for_entropy[:, None])
        gradient.add_(for_logprob[:, None]).mul_(p).neg_()
        gradient.scatter_add_(1, labels[:, None], for_logprob[:, None].to(wide))
        if transform.scale != 1:
            gradient.mul_(transform.scale)
        if transform.soft_cap is not None:
            gradient.mul_(_tanh_slope(block.to(wide), transform))
        block.copy_(gradient)


def transformed(logits: Tensor, transform: LogitTransform) -> Tensor:
    """Return logits of any shape, scaled and capped; the same tensor if the transform is plain."""
    if transform.scale != 1:
        logits = logits * transform.scale
    if transform.soft_cap is None:
        return logits
    return (logits / transform.soft_cap).tanh_().mul_(transform.soft_cap)


def _tanh_slope(logits: Tensor, transform: LogitTransform) -> Tensor:
    """``1 - tanh(x)^2`` for x = scaled logits over the cap, exact even far beyond the cap."""
    assert transform.soft_cap is not None
    powers = (logits * (transform.scale / transform.soft_cap)).abs_().mul_(-2).exp_()
    return powers.mul(4).div_(powers.add_(1).square_())


def _finite(log_p: Tensor, p: Tensor) -> Tensor:
    """Set ``log p`` to 0 where ``p`` is 0, in place: a sum of products then adds 0, not NaN."""
    return log_p.masked_fill_(p == 0, 0.0)


def _block_rows(logits_NV: Tensor) -> int:
    return max(1, _LOGITS_BYTES // (4 * logits_NV.shape[1]))

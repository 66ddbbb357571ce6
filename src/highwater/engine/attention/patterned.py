"""Patterned attention: causal attention with a sliding window, capped scores or sinks.

A run of documents of one length is one call: of flash attention within a window on a GPU, if its
proof passed (``kernel_proof``); of the hardware's own kernel for documents no longer than the
window; of ``wide_block`` for heads that are too wide for it; else of ``plain_block``. Nothing
quadratic is stored.

Shapes:  B 1  S packed tokens  H query heads  K key/value heads  D head size  d documents of a run
         of equal lengths  l tokens of one of them
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from highwater.engine.attention import kernel_proof as window_proof
from highwater.engine.attention.block_attention import Block, WindowedBlock, attended
from highwater.engine.attention.dense import join_sinks_, pieces_of, sink_gradient
from highwater.engine.attention.plain_block import PlainBlock
from highwater.engine.attention.wide_block import WideBlock
from highwater.nouns.hardware import Kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Attention of one layer: scaling of scores, keys that are read, additions to the softmax."""

    scaling: float
    window_tokens: int | None = None
    """Number of tokens that a token reads, itself included; None: all before it in its document."""
    soft_cap: float | None = None
    """Bound of a score's magnitude: ``cap * tanh(score / cap)``; None: no cap."""
    is_wide: bool = False
    """True if heads are wider than a fused kernel takes (``wide_block``)."""
    sinks_H: Tensor | None = None
    """One score for each query head that joins the softmax without a value; None: no sinks."""

    def cuts(self, length_tokens: int) -> bool:
        """True if the window is shorter than a document of ``length_tokens``."""
        return self.window_tokens is not None and self.window_tokens < length_tokens

    def is_fused_up_to(self, length_tokens: int) -> bool:
        """True if the hardware's fused kernel computes documents of this length (sinks aside)."""
        return not (self.soft_cap or self.is_wide or self.cuts(length_tokens))

    def is_dense_up_to(self, length_tokens: int) -> bool:
        """True if documents up to this length attend in full, without sinks."""
        return self.sinks_H is None and self.is_fused_up_to(length_tokens)

    def of_heads(self, rank: int, degree: int) -> "Pattern":
        """Return the pattern for one rank's heads; the ``degree`` ranks have equal shares."""
        sinks = self.sinks_H
        return self if sinks is None else replace(self, sinks_H=sinks.chunk(degree)[rank])


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Lengths of the packed documents of one attention call, and how they attend."""

    lengths: tuple[int, ...]
    pattern: Pattern
    kernel: Kernel
    in_pieces: bool = False
    """True in memory-only trials: documents that the pattern does not cut attend in short pieces,
    as their time is quadratic (docs/decisions/006); with capped scores only the rows that take the
    most memory are computed."""


class PatternAttention(NamedTuple):
    """Output of attention by a pattern, with the log-sum-exp of each query."""

    output_BSHD: Tensor
    log_sums_BHS: Tensor
    """Log-sum-exp of each query, in float32 or wider; it has no gradient."""


def attend_in_pattern(
    query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, *, documents: Documents
) -> PatternAttention:
    """Causal attention of each document over itself, by the documents' pattern."""
    assert sum(documents.lengths) == query_BHSD.shape[2], "the documents are all that is packed"
    alone = replace(documents, pattern=replace(documents.pattern, sinks_H=None))
    output_BHSD, log_sums_BHS = _Patterned.apply(
        query_BHSD, key_BKSD, value_BKSD, documents.pattern.sinks_H, alone
    )
    return PatternAttention(output_BHSD.transpose(1, 2), log_sums_BHS)


class _SameLength(NamedTuple):
    """Neighbouring documents of one length."""

    start: int
    stop: int
    documents: int

    def of(self, tensor_BXSn: Tensor) -> Tensor:
        """View these documents' part of a tensor: dXl, then any further dimensions."""
        row_XSn = tensor_BXSn[0, :, self.start : self.stop]
        return row_XSn.unflatten(1, (self.documents, -1)).transpose(0, 1)

    def block(
        self, documents: Documents, query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor
    ) -> Block | WindowedBlock | PlainBlock:
        """Return these documents' attention block, for the kernel that can compute it."""
        pattern, device = documents.pattern, query_BHSD.device
        tensors = (self.of(query_BHSD), self.of(key_BKSD), self.of(value_BKSD))
        if pattern.is_fused_up_to((self.stop - self.start) // self.documents):
            return Block(*tensors, True, pattern.scaling, documents.kernel)
        window, cap = pattern.window_tokens, pattern.soft_cap
        if pattern.is_wide and cap is None:
            return WideBlock(*tensors, pattern.scaling, window, None, documents.in_pieces)
        if window is None or cap is not None:  # no fused kernel caps scores
            return PlainBlock(*tensors, pattern.scaling, window, cap, documents.in_pieces)
        if window_proof.computes_windows(device, query_BHSD.dtype, query_BHSD.shape[-1]):
            return WindowedBlock(*tensors, pattern.scaling, window)
        return PlainBlock(*tensors, pattern.scaling, window)


def _runs(documents: Documents, device: torch.device) -> Iterator[_SameLength]:
    start = 0
    for length, group in groupby(documents.lengths):
        count = len(list(group))
        stop = start + count * length
        if documents.in_pieces and documents.pattern.is_fused_up_to(length):
            count = pieces_of(stop - start, count, device)
        yield _SameLength(start, stop, count)
        start = stop


class _Patterned(torch.autograd.Function):
    """Autograd function over all documents together: no run keeps a graph."""

    @staticmethod
    def forward(
        ctx: Any,
        query_BHSD: Tensor,
        key_BKSD: Tensor,
        value_BKSD: Tensor,
        sinks_H: Tensor | None,
        documents: Documents,
    ) -> tuple[Tensor, Tensor]:
        output_BHSD, log_sums_BHS = attended(
            lambda: _forward(query_BHSD, key_BKSD, value_BKSD, sinks_H, documents)
        )
        ctx.save_for_backward(query_BHSD, key_BKSD, value_BKSD, sinks_H, output_BHSD, log_sums_BHS)
        ctx.documents = documents
        ctx.mark_non_differentiable(log_sums_BHS)
        return output_BHSD, log_sums_BHS

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        query_BHSD, key_BKSD, value_BKSD, sinks_H, output_BHSD, log_sums_BHS = ctx.saved_tensors
        documents: Documents = ctx.documents
        found = [
            run.block(documents, query_BHSD, key_BKSD, value_BKSD).backward(
                *(run.of(tensor) for tensor in (gradients[0], output_BHSD, log_sums_BHS))
            )
            for run in _runs(documents, query_BHSD.device)
        ]
        query, key, value = (_together(parts) for parts in zip(*found, strict=True))
        of_sinks = sink_gradient(gradients[0], output_BHSD, log_sums_BHS, sinks_H)
        return query, key, value, of_sinks, None


def _forward(
    query_BHSD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    sinks_H: Tensor | None,
    documents: Documents,
) -> tuple[Tensor, Tensor]:
    """Attention output, BHSD, and the log-sum-exp of each query, BHS, sinks included."""
    found = [
        run.block(documents, query_BHSD, key_BKSD, value_BKSD).forward()
        for run in _runs(documents, query_BHSD.device)
    ]
    output_BHSD, log_sums_BHS = (_together(parts) for parts in zip(*found, strict=True))
    if sinks_H is not None:
        log_sums_BHS = join_sinks_(output_BHSD, log_sums_BHS, sinks_H)
    return output_BHSD, log_sums_BHS


def _together(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the runs' parts, dXlD or dXl, to one row: BXSD, dense by tokens, or BXS."""
    if parts[0].ndim == 3:
        rows_XS = [part.transpose(0, 1).flatten(1) for part in parts]
        return (rows_XS[0] if len(rows_XS) == 1 else torch.cat(rows_XS, dim=1))[None]
    rows_SXD = [part.transpose(1, 2).flatten(0, 1) for part in parts]
    return (rows_SXD[0] if len(rows_SXD) == 1 else torch.cat(rows_SXD))[None].transpose(1, 2)

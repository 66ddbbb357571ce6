"""Mixed lengths: causal attention of a packed row whose documents differ in length, in few kernel
calls of few shapes, forward and backward.

cuDNN is the fastest kernel for long documents, but makes a plan for every new shape: about 0.1 s
each, and a quarter of a megabyte of GPU memory that is never freed (docs/results/mixed_lengths).
Flash attention takes documents of any lengths in one call, but is slower on long ones. So the
queries of a long document up to a multiple of a sixteenth of its size go through cuDNN (its
"front"); the few left over go through flash attention in one call, and those of all short documents
in another. No query is computed twice, and nothing is padded.

Shapes:  B 1  S packed tokens  H query heads  K key/value heads  D head size  q queries of a call
         k keys of a call  n documents of a call
Source: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691, whose causal mask is aligned to the
        last query and key where there are fewer queries than keys.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from highwater.engine.attention.block_attention import Block, VariedBlock, attended
from highwater.nouns.corpus import pieces
from highwater.nouns.hardware import Kernel

LONG_TOKENS = 8192
"""Shortest document that goes through cuDNN, if the kernel is cuDNN."""
_SHAPES = 16
"""Number of shapes that cuDNN meets for every doubling of the length."""
_TILE = 128
"""Tokens by which flash attention pads each document in the workspace of its backward pass."""


class Front(NamedTuple):
    """The first tokens of a long document, whose queries cuDNN computes."""

    start: int
    stop: int
    is_whole: bool
    """True if the front has all queries of the document."""


class SharedCall(NamedTuple):
    """Neighbouring documents whose queries share one flash attention call: all queries of short
    documents, or the queries of long documents that are in no front.
    """

    queries: tuple[tuple[int, int], ...]
    """Start and stop in the row of each document's queries."""
    keys: tuple[tuple[int, int], ...]

    @property
    def span(self) -> tuple[int, int]:
        """Start and stop, in the row, of the keys of all documents in the call."""
        return self.keys[0][0], self.keys[-1][1]


class Calls(NamedTuple):
    """The kernel calls that compute each query of a packed row once."""

    fronts: tuple[Front, ...]
    shared: tuple[SharedCall, ...]


@lru_cache(maxsize=8)
def calls_of(document_lengths: tuple[int, ...], *, long_tokens: int | None) -> Calls:
    """Plan the calls for a row of documents; ``long_tokens=None``: only flash attention."""
    fronts: list[Front] = []
    shared: list[list[tuple[tuple[int, int], tuple[int, int]]]] = []
    row_tokens, taken = sum(document_lengths), 0
    is_open, of_long = False, False
    for start, stop in pairwise(accumulate(document_lengths, initial=0)):
        is_long = long_tokens is not None and stop - start >= long_tokens
        first = start + (front_tokens(stop - start) if is_long else 0)
        if is_long:
            fronts.append(Front(start, first, is_whole=first == stop))
        if first == stop:
            is_open = False  # the keys of a call are one slice
            continue
        # Split calls so that none takes more memory than a row of one document would (but for a
        # tile), and none has to copy the queries of short documents.
        own = stop - first + _TILE
        if not is_open or is_long != of_long or taken + own > row_tokens:
            shared.append([])
            taken = 0
        is_open, of_long, taken = True, is_long, taken + own
        shared[-1].append(((first, stop), (start, stop)))
    return Calls(tuple(fronts), tuple(SharedCall(*zip(*call, strict=True)) for call in shared))


def front_tokens(length: int) -> int:
    """Round a length down to a multiple of 1/16 of the largest power of two that it reaches."""
    step = max(1, 2 ** (length.bit_length() - 1) // _SHAPES)
    return length // step * step


def attend_mixed(
    query_BHSD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    *,
    document_lengths: Sequence[int],
    scaling: float,
    kernel: Kernel,
    long_tokens: int = LONG_TOKENS,
    in_pieces: bool = False,
) -> Tensor:
    """Causal attention of each document over itself, shape BSHD. ``in_pieces`` is for memory-only
    trials: cuDNN's calls, whose time is quadratic in the length, run on short pieces.
    """
    calls = calls_of(
        tuple(document_lengths), long_tokens=long_tokens if kernel == "cudnn" else None
    )
    how = _How(scaling, in_pieces)
    output_SHD: Tensor = _Mixed.apply(query_BHSD, key_BKSD, value_BKSD, calls, how)
    return output_SHD[None]


class _How(NamedTuple):
    scaling: float
    in_pieces: bool


class _Mixed(torch.autograd.Function):
    """Autograd function over all documents together: no kernel call keeps a graph."""

    @staticmethod
    def forward(
        ctx: Any, query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, calls: Calls, how: _How
    ) -> Tensor:
        output_SHD, *log_sums = attended(
            lambda: _forward(query_BHSD, key_BKSD, value_BKSD, calls, how)
        )
        ctx.save_for_backward(query_BHSD, key_BKSD, value_BKSD, output_SHD, *log_sums)
        ctx.calls, ctx.how = calls, how
        return output_SHD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        (gradient_SHD,) = gradients
        query_BHSD, key_BKSD, value_BKSD, output_SHD, *log_sums = ctx.saved_tensors
        calls: Calls = ctx.calls
        rows = _rows_of(query_BHSD, key_BKSD, value_BKSD)
        found = _Gradients(rows)
        for front, sums in zip(calls.fronts, log_sums, strict=False):
            place = slice(front.start, front.stop)
            block = _front(front, rows, ctx.how)
            count = len(block.query_BHQD)
            gradients_BXQD = block.backward(
                _by_heads(gradient_SHD[place], count), _by_heads(output_SHD[place], count), sums
            )
            found.add_front(front, [_by_tokens(each) for each in gradients_BXQD])
        for call, sums in zip(calls.shared, log_sums[len(calls.fronts) :], strict=True):
            gradients_kXD = _shared(call, rows, ctx.how.scaling).backward(
                _of_queries(gradient_SHD, call), _of_queries(output_SHD, call), sums
            )
            found.add_shared(call, list(gradients_kXD))
        query, key, value = (found.whole(number).transpose(0, 1)[None] for number in range(3))
        return query, key, value, None, None


RowTensors = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values of a row: SHD, SKD and SKD."""


class _Gradients:
    """Gradients of a row's queries, keys and values, collected from all kernel calls."""

    def __init__(self, rows: RowTensors) -> None:
        self._rows = rows
        self._parts: list[list[tuple[int, Tensor]]] = [[], [], []]
        self._of_fronts: list[tuple[Front, list[Tensor]]] = []

    def add_front(self, front: Front, gradients_QXD: list[Tensor]) -> None:
        """Add a front's gradients; those of its keys wait for the rest of the document, if any."""
        query, *others = gradients_QXD
        self._parts[0].append((front.start, query))
        if front.is_whole:
            for parts, each in zip(self._parts[1:], others, strict=True):
                parts.append((front.start, each))
        else:
            self._of_fronts.append((front, others))

    def add_shared(self, call: SharedCall, gradients_kXD: list[Tensor]) -> None:
        """Add a shared call's gradients, and waiting gradients of fronts that share its keys."""
        query, *others = gradients_kXD
        for row, own in _places(call):
            self._parts[0].append((row.start, query[own]))
        first, last = call.span
        left: list[tuple[Front, list[Tensor]]] = []
        for front, of_front in self._of_fronts:
            if not first <= front.start < last:
                left.append((front, of_front))
                continue
            for whole, part in zip(others, of_front, strict=True):
                whole[front.start - first : front.stop - first] += part
        self._of_fronts = left
        for parts, each in zip(self._parts[1:], others, strict=True):
            parts.append((first, each))

    def whole(self, number: int) -> Tensor:
        """Return the gradient of queries (0), keys (1) or values (2), SXD, and drop its parts."""
        parts, self._parts[number] = self._parts[number], []
        if len(parts) == 1:
            return parts[0][1]
        found = torch.empty_like(self._rows[number], memory_format=torch.contiguous_format)
        for start, part in parts:
            found[start : start + len(part)] = part
        return found


def _forward(
    query_BHSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, calls: Calls, how: _How
) -> tuple[Tensor, ...]:
    """Attention output, SHD, and the log-sum-exps of each call."""
    rows = _rows_of(query_BHSD, key_BKSD, value_BKSD)
    output_SHD = torch.empty_like(rows[0], memory_format=torch.contiguous_format)
    log_sums: list[Tensor] = []
    for front in calls.fronts:
        part_BHQD, sums = _front(front, rows, how).forward()
        output_SHD[front.start : front.stop] = _by_tokens(part_BHQD)
        log_sums.append(sums)
    for call in calls.shared:
        part_qHD, sums = _shared(call, rows, how.scaling).forward()
        for row, own in _places(call):
            output_SHD[row] = part_qHD[own]
        log_sums.append(sums)
    return output_SHD, *log_sums


def _front(front: Front, rows: RowTensors, how: _How) -> Block:
    count = (pieces(front.stop - front.start, "cuda") or 1) if how.in_pieces else 1
    query, key, value = (_by_heads(row[front.start : front.stop], count) for row in rows)
    return Block(query, key, value, True, how.scaling, "cudnn")


def _shared(call: SharedCall, rows: RowTensors, scaling: float) -> VariedBlock:
    query_SHD, *others = rows
    key_kKD, value_kKD = (row[slice(*call.span)] for row in others)
    return VariedBlock(
        _of_queries(query_SHD, call),
        key_kKD,
        value_kKD,
        tuple(stop - start for start, stop in call.queries),
        tuple(stop - start for start, stop in call.keys),
        scaling,
    )


def _of_queries(row_SHD: Tensor, call: SharedCall) -> Tensor:
    """Return the queries of a call, concatenated: qHD."""
    parts = [row_SHD[row] for row, _ in _places(call)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _places(call: SharedCall) -> list[tuple[slice, slice]]:
    """Locate a call's queries in the row and in the call; adjacent ranges are joined."""
    joined: list[tuple[int, int]] = []
    for start, stop in call.queries:
        if joined and start == joined[-1][1]:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    ends = accumulate(stop - start for start, stop in joined)
    return [
        (slice(start, stop), slice(end - (stop - start), end))
        for (start, stop), end in zip(joined, ends, strict=True)
    ]


def _rows_of(*tensors_BXSD: Tensor) -> RowTensors:
    """View tensors as rows of tokens, SXD, with a token's heads adjacent, as projections return
    them: cuDNN's plans depend on strides, which otherwise would depend on the row's length.
    """
    query, key, value = (tensor[0].transpose(0, 1) for tensor in tensors_BXSD)
    rows = (query, key, value)
    is_so = all(row.stride(0) >= row.stride(1) for row in rows)
    return rows if is_so else (query.contiguous(), key.contiguous(), value.contiguous())


def _by_heads(row_QXD: Tensor, count: int) -> Tensor:
    """View a row as a batch of ``count`` equal documents or pieces: BXQD."""
    return row_QXD.unflatten(0, (count, -1)).transpose(1, 2)


def _by_tokens(tensor_BXQD: Tensor) -> Tensor:
    return tensor_BXQD.transpose(1, 2).flatten(0, 1)

"""Branches: which tokens of a packed row attend to which, and, if a ring shares the row, which
tiles each rank computes with and which tokens other ranks send it.

A branch cuts documents into rows: a whole document, or every r-th token of a segment of one. Each
row is attended causally, in full or by a sparse pattern for its length; results do not depend on
the number of ranks. Index arrays are made on the host, once for a layout, and cached.

Shapes:  T tokens that a rank holds  B blocks of all rows  R tiles that a rank holds  E pairs of
         tiles
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from highwater.engine.attention.block_table import BlockTable, TilePairs, Tiles, block_tables
from highwater.engine.parallel.sequence_layout import Integers, SequenceLayout
from highwater.errors import UsageError
from highwater.nouns.sparse_pattern import SparsePatternConfig

_DENSE_BLOCK = 128
"""Tokens of a block in a row that is attended in full."""


class Branch(NamedTuple):
    """A branch of dilated attention: every ``rate``-th token of a segment, and some heads."""

    segment: int | None = None
    """Tokens of a segment; None: whole documents."""
    rate: int = 1
    offset: int = 0

    @property
    def heads(self) -> slice:
        """Slice of the query heads that use this branch."""
        return slice(self.offset, None, self.rate)

    def row_lengths(self, document_lengths: Sequence[int]) -> Integers:
        """Tokens of each row, document by document."""
        lengths = np.array(document_lengths)
        if self.segment is not None:
            counts = -(-lengths // self.segment)
            last = lengths - (counts - 1) * self.segment
            lengths = np.full(counts.sum(), self.segment)
            lengths[counts.cumsum() - 1] = last
        return (lengths - self.offset + self.rate - 1).clip(min=0) // self.rate

    def places(
        self, document_lengths: Sequence[int], documents_T: Integers, offsets_T: Integers
    ) -> tuple[Integers, Integers, Integers]:
        """Locate the held tokens in the branch: index into T, row, and position in the row."""
        is_in_T = documents_T < len(document_lengths)
        if self.segment is None:
            held = np.flatnonzero(is_in_T)
            return held, documents_T[held], offsets_T[held]
        within_T = offsets_T % self.segment
        held = np.flatnonzero(is_in_T & (within_T % self.rate == self.offset))
        segments = -(-np.array(document_lengths) // self.segment)
        first_row = segments.cumsum() - segments
        rows = first_row[documents_T[held]] + offsets_T[held] // self.segment
        return held, rows, within_T[held] // self.rate


def dilated_branches(
    segment_lengths: Sequence[int], dilation_rates: Sequence[int], heads: int
) -> tuple[Branch, ...]:
    """Return the branches of dilated attention: one for each offset of each dilation rate."""
    return tuple(
        Branch(segment, rate, offset)
        for segment, rate in zip(segment_lengths, dilation_rates, strict=True)
        for offset in range(min(rate, heads))
    )


class _Held(NamedTuple):
    """Tiles of a branch that one rank holds, and the block of each tile, counted over all rows."""

    tiles: Tiles
    blocks_R: Integers


@dataclass(frozen=True, eq=False)
class Exchange:
    """What one rank computes with another's keys, and the tokens whose keys are sent."""

    pairs: tuple[TilePairs, ...]
    """Passes to merge; their key tiles index the tokens that are sent, or the rank's own."""
    sent_T: Tensor | None
    """Indices of the other rank's tokens that are sent, in order; None if the keys are our own."""

    @property
    def tokens(self) -> int:
        """Number of tokens whose keys and values are sent."""
        return 0 if self.sent_T is None else len(self.sent_T)


@lru_cache(maxsize=64)
def exchange(
    layout: SequenceLayout,
    branch: Branch,
    pattern: SparsePatternConfig | None,
    *,
    is_causal: bool,
    rank: int,
    source: int,
    device: torch.device,
) -> Exchange:
    """Find the tile pairs of queries of ``rank`` and keys of ``source``; no pattern: all keys.

    Raises UsageError for a ratio that contradicts the pattern's window.
    """
    queries, keys = _held(layout, branch, pattern, rank), _held(layout, branch, pattern, source)
    found = [
        _tile_pairs(table, queries, keys, is_causal=is_causal)
        for table in _tables(layout, branch, pattern, is_causal=is_causal)
    ]
    if source == rank:
        return Exchange(tuple(_on(pairs, device) for pairs in found), None)
    columns = [pairs.columns[0].numpy() for pairs in found]
    needed = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *columns]))
    counts = keys.tiles.counts_R.numpy()[needed]
    sent = _runs(keys.tiles.places_R.numpy()[needed], counts, keys.tiles.step)
    offsets = keys.tiles.offsets_R.numpy()[needed]
    places = counts.cumsum() - counts
    arrived = _tiles(keys.tiles.size, len(sent), offsets, counts, places)
    renumbered: list[TilePairs] = []
    for pairs in (each for each in found if each.columns.shape[1]):
        columns = torch.from_numpy(np.searchsorted(needed, pairs.columns.numpy())).int()
        renumbered.append(_on(replace(pairs, keys=arrived, columns=columns), device))
    return Exchange(tuple(renumbered), torch.from_numpy(sent).to(device))


def _block_size(pattern: SparsePatternConfig | None) -> int:
    return _DENSE_BLOCK if pattern is None else pattern.block_size


@lru_cache(maxsize=64)
def _held(
    layout: SequenceLayout, branch: Branch, pattern: SparsePatternConfig | None, rank: int
) -> _Held:
    share, size = layout.share_of(rank), _block_size(pattern)
    held, rows, within = branch.places(layout.document_lengths, share.documents_T, share.offsets_T)
    row_blocks = -(-branch.row_lengths(layout.document_lengths) // size)
    blocks = (row_blocks.cumsum() - row_blocks)[rows] + within // size
    is_next = (np.diff(blocks) == 0) & (np.diff(within) == 1) & (np.diff(held) == branch.rate)
    first = np.flatnonzero(np.concatenate([np.ones(min(1, len(held)), dtype=bool), ~is_next]))
    counts = np.diff(first, append=len(held))
    tiles = _tiles(size, len(share.offsets_T), within[first], counts, held[first], branch.rate)
    return _Held(tiles, blocks[first])


def _tiles(
    size: int, held: int, offsets_R: Integers, counts_R: Integers, places_R: Integers, step: int = 1
) -> Tiles:
    # if full tiles follow each other, cutting is a view and copies nothing
    stretch = np.arange(len(places_R)) * size
    is_whole = (counts_R[:-1] == size).all() and np.array_equal(places_R, stretch)
    numbers = (torch.from_numpy(each) for each in (offsets_R, counts_R, places_R))
    in_order = bool(is_whole and step == 1 and counts_R.sum() == held)
    return Tiles(size, held, *numbers, step=step, in_order=in_order)


class _AllRows(NamedTuple):
    """One table over all rows, with blocks numbered consecutively."""

    starts_B: Integers
    columns_E: Integers
    table: BlockTable
    """Table of the longest row, for its bounds: window and key range."""


@lru_cache(maxsize=16)
def _tables(
    layout: SequenceLayout, branch: Branch, pattern: SparsePatternConfig | None, *, is_causal: bool
) -> tuple[_AllRows, ...]:
    size = _block_size(pattern)
    every: list[tuple[BlockTable, ...]] = []
    for length in layout.document_lengths:
        # the published ratios depend on the length of the whole document
        of_document = None if pattern is None else pattern.at(length)
        every += [
            _tables_of_row(of_document, row, size, is_causal=is_causal)
            for row in branch.row_lengths((length,)).tolist()
            if row
        ]
    found: list[_AllRows] = []
    for tables in zip(*every, strict=True):
        counts = [np.zeros(1, dtype=np.int64), *(table.starts.diff().numpy() for table in tables)]
        first = np.cumsum([0, *(table.rows for table in tables)])
        columns = [
            table.columns[0].numpy().astype(np.int64) + start
            for table, start in zip(tables, first, strict=False)
        ]
        longest = max(tables, key=lambda table: table.length_tokens)
        found.append(_AllRows(np.concatenate(counts).cumsum(), np.concatenate(columns), longest))
    return tuple(found)


@lru_cache(maxsize=16)
def _tables_of_row(
    pattern: SparsePatternConfig | None, length: int, size: int, *, is_causal: bool
) -> tuple[BlockTable, ...]:
    if pattern is not None:
        assert is_causal, "patterns are causal"
        # the pass in which every token sees a key comes first: merging starts from finite sums
        return block_tables(pattern, length, torch.device("cpu"))[::-1]
    rows_R = torch.arange(-(-length // size))
    counts_R = rows_R + 1 if is_causal else torch.full_like(rows_R, len(rows_R))
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts_R.cumsum(0)])
    row_E = torch.repeat_interleave(rows_R, counts_R)
    columns_E = torch.arange(len(row_E)) - starts[row_E]
    return (BlockTable(length, size, starts, columns_E.int()[None]),)


def _tile_pairs(every: _AllRows, queries: _Held, keys: _Held, *, is_causal: bool) -> TilePairs:
    """Return the pairs of a query tile and a key tile of which any query may see any key."""
    entries = every.starts_B[queries.blocks_R + 1] - every.starts_B[queries.blocks_R]
    query_E = np.repeat(np.arange(len(entries)), entries)
    block_E = every.columns_E[_runs(every.starts_B[queries.blocks_R], entries)]
    order = np.argsort(keys.blocks_R, kind="stable")
    sorted_blocks = keys.blocks_R[order]
    first_E = np.searchsorted(sorted_blocks, block_E)
    parts_E = np.searchsorted(sorted_blocks, block_E, side="right") - first_E
    query_E, key_E = np.repeat(query_E, parts_E), order[_runs(first_E, parts_E)]
    is_seen_E = _sees(every.table, queries.tiles, keys.tiles, query_E, key_E, is_causal=is_causal)
    query_E, key_E = query_E[is_seen_E], key_E[is_seen_E]
    counts = np.bincount(query_E, minlength=len(queries.tiles))
    starts = torch.from_numpy(np.concatenate([[0], counts.cumsum()]).astype(np.int64))
    return TilePairs(
        *(queries.tiles, keys.tiles, starts, torch.from_numpy(key_E).int()[None], is_causal),
        *(every.table.window_tokens, every.table.keys_from, every.table.keys_below),
    )


def _sees(
    table: BlockTable,
    queries: Tiles,
    keys: Tiles,
    query_E: Integers,
    key_E: Integers,
    *,
    is_causal: bool,
) -> NDArray[np.bool_]:
    """True where any token of the query tile may see any token of the key tile; shape E."""
    token_E, first_E = queries.offsets_R.numpy()[query_E], keys.offsets_R.numpy()[key_E]
    last_token_E = token_E + queries.counts_R.numpy()[query_E] - 1
    last_E = first_E + keys.counts_R.numpy()[key_E] - 1
    seen = last_E >= table.keys_from
    if is_causal:
        seen &= first_E <= last_token_E
    if table.keys_below is not None:
        seen &= first_E < table.keys_below
    if table.window_tokens is not None:
        seen &= last_E > token_E - table.window_tokens
    return seen


def _runs(first: Integers, counts: Integers, step: int = 1) -> Integers:
    """Concatenate ranges: ``counts`` numbers from each ``first``, ``step`` apart."""
    within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    return np.repeat(first, counts) + within * step


def _on(pairs: TilePairs, device: torch.device) -> TilePairs:
    def moved(tiles: Tiles) -> Tiles:
        numbers = (tiles.offsets_R, tiles.counts_R, tiles.places_R)
        offsets_R, counts_R, places_R = (each.to(device) for each in numbers)
        return replace(tiles, offsets_R=offsets_R, counts_R=counts_R, places_R=places_R)

    queries, keys = moved(pairs.queries), moved(pairs.keys)
    return replace(pairs, queries=queries, keys=keys, columns=pairs.columns.to(device))


def refuse_content(pattern: SparsePatternConfig | None, around: str) -> None:
    """Raise UsageError for a pattern that depends on keys' values, unknown beforehand."""
    if pattern is not None and pattern.follows_content:
        raise UsageError(
            f"block_top_k chooses keys by what is in them, and {around} has to know beforehand",
            hint='use another pattern, for example `SparsePatternConfig(pattern_type="strided")`',
        )

"""Block tables: which blocks of keys each block of queries keeps, row by row, and which blocks of
queries keep each block of keys.

A table has four bytes for each pair of blocks that is kept and one entry for each row, and is the
same for all heads, but for ``block_top_k``, which has one for each group of heads. Causal within
the diagonal block; a window is exact to the token, by the bounds that the table carries.

Shapes:  R blocks of the sequence  E pairs of blocks that are kept  M 1, or one table for each group
         of heads  N groups of heads, of all sequences  D head size
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from highwater.nouns import sparse_pattern as sparse_costs
from highwater.nouns.sparse_pattern import SparsePatternConfig

_SCORED_AT_ONCE = 2**22
"""Scores of pairs of blocks that ``block_top_k`` has at hand at once."""


@dataclass(frozen=True, eq=False)
class BlockTable:
    """The pairs of blocks that are kept of one sequence, sorted by the block of queries."""

    length_tokens: int
    block_size: int
    starts: Tensor
    """Where each row's entries begin, int64, and where the last one's end; R + 1, on the host."""
    columns: Tensor
    """The block of keys of each entry, int32; ME."""
    window_tokens: int | None = None
    """Tokens that a token sees of those, itself and those before it; None: all of them."""
    keys_from: int = 0
    """The first token that is a key: those before it are seen in another pass."""
    keys_below: int | None = None
    """The first token that is no key; None: all are."""

    @property
    def rows(self) -> int:
        """Blocks of the sequence, the last one perhaps not full."""
        return len(self.starts) - 1

    @property
    def tables(self) -> int:
        """1, or the number of groups of heads."""
        return self.columns.shape[0]

    @cached_property
    def row_of_entry(self) -> Tensor:
        """The block of queries of each entry; E, int64, on the host."""
        return torch.repeat_interleave(torch.arange(self.rows), self.starts.diff())

    def kept_pairs(self) -> int:
        """Pairs of a token and a key that it sees, of one table: exact, by element."""
        return self._kept_pairs

    @cached_property
    def _kept_pairs(self) -> int:
        tokens = torch.arange(self.length_tokens)
        below = self.length_tokens if self.keys_below is None else self.keys_below
        if self.window_tokens is not None or self.keys_below is not None:
            window = self.length_tokens if self.window_tokens is None else self.window_tokens
            first = (tokens - window + 1).clamp(min=self.keys_from)
            return int(((tokens + 1).clamp(max=below) - first).clamp(min=0).sum())
        rows, columns = self.row_of_entry, self.columns[0].long().cpu()
        sizes = torch.full((self.rows,), self.block_size)
        sizes[-1] = self.length_tokens - (self.rows - 1) * self.block_size
        whole = sizes[rows] * sizes[columns]
        triangle = sizes[rows] * (sizes[rows] + 1) // 2
        return int(torch.where(rows == columns, triangle, whole).sum())


@lru_cache(maxsize=16)
def block_tables(
    pattern: SparsePatternConfig, length_tokens: int, device: torch.device
) -> tuple[BlockTable, ...]:
    """The tables of a pattern whose passes are merged: one, and of ``global_local`` a second one,
    in which every token sees the first ones. Kept for the layers of a model, which ask again.

    Raises UsageError for a ratio that the pattern's window contradicts.
    """
    assert not pattern.follows_content, "its table is made of queries and keys"
    sparse_costs.kept_share(pattern, length_tokens)  # refuses what contradicts itself
    if not pattern.is_windowed:
        return (_by_ratio(pattern, length_tokens, device),)
    return _windowed(pattern, length_tokens, device)


def _by_ratio(pattern: SparsePatternConfig, length_tokens: int, device: torch.device) -> BlockTable:
    rows_R = torch.arange(-(-length_tokens // pattern.block_size))
    counts_R = _counts(rows_R, pattern.ratio_at(length_tokens))
    row_E, entry_E = _entries(counts_R)
    match pattern.pattern_type:
        case "strided":
            columns_E = _strided(row_E, entry_E, counts_R)
        case "dilated_sparse":
            columns_E = row_E - entry_E * (row_E + 1).div(counts_R[row_E], rounding_mode="floor")
        case _:
            columns_E = _drawn(row_E, entry_E, counts_R, pattern.seed)
    return _table(pattern, length_tokens, counts_R, _sorted(row_E, columns_E), device)


def _counts(rows_R: Tensor, ratio: float) -> Tensor:
    """Blocks that each row keeps of those up to its own: the ratio, rounded up."""
    # what is a whole number but for its last bits is one
    return torch.ceil(ratio * (rows_R + 1).double() - 1e-9).long().clamp(min=1)


def _entries(counts_R: Tensor) -> tuple[Tensor, Tensor]:
    """The row of each entry, and its number within it."""
    row_E = torch.repeat_interleave(torch.arange(len(counts_R)), counts_R)
    first_R = counts_R.cumsum(0) - counts_R
    return row_E, torch.arange(len(row_E)) - first_R[row_E]


def _drawn(row_E: Tensor, entry_E: Tensor, counts_R: Tensor, seed: int) -> Tensor:
    """Each row's own block, and one drawn from each of equal stretches of those before it."""
    others_E = (counts_R - 1)[row_E].clamp(min=1)
    low_E = (entry_E * row_E).div(others_E, rounding_mode="floor")
    high_E = ((entry_E + 1) * row_E).div(others_E, rounding_mode="floor")
    random = torch.Generator().manual_seed(seed)
    uniform_E = torch.rand(len(row_E), generator=random, dtype=torch.float64)
    drawn_E = low_E + (uniform_E * (high_E - low_E)).long()
    return torch.where(entry_E == (counts_R - 1)[row_E], row_E, drawn_E)


def _strided(row_E: Tensor, entry_E: Tensor, counts_R: Tensor) -> Tensor:
    """Half of what a row keeps are its last blocks, half are spread over all before these."""
    near_E = (counts_R[row_E] + 1).div(2, rounding_mode="floor")
    far_E = (counts_R[row_E] - near_E).clamp(min=1)
    stride_E = (row_E - near_E + 1).div(far_E, rounding_mode="floor")
    back_E = torch.where(entry_E < near_E, entry_E, near_E + (entry_E - near_E) * stride_E)
    return row_E - back_E


def _windowed(
    pattern: SparsePatternConfig, length_tokens: int, device: torch.device
) -> tuple[BlockTable, ...]:
    size = pattern.block_size
    rows_R = torch.arange(-(-length_tokens // size))
    seen = (
        min(pattern.global_tokens, length_tokens) if pattern.pattern_type != "local_window" else 0
    )
    first_R = (rows_R * size - pattern.local_window_size + 1).clamp(min=0)
    first_R = torch.minimum(first_R.div(size, rounding_mode="floor"), rows_R)
    local = _stretches(pattern, length_tokens, first_R, rows_R + 1, device)
    local = replace(local, window_tokens=pattern.local_window_size, keys_from=seen)
    if not seen:
        return (local,)
    stop_R = torch.minimum(rows_R + 1, torch.tensor(-(-seen // size)))
    whole = _stretches(pattern, length_tokens, torch.zeros_like(rows_R), stop_R, device)
    return local, replace(whole, keys_below=seen)


def _stretches(
    pattern: SparsePatternConfig,
    length_tokens: int,
    first_R: Tensor,
    stop_R: Tensor,
    device: torch.device,
) -> BlockTable:
    """Each row keeps the blocks from one to another."""
    counts_R = stop_R - first_R
    row_E, entry_E = _entries(counts_R)
    return _table(pattern, length_tokens, counts_R, first_R[row_E] + entry_E, device)


def _sorted(row_E: Tensor, columns_E: Tensor) -> Tensor:
    """Columns in their order within each row."""
    rows = int(row_E[-1]) + 1
    return (row_E * rows + columns_E).sort().values - row_E * rows


def _table(
    pattern: SparsePatternConfig,
    length_tokens: int,
    counts_R: Tensor,
    columns_E: Tensor,
    device: torch.device,
) -> BlockTable:
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts_R.cumsum(0)])
    columns = columns_E.to(torch.int32)[None].to(device)
    return BlockTable(length_tokens, pattern.block_size, starts, columns)


def top_k_table(pattern: SparsePatternConfig, query_NSD: Tensor, key_NSD: Tensor) -> BlockTable:
    """The blocks whose mean keys score highest with the mean query of a row's block, and the row's
    own; a table for each group of heads, whose mean query is given.
    """
    length, size = query_NSD.shape[1], pattern.block_size
    query_NRD, key_NRD = (_means(tensor, size) for tensor in (query_NSD, key_NSD))
    rows = query_NRD.shape[1]
    counts_R = _counts(torch.arange(rows), pattern.ratio_at(length))
    at_once = max(1, _SCORED_AT_ONCE // (len(query_NRD) * rows))
    kept: list[Tensor] = []
    for first in range(0, rows, at_once):
        scores_NrR = query_NRD[:, first : first + at_once] @ key_NRD.transpose(1, 2)
        row_r = torch.arange(first, first + scores_NrR.shape[1], device=scores_NrR.device)
        column_R = torch.arange(rows, device=scores_NrR.device)
        scores_NrR.masked_fill_(column_R > row_r[:, None], -math.inf)
        scores_NrR.masked_fill_(column_R == row_r[:, None], math.inf)
        most = int(counts_R[first : first + at_once].max())
        best_Nrm = scores_NrR.topk(most, dim=-1).indices
        is_kept_rm = torch.arange(most) < counts_R[first : first + at_once, None]
        # what is too many goes to the end when a row is sorted
        best_Nrm = best_Nrm.masked_fill(~is_kept_rm.to(best_Nrm.device), rows).sort(-1).values
        kept.append(best_Nrm.flatten(1)[:, is_kept_rm.flatten().to(best_Nrm.device)])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts_R.cumsum(0)])
    return BlockTable(length, size, starts, torch.cat(kept, dim=1).to(torch.int32))


def _means(tensor_NSD: Tensor, size: int) -> Tensor:
    """The mean of each block, in float32 at least; NRD."""
    wide = tensor_NSD.to(torch.promote_types(tensor_NSD.dtype, torch.float32))
    rest = -wide.shape[1] % size
    sums = torch.nn.functional.pad(wide, (0, 0, 0, rest)).unflatten(1, (-1, size)).sum(2)
    sizes = torch.full((sums.shape[1], 1), size, dtype=wide.dtype, device=wide.device)
    sizes[-1] = size - rest
    return sums / sizes

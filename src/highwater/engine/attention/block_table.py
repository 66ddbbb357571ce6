"""Block tables: which blocks of keys each block of queries keeps, row by row.

A table takes four bytes for each kept pair of blocks, and one entry for each row. All heads share
it, except with ``block_top_k``, which has one for each group of heads. The diagonal block is
causal; a window is exact to the token, by bounds that the table carries.

Tiles are the parts of a sequence that a rank or a branch holds, each a run of equally spaced tokens
from one block of one document. A sequence held whole has one tile for each block, in order. A rank
with a share of it, or a branch with every r-th token, has the tiles that its tokens make up.

Shapes:  R blocks of the sequence, or tiles of queries  C tiles of keys  E pairs that are kept  M 1,
         or one table for each group of heads  N groups of heads, of all sequences  D head size
         b tokens of a full tile  T tokens held  X anything
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from highwater.nouns import sparse_pattern as sparse_costs
from highwater.nouns.sparse_pattern import SparsePatternConfig

_SCORED_AT_ONCE = 2**22
"""Scores of block pairs that ``block_top_k`` holds at once."""


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Pairs of blocks that a sparse pattern keeps in one sequence, sorted by queries' block."""

    length_tokens: int
    block_size: int
    starts: Tensor
    """Index of each row's first entry, then the number of entries; R + 1, int64, on the host."""
    columns: Tensor
    """Block of keys of each entry, int32; ME."""
    window_tokens: int | None = None
    """Number of tokens that a token sees, itself included; None: all kept ones before it."""
    keys_from: int = 0
    """Index of the first token that is a key; earlier ones are seen in another table."""
    keys_below: int | None = None
    """Index after the last token that is a key; None: the sequence's end."""

    @property
    def rows(self) -> int:
        """Number of blocks of the sequence; the last one may be partly filled."""
        return len(self.starts) - 1

    @property
    def tables(self) -> int:
        """Number of tables: 1, or the number of head groups."""
        return self.columns.shape[0]

    @cached_property
    def row_of_entry(self) -> Tensor:
        """Block of queries of each entry; E, int64, on the host."""
        return torch.repeat_interleave(torch.arange(self.rows), self.starts.diff())

    @cached_property
    def kept_pairs(self) -> int:
        """Pairs of a token and a key that it sees, in one table, exactly."""
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
    """Return a pattern's tables, whose outputs are merged: one table, and for ``global_local`` a
    second, in which every token sees the first tokens. Cached, because every layer calls this.

    Raises UsageError for a ratio that contradicts the pattern's window.
    """
    assert not pattern.follows_content, "its table is made of queries and keys"
    sparse_costs.kept_share(pattern, length_tokens)  # raises for a pattern that contradicts itself
    tables = (_windowed if pattern.is_windowed else _by_ratio)(pattern, length_tokens)
    return tuple(replace(each, columns=each.columns.to(device)) for each in tables)


def _by_ratio(pattern: SparsePatternConfig, length_tokens: int) -> tuple[BlockTable, ...]:
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
    rows = len(rows_R)  # columns are sorted within each row
    columns_E = (row_E * rows + columns_E).sort().values - row_E * rows
    return (_table(pattern, length_tokens, counts_R, columns_E),)


def _counts(rows_R: Tensor, ratio: float) -> Tensor:
    """Number of key blocks kept by each row: the ratio times those up to its own, rounded up."""
    # rounding errors must not turn a whole number into the next one
    return torch.ceil(ratio * (rows_R + 1).double() - 1e-9).long().clamp(min=1)


def _entries(counts_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return each entry's row, and its index within that row."""
    row_E = torch.repeat_interleave(torch.arange(len(counts_R)), counts_R)
    first_R = counts_R.cumsum(0) - counts_R
    return row_E, torch.arange(len(row_E)) - first_R[row_E]


def _drawn(row_E: Tensor, entry_E: Tensor, counts_R: Tensor, seed: int) -> Tensor:
    """Return each row's own block, and one random block from each of equal ranges before it."""
    others_E = (counts_R - 1)[row_E].clamp(min=1)
    low_E = (entry_E * row_E).div(others_E, rounding_mode="floor")
    high_E = ((entry_E + 1) * row_E).div(others_E, rounding_mode="floor")
    random = torch.Generator().manual_seed(seed)
    uniform_E = torch.rand(len(row_E), generator=random, dtype=torch.float64)
    drawn_E = low_E + (uniform_E * (high_E - low_E)).long()
    return torch.where(entry_E == (counts_R - 1)[row_E], row_E, drawn_E)


def _strided(row_E: Tensor, entry_E: Tensor, counts_R: Tensor) -> Tensor:
    """Return half of a row's blocks as its last ones, half spread evenly over earlier ones."""
    near_E = (counts_R[row_E] + 1).div(2, rounding_mode="floor")
    far_E = (counts_R[row_E] - near_E).clamp(min=1)
    stride_E = (row_E - near_E + 1).div(far_E, rounding_mode="floor")
    back_E = torch.where(entry_E < near_E, entry_E, near_E + (entry_E - near_E) * stride_E)
    return row_E - back_E


def _windowed(pattern: SparsePatternConfig, length_tokens: int) -> tuple[BlockTable, ...]:
    size = pattern.block_size
    rows_R = torch.arange(-(-length_tokens // size))
    seen = (
        min(pattern.global_tokens, length_tokens) if pattern.pattern_type != "local_window" else 0
    )
    first_R = (rows_R * size - pattern.local_window_size + 1).clamp(min=0)
    first_R = torch.minimum(first_R.div(size, rounding_mode="floor"), rows_R)
    local = _stretches(pattern, length_tokens, first_R, rows_R + 1)
    local = replace(local, window_tokens=pattern.local_window_size, keys_from=seen)
    if not seen:
        return (local,)
    stop_R = torch.minimum(rows_R + 1, torch.tensor(-(-seen // size)))
    whole = _stretches(pattern, length_tokens, torch.zeros_like(rows_R), stop_R)
    return local, replace(whole, keys_below=seen)


def _stretches(
    pattern: SparsePatternConfig, length_tokens: int, first_R: Tensor, stop_R: Tensor
) -> BlockTable:
    """Return a table whose rows keep all blocks from ``first_R`` up to ``stop_R``."""
    counts_R = stop_R - first_R
    row_E, entry_E = _entries(counts_R)
    return _table(pattern, length_tokens, counts_R, first_R[row_E] + entry_E)


def _table(
    pattern: SparsePatternConfig, length_tokens: int, counts_R: Tensor, columns_E: Tensor
) -> BlockTable:
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts_R.cumsum(0)])
    return BlockTable(length_tokens, pattern.block_size, starts, columns_E.to(torch.int32)[None])


def top_k_table(pattern: SparsePatternConfig, query_NSD: Tensor, key_NSD: Tensor) -> BlockTable:
    """Keep each row's own block and the blocks whose mean key scores highest with the row's mean
    query: one table for each group of heads. ``query_NSD`` is the mean over a group's query heads.
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
        # surplus columns get the highest number, so that sorting puts them last
        best_Nrm = best_Nrm.masked_fill(~is_kept_rm.to(best_Nrm.device), rows).sort(-1).values
        kept.append(best_Nrm.flatten(1)[:, is_kept_rm.flatten().to(best_Nrm.device)])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts_R.cumsum(0)])
    return BlockTable(length, size, starts, torch.cat(kept, dim=1).to(torch.int32))


def _means(tensor_NSD: Tensor, size: int) -> Tensor:
    """Return the mean of each block, NRD, in float32 or wider."""
    wide = tensor_NSD.to(torch.promote_types(tensor_NSD.dtype, torch.float32))
    rest = -wide.shape[1] % size
    sums = torch.nn.functional.pad(wide, (0, 0, 0, rest)).unflatten(1, (-1, size)).sum(2)
    sizes = torch.full((sums.shape[1], 1), size, dtype=wide.dtype, device=wide.device)
    sizes[-1] = size - rest
    return sums / sizes


@dataclass(frozen=True)
class Tiles:
    """Which tokens each tile of a row holds, and where they stand in their document."""

    size: int
    """Tokens of a full tile."""
    held: int
    """Number of tokens held, in tiles or not."""
    offsets_R: Tensor
    """Position in its document of each tile's first token, int64."""
    counts_R: Tensor
    """Number of tokens in each tile."""
    places_R: Tensor
    """Index of each tile's first token among the held ones."""
    step: int = 1
    """Distance among the held tokens between a token and the next one of its tile."""
    in_order: bool = False
    """True if the tiles are all held tokens, one tile after the other."""

    def __len__(self) -> int:
        return len(self.offsets_R)

    def _places(self) -> Tensor:
        """Index of each tile's tokens in the tensor held, Rb; arbitrary after its last token."""
        within_b = torch.arange(self.size, device=self.places_R.device)
        return (self.places_R[:, None] + within_b * self.step).clamp(max=max(0, self.held - 1))

    def is_token(self, tiles: Tensor | slice) -> Tensor:
        """True where a place of a tile holds a token, and no filling; ``tiles`` by ``size``."""
        within_b = torch.arange(self.size, device=self.counts_R.device)
        return within_b < self.counts_R[tiles][..., None]

    def cut(self, tensor_XTD: Tensor) -> Tensor:
        """Cut a tensor of held tokens into tiles, XRbD; arbitrary after a tile's last token."""
        if not self.in_order:
            return tensor_XTD[..., self._places(), :]
        rest = len(self) * self.size - self.held
        padded = F.pad(tensor_XTD, (0, 0, 0, rest)) if rest else tensor_XTD
        return padded.unflatten(-2, (len(self), self.size))

    def cut_sums(self, tensor_XT: Tensor) -> Tensor:
        """Cut a tensor with one value for each held token into tiles; XRb."""
        return self.cut(tensor_XT[..., None])[..., 0]

    def put_(self, whole_XTD: Tensor, tiles_XRbD: Tensor) -> None:
        """Write tiles' values to their tokens in ``whole_XTD``; other tokens are unchanged."""
        if self.in_order:
            whole_XTD.copy_(tiles_XRbD.flatten(-3, -2)[..., : self.held, :])
        else:
            is_token_Rb = self.is_token(slice(None))
            whole_XTD[..., self._places()[is_token_Rb], :] = tiles_XRbD[..., is_token_Rb, :]

    def joined(self, tiles_XRbD: Tensor) -> Tensor:
        """Undo ``cut``: values of all held tokens, XTD; 0 for tokens in no tile."""
        if self.in_order:
            return tiles_XRbD.flatten(-3, -2)[..., : self.held, :]
        shape = (*tiles_XRbD.shape[:-3], self.held, tiles_XRbD.shape[-1])
        whole_XTD = tiles_XRbD.new_zeros(shape)
        self.put_(whole_XTD, tiles_XRbD)
        return whole_XTD


@dataclass(frozen=True, eq=False)
class TilePairs:
    """Pairs of a tile of queries and one of keys that attend, with bounds on the keys."""

    queries: Tiles
    keys: Tiles
    starts: Tensor
    """Index of each query tile's first pair, then their number; R + 1, int64, on the host."""
    columns: Tensor
    """Tile of keys of each pair, int32; ME."""
    is_causal: bool = True
    window_tokens: int | None = None
    keys_from: int = 0
    keys_below: int | None = None
    """Window and key range as in a BlockTable."""


def pairs_of(table: BlockTable) -> TilePairs:
    """Return the tile pairs of a table for a sequence that one rank holds whole."""
    length_tokens, size = table.length_tokens, table.block_size
    offsets_R = torch.arange(0, length_tokens, size, device=table.columns.device)
    counts_R = (length_tokens - offsets_R).clamp(max=size)
    tiles = Tiles(size, length_tokens, offsets_R, counts_R, offsets_R, in_order=True)
    return TilePairs(
        tiles,
        tiles,
        table.starts,
        table.columns,
        window_tokens=table.window_tokens,
        keys_from=table.keys_from,
        keys_below=table.keys_below,
    )

"""Tiles: the parts of a sequence that a rank or a branch holds, each a run of tokens, equally far
apart, of one block of one document; and which tiles of keys each tile of queries keeps.

A sequence that is held whole has a tile for each block, in order. A rank that has a share of it,
or a branch that takes every so many-th token, has the tiles that its tokens make up.

Shapes:  R tiles of queries  C tiles of keys  E pairs of tiles that are kept  M 1, or one table for
         each group of heads  b tokens of a full tile  T tokens held  X anything
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from highwater.engine.attention.block_table import BlockTable


@dataclass(frozen=True)
class Tiles:
    """Where the tokens of each tile are held, and where they stand in their document."""

    size: int
    """Tokens of a full tile."""
    held: int
    """Tokens that are held, of tiles or not."""
    offsets_R: Tensor
    """Position in its document of each tile's first token, int64."""
    counts_R: Tensor
    """Tokens of each."""
    places_R: Tensor
    """Where its first token is held."""
    step: int = 1
    """How far behind a token the next one of its tile is held."""
    in_order: bool = False
    """Whether the tiles are all tokens, one after the other."""

    def __len__(self) -> int:
        return len(self.offsets_R)

    def _places(self) -> Tensor:
        """Where each token is held, Rb; some place where a tile has fewer."""
        within_b = torch.arange(self.size, device=self.places_R.device)
        return (self.places_R[:, None] + within_b * self.step).clamp(max=max(0, self.held - 1))

    def is_token(self, tiles: Tensor | slice) -> Tensor:
        """Where some tiles have a token; a number for each of ``size`` behind their own shape."""
        within_b = torch.arange(self.size, device=self.counts_R.device)
        return within_b < self.counts_R[tiles][..., None]

    def cut(self, tensor_XTD: Tensor) -> Tensor:
        """What the tiles' tokens have of it, XRbD; something where a tile has fewer."""
        if not self.in_order:
            return tensor_XTD[..., self._places(), :]
        rest = len(self) * self.size - self.held
        padded = F.pad(tensor_XTD, (0, 0, 0, rest)) if rest else tensor_XTD
        return padded.unflatten(-2, (len(self), self.size))

    def cut_sums(self, tensor_XT: Tensor) -> Tensor:
        """The same of what each token has one number of; XRb."""
        return self.cut(tensor_XT[..., None])[..., 0]

    def put_(self, whole_XTD: Tensor, tiles_XRbD: Tensor) -> None:
        """Write what the tiles' tokens have where these are held; no other place is written."""
        if self.in_order:
            whole_XTD.copy_(tiles_XRbD.flatten(-3, -2)[..., : self.held, :])
        else:
            is_token_Rb = self.is_token(slice(None))
            whole_XTD[..., self._places()[is_token_Rb], :] = tiles_XRbD[..., is_token_Rb, :]

    def joined(self, tiles_XRbD: Tensor) -> Tensor:
        """What each token held has, XTD; of one that is in no tile 0."""
        if self.in_order:
            return tiles_XRbD.flatten(-3, -2)[..., : self.held, :]
        shape = (*tiles_XRbD.shape[:-3], self.held, tiles_XRbD.shape[-1])
        whole_XTD = tiles_XRbD.new_zeros(shape)
        self.put_(whole_XTD, tiles_XRbD)
        return whole_XTD


@dataclass(frozen=True, eq=False)
class TilePairs:
    """The pairs of tiles that are kept, sorted by the tile of queries, and what is seen in them."""

    queries: Tiles
    keys: Tiles
    starts: Tensor
    """Where the pairs of each tile of queries begin, int64, and where the last one's end; R + 1, on
    the host."""
    columns: Tensor
    """The tile of keys of each pair, int32; ME."""
    is_causal: bool = True
    window_tokens: int | None = None
    keys_from: int = 0
    keys_below: int | None = None
    """As a BlockTable's."""


def whole_blocks(length_tokens: int, size: int, device: torch.device) -> Tiles:
    """The tiles of a sequence that is held whole."""
    offsets_R = torch.arange(0, length_tokens, size, device=device)
    counts_R = (length_tokens - offsets_R).clamp(max=size)
    return Tiles(size, length_tokens, offsets_R, counts_R, offsets_R, in_order=True)


def pairs_of(table: BlockTable) -> TilePairs:
    """The pairs of a table of a sequence that is held whole."""
    tiles = whole_blocks(table.length_tokens, table.block_size, table.columns.device)
    return TilePairs(
        tiles,
        tiles,
        table.starts,
        table.columns,
        window_tokens=table.window_tokens,
        keys_from=table.keys_from,
        keys_below=table.keys_below,
    )

"""Tiles: parts of a sequence that a rank or a branch holds, each a run of equally spaced tokens
from one block of one document; and which tiles of keys each tile of queries keeps.

A sequence held whole has one tile for each block, in order. A rank with a share of it, or a branch
with every r-th token, has the tiles that its tokens make up.

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
    """Position of each tile's tokens, in the held tensor and in their document."""

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
        """Index of each token among the held ones, Rb; arbitrary behind a tile's last token."""
        within_b = torch.arange(self.size, device=self.places_R.device)
        return (self.places_R[:, None] + within_b * self.step).clamp(max=max(0, self.held - 1))

    def is_token(self, tiles: Tensor | slice) -> Tensor:
        """True where tiles have a token; shape of ``tiles`` plus a dimension of ``size``."""
        within_b = torch.arange(self.size, device=self.counts_R.device)
        return within_b < self.counts_R[tiles][..., None]

    def cut(self, tensor_XTD: Tensor) -> Tensor:
        """Cut a tensor of held tokens into tiles, XRbD; arbitrary behind a tile's last token."""
        if not self.in_order:
            return tensor_XTD[..., self._places(), :]
        rest = len(self) * self.size - self.held
        padded = F.pad(tensor_XTD, (0, 0, 0, rest)) if rest else tensor_XTD
        return padded.unflatten(-2, (len(self), self.size))

    def cut_sums(self, tensor_XT: Tensor) -> Tensor:
        """Cut a tensor with one number for each held token into tiles; XRb."""
        return self.cut(tensor_XT[..., None])[..., 0]

    def put_(self, whole_XTD: Tensor, tiles_XRbD: Tensor) -> None:
        """Write tiles' values to their tokens in ``whole_XTD``; other tokens stay unchanged."""
        if self.in_order:
            whole_XTD.copy_(tiles_XRbD.flatten(-3, -2)[..., : self.held, :])
        else:
            is_token_Rb = self.is_token(slice(None))
            whole_XTD[..., self._places()[is_token_Rb], :] = tiles_XRbD[..., is_token_Rb, :]

    def joined(self, tiles_XRbD: Tensor) -> Tensor:
        """Undo ``cut``: values of all held tokens, XTD, 0 for tokens that are in no tile."""
        if self.in_order:
            return tiles_XRbD.flatten(-3, -2)[..., : self.held, :]
        shape = (*tiles_XRbD.shape[:-3], self.held, tiles_XRbD.shape[-1])
        whole_XTD = tiles_XRbD.new_zeros(shape)
        self.put_(whole_XTD, tiles_XRbD)
        return whole_XTD


@dataclass(frozen=True, eq=False)
class TilePairs:
    """Kept pairs of tiles, sorted by tile of queries, and which of their keys may be seen."""

    queries: Tiles
    keys: Tiles
    starts: Tensor
    """Index of each query tile's first pair, then the number of pairs; R + 1, int64, on the
    host."""
    columns: Tensor
    """Tile of keys of each pair, int32; ME."""
    is_causal: bool = True
    window_tokens: int | None = None
    keys_from: int = 0
    keys_below: int | None = None
    """Window and key range as in a BlockTable."""


def whole_blocks(length_tokens: int, size: int, device: torch.device) -> Tiles:
    """Return the tiles of a sequence that is held whole."""
    offsets_R = torch.arange(0, length_tokens, size, device=device)
    counts_R = (length_tokens - offsets_R).clamp(max=size)
    return Tiles(size, length_tokens, offsets_R, counts_R, offsets_R, in_order=True)


def pairs_of(table: BlockTable) -> TilePairs:
    """Return the tile pairs of a table for a sequence that is held whole."""
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

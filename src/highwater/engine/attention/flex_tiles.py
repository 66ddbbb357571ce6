"""Attention over tiles by FlexAttention: a rank's queries over keys, its own or another rank's,
forward and backward.

The mask is filled from the pairs of tiles. A token's position in its document is read from a table
of positions; a place without a token has a position that sees nothing.

Shapes:  N groups of heads, of all sequences  G query heads of a group  R tiles of queries  C tiles
         of keys  b tokens of a tile  D head size  E pairs of tiles that are kept
"""

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from highwater.engine.attention.block_flex import IsSeen, attend_mask, filled_mask, sees_whole
from highwater.engine.attention.block_gather import CutTensors, exact
from highwater.engine.attention.block_table import TilePairs, Tiles

_FAR = 2**30
"""Position after every token, and a distance greater than that of any two tokens."""


class FlexTensors(CutTensors):
    """CutTensors computed by a compiled kernel, all rows at once."""

    def attended(self, pairs: TilePairs, scaling: float) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield all rows at once: slice, output, NGRbD, and the log-sum-exp of each query, NGRb,
        minus infinity if it sees no key.
        """
        with exact(self.query_NGRbD.device):
            found_NGSD, sums_NGS = self._attend(tuple(self._flat()), pairs, scaling)
        shape = self.query_NGRbD.shape
        yield slice(None), found_NGSD.view(shape), sums_NGS.view(shape[:-1])

    def gradients(
        self,
        pairs: TilePairs,
        *,
        scaling: float,
        upstream_NGRbD: Tensor,
        above_NGRb: Tensor,
        log_sums_NGRb: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients like ``CutTensors.gradients``. The forward pass over these keys is
        repeated; its output's gradient is scaled by the share of the softmax that these keys have.
        """
        inputs = [each.detach().requires_grad_() for each in self._flat()]
        with torch.enable_grad(), exact(self.query_NGRbD.device):
            found_NGSD, sums_NGS = self._attend(tuple(inputs), pairs, scaling)
        upstream_NGSD, whole_NGS = upstream_NGRbD.flatten(2, 3), log_sums_NGRb.flatten(2, 3)
        finite_NGS = whole_NGS.masked_fill(whole_NGS == -torch.inf, 0.0)
        part_NGS = (sums_NGS.detach() - finite_NGS).exp()
        of_output_NGSD = (upstream_NGSD * part_NGS[..., None]).to(found_NGSD.dtype)
        # The kernel subtracts output x gradient of its own rounded output: add that back.
        own_NGS = (found_NGSD.detach().to(self.wide) * of_output_NGSD).sum(-1)
        of_sums_NGS = own_NGS + part_NGS * above_NGRb.flatten(2, 3)
        found = torch.autograd.grad(
            (found_NGSD, sums_NGS), inputs, (of_output_NGSD, of_sums_NGS.to(sums_NGS.dtype))
        )
        query, key, value = (own.view(like.shape) for own, like in zip(found, self, strict=True))
        return query, key, value

    def _flat(self) -> Iterator[Tensor]:
        """Yield queries, NGSD, keys and values, NSD, with the tiles concatenated."""
        return (each.flatten(-3, -2) for each in self)

    @staticmethod
    def _attend(
        inputs: tuple[Tensor, ...], pairs: TilePairs, scaling: float
    ) -> tuple[Tensor, Tensor]:
        query_NGSD, key_NSD, value_NSD = inputs
        found_NGSD, auxiliary = attend_mask(
            *(query_NGSD, key_NSD, value_NSD, tile_mask(pairs), scaling),
            return_aux=AuxRequest(lse=True),
        )
        return found_NGSD, auxiliary.lse


@lru_cache(maxsize=64)
@torch.inference_mode(mode=False)
def tile_mask(pairs: TilePairs) -> BlockMask:
    """Return FlexAttention's mask for pairs of tiles; cached, because every layer calls this."""
    assert len(pairs.columns) == 1, "one table for all heads"
    queries, keys = pairs.queries, pairs.keys
    row_E = torch.repeat_interleave(torch.arange(len(queries)), pairs.starts.diff())
    column_E = pairs.columns[0].long().cpu()
    return filled_mask(
        (row_E, column_E, _is_full(pairs, row_E, column_E)),
        (len(queries) * queries.size, len(keys) * keys.size),
        size=queries.size,
        is_seen=_is_seen(pairs),
        device=pairs.columns.device,
    )


def _is_full(pairs: TilePairs, row_E: Tensor, column_E: Tensor) -> Tensor:
    """True where every token of a full query tile sees every key of a full key tile."""
    size = pairs.queries.size
    token_E, key_E = pairs.queries.offsets_R.cpu()[row_E], pairs.keys.offsets_R.cpu()[column_E]
    full_E = pairs.queries.counts_R.cpu()[row_E] == size
    full_E &= pairs.keys.counts_R.cpu()[column_E] == size
    if pairs.is_causal:
        full_E &= key_E + size - 1 <= token_E
    return full_E & sees_whole(pairs, token_E, key_E, size)


def _is_seen(pairs: TilePairs) -> IsSeen:
    """Return the mask function for pairs of tiles; its bounds are tensors, as in block_flex."""
    device = pairs.columns.device
    token_S, key_S = _positions(pairs.queries, -1), _positions(pairs.keys, _FAR)
    window, begins, ends, ahead = (
        torch.tensor(bound, dtype=torch.int32, device=device)
        for bound in (
            _FAR if pairs.window_tokens is None else pairs.window_tokens,
            pairs.keys_from,
            _FAR if pairs.keys_below is None else pairs.keys_below,
            0 if pairs.is_causal else _FAR,
        )
    )

    def is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del batch, head
        token, other = token_S[query], key_S[key]
        is_token = (token >= 0) & (other >= begins) & (other < ends)
        return is_token & (other <= token + ahead) & (other > token - window)

    return is_seen


def _positions(tiles: Tiles, of_none: int) -> Tensor:
    """Position in its document of each tile's tokens, int32; ``of_none`` where there is none."""
    within_b = torch.arange(tiles.size, device=tiles.offsets_R.device)
    positions_Rb = tiles.offsets_R[:, None] + within_b
    is_token_Rb = tiles.is_token(slice(None))
    return positions_Rb.masked_fill(~is_token_Rb, of_none).int().flatten()

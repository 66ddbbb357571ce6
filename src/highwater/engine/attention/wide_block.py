"""Wide blocks: attention with heads wider than fused kernels support, on a GPU. Flash attention and
cuDNN support 256 elements at most, and memory-efficient attention was wrong past 65,536 tokens.

Some rows of queries are computed at a time, forward and backward. Products have the heads' own
dtype and are summed in float32 or wider, the dtype of scores, softmax and gradients of keys and
values; weights are rounded before they multiply values, as in flash attention. The scores held at
once are bounded for any length, so that memory is linear in it.

Shapes:  B documents  K key/value heads  G query heads of each  H = K G  S tokens of a document
         r rows at hand  R = G r  l keys that they read  D head size
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from highwater.engine.attention.plain_block import PlainBlock, RowsAtHand
from highwater.nouns.layout import WIDE_SCORES_AT_HAND as SCORES_AT_HAND
from highwater.nouns.layout import WIDEST_FUSED_HEAD, stretch


def is_wide(tensor_BXSD: Tensor) -> bool:
    """True if a tensor's heads are wider than a fused kernel of its device takes."""
    return tensor_BXSD.is_cuda and tensor_BXSD.shape[-1] > WIDEST_FUSED_HEAD


class WideBlock(PlainBlock):
    """Documents of one length with wide heads, each of which attends causally to itself."""

    def _attend_(self, rows: RowsAtHand, output_BHSD: Tensor, log_sums_BHS: Tensor) -> None:
        scores_BKRl = self._wide_scores(rows)
        most_BKR1 = scores_BKRl.amax(-1, keepdim=True)
        weights_BKRl = scores_BKRl.sub_(most_BKR1).exp_()
        sums_BKR1 = weights_BKRl.sum(-1, keepdim=True)
        found_BKRD = _product(weights_BKRl.to(self.dtype), self.value_BKSD[:, :, rows.keys])
        self._by_groups(output_BHSD, rows).copy_(self._by_rows(found_BKRD.div_(sums_BKR1)))
        log_sums_BKR1 = sums_BKR1.log_().add_(most_BKR1)
        self._by_groups(log_sums_BHS, rows).copy_(self._by_rows(log_sums_BKR1)[..., 0])

    def _add_gradients_(
        self,
        rows: RowsAtHand,
        upstream: tuple[Tensor, Tensor, Tensor],
        sums: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        query_gradient, key_gradient, value_gradient = sums
        upstream_BKRD, output_BKRD = (self._joined(each, rows) for each in upstream[:2])
        log_sums_BKR1 = self._by_groups(upstream[2], rows).flatten(2, 3)[..., None]
        weights_BKRl = self._wide_scores(rows).sub_(log_sums_BKR1).exp_()
        value_gradient[:, :, rows.keys] += _product(
            weights_BKRl.to(self.dtype).transpose(2, 3), upstream_BKRD
        )
        # a score's gradient is its weight times how far its value is above the mean
        mean_BKR1 = (upstream_BKRD.to(self._wide) * output_BKRD).sum(-1, keepdim=True)
        value_BKDl = self.value_BKSD[:, :, rows.keys].transpose(2, 3)
        for_scores_BKRl = _product(upstream_BKRD, value_BKDl).sub_(mean_BKR1).mul_(weights_BKRl)
        if self.scaling != 1:
            for_scores_BKRl.mul_(self.scaling)
        narrow_BKRl = for_scores_BKRl.to(self.dtype)
        found_BKRD = _product(narrow_BKRl, self.key_BKSD[:, :, rows.keys])
        self._by_groups(query_gradient, rows).copy_(self._by_rows(found_BKRD))
        key_gradient[:, :, rows.keys] += _product(
            narrow_BKRl.transpose(2, 3), self._joined(self.query_BHSD, rows)
        )

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the heads, and of the factors of products."""
        return self.query_BHSD.dtype

    def _rows(self) -> Iterator[RowsAtHand]:
        documents, heads, length, _ = self.query_BHSD.shape
        size = stretch(length, self.window_tokens, documents * heads, at_hand=SCORES_AT_HAND)
        return self._stretches(*size)

    def _wide_scores(self, rows: RowsAtHand) -> Tensor:
        """Scores of the rows, minus infinity where a token does not read a key: BKRl."""
        key_BKDl = self.key_BKSD[:, :, rows.keys].transpose(2, 3)
        scores_BKRl = _product(self._joined(self.query_BHSD, rows), key_BKDl)
        if self.scaling != 1:
            scores_BKRl.mul_(self.scaling)
        by_rows_BKGrl = self._by_rows(scores_BKRl)
        if self.window_tokens is not None:
            self._hide_(by_rows_BKGrl, rows)
        else:  # only the last keys lie ahead of a row
            count = rows.queries.stop - rows.queries.start
            ahead_rr = torch.ones(count, count, dtype=torch.bool, device=scores_BKRl.device).triu(1)
            by_rows_BKGrl[..., -count:].masked_fill_(ahead_rr, -math.inf)
        return scores_BKRl

    def _joined(self, tensor_BHSD: Tensor, rows: RowsAtHand) -> Tensor:
        """Return these rows of all query heads of a key head, concatenated: BKRD."""
        return self._by_groups(tensor_BHSD, rows).flatten(2, 3)

    def _by_rows(self, tensor_BKRx: Tensor) -> Tensor:
        """Undo ``_joined``: view rows of a key head by its query heads, BKGrx."""
        heads = self.query_BHSD.shape[1] // self.key_BKSD.shape[1]
        return tensor_BKRx.unflatten(2, (heads, -1))


def _product(one_BKmn: Tensor, other_BKno: Tensor) -> Tensor:
    """Return the product of matrices of one dtype, in float32 or wider: BKmo."""
    wide = torch.promote_types(one_BKmn.dtype, torch.float32)
    if not one_BKmn.is_cuda or one_BKmn.dtype == wide:
        return one_BKmn.to(wide) @ other_BKno.to(wide)
    found = torch.bmm(one_BKmn.flatten(0, 1), other_BKno.flatten(0, 1), out_dtype=wide)
    return found.unflatten(0, one_BKmn.shape[:2])

"""Plain blocks: attention within a window, or of capped scores, in plain PyTorch, some rows of
queries at a time, forward and backward, in any dtype and on any device.

Rows read one stretch of keys, so that nothing is gathered. Scores at hand are bounded whatever the
length, and memory is linear in it. Scores and sums are in float32 at least.

Shapes:  B documents  H query heads  K key/value heads  G query heads of each: H/K  S tokens of a
         document  r rows at hand  l keys that they read  D head size
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

SCORES_AT_HAND = 2**23
"""Scores that are computed at once, of all documents and heads; one row at the least."""


class PlainBlock(NamedTuple):
    """Documents of one length, each of which attends to itself."""

    query_BHSD: Tensor
    key_BKSD: Tensor
    value_BKSD: Tensor
    scaling: float
    window_tokens: int | None = None
    """Tokens that a token reads, itself and those before it; None: all of them."""
    soft_cap: float | None = None
    """What no score exceeds either way: ``cap * tanh(score / cap)``; None: no cap."""

    def forward(self) -> tuple[Tensor, Tensor]:
        """What is attended, shape BHSD, and the logarithm of each query's sum of exponentials,
        shape BHS, in float32 or wider.
        """
        output_BHSD = torch.empty_like(self.query_BHSD)
        log_sums_BHS = torch.empty_like(self.query_BHSD[..., 0], dtype=self._wide)
        for rows in self._rows():
            scores_BKGrl = self._hide_(self._scores(rows), rows)
            sums_BKGr = scores_BKGrl.logsumexp(-1)
            weights_BKGrl = scores_BKGrl.sub_(sums_BKGr[..., None]).exp_()
            value_BKlD = self.value_BKSD[:, :, rows.keys].to(self._wide)
            found = torch.einsum("bkgrl,bkld->bkgrd", weights_BKGrl, value_BKlD)
            output_BHSD[:, :, rows.queries] = found.flatten(1, 2).to(output_BHSD.dtype)
            log_sums_BHS[:, :, rows.queries] = sums_BKGr.flatten(1, 2)
        return output_BHSD, log_sums_BHS

    def backward(
        self, gradient_BHSD: Tensor, output_BHSD: Tensor, log_sums_BHS: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values, through these keys' part of an output that may be
        of more: ``output`` and ``log_sums`` are those of all that is in the softmax.
        """
        wide, dtype = self._wide, self.query_BHSD.dtype
        query_gradient = torch.empty_like(self.query_BHSD)
        key_gradient = torch.zeros_like(self.key_BKSD, dtype=wide)
        value_gradient = torch.zeros_like(self.value_BKSD, dtype=wide)
        for rows in self._rows():
            upstream_BKGrD = self._of_rows(gradient_BHSD, rows)
            # a score's gradient is its weight times how far its value is above the mean
            mean_BKGr = (upstream_BKGrD * self._of_rows(output_BHSD, rows)).sum(-1)
            scores_BKGrl = self._scores(rows)
            growth = self._growth(scores_BKGrl)
            self._hide_(scores_BKGrl, rows)
            weights_BKGrl = scores_BKGrl.sub_(self._of_rows(log_sums_BHS, rows)[..., None]).exp_()
            value_gradient[:, :, rows.keys] += torch.einsum(
                "bkgrl,bkgrd->bkld", weights_BKGrl, upstream_BKGrD
            )
            value_BKlD = self.value_BKSD[:, :, rows.keys].to(wide)
            for_scores = torch.einsum("bkgrd,bkld->bkgrl", upstream_BKGrD, value_BKlD)
            for_scores.sub_(mean_BKGr[..., None]).mul_(weights_BKGrl).mul_(growth)
            key_BKlD = self.key_BKSD[:, :, rows.keys].to(wide)
            of_queries = torch.einsum("bkgrl,bkld->bkgrd", for_scores, key_BKlD)
            query_gradient[:, :, rows.queries] = of_queries.flatten(1, 2).to(dtype)
            key_gradient[:, :, rows.keys] += torch.einsum(
                "bkgrl,bkgrd->bkld", for_scores, self._of_rows(self.query_BHSD, rows)
            )
        return query_gradient, key_gradient.to(dtype), value_gradient.to(dtype)

    @property
    def _wide(self) -> torch.dtype:
        return torch.promote_types(self.query_BHSD.dtype, torch.float32)

    def _rows(self) -> Iterator["_Stretch"]:
        """All rows, as many at a time as their scores have room."""
        documents, heads, length, _ = self.query_BHSD.shape
        window = length if self.window_tokens is None else min(length, self.window_tokens)
        room = SCORES_AT_HAND // (documents * heads)
        # r rows of a window read window + r - 1 keys: r (window + r) is to be within the room
        at_once = max(1, int((math.sqrt(window**2 + 4 * room) - window) / 2))
        for first in range(0, length, at_once):
            stop = min(length, first + at_once)
            yield _Stretch(slice(first, stop), slice(max(0, first + 1 - window), stop))

    def _of_rows(self, tensor_BHSx: Tensor, rows: "_Stretch") -> Tensor:
        """What rows have of a tensor, by groups of heads: BKGr and whatever follows, wide."""
        heads = self.key_BKSD.shape[1]
        return tensor_BHSx[:, :, rows.queries].unflatten(1, (heads, -1)).to(self._wide)

    def _scores(self, rows: "_Stretch") -> Tensor:
        """Scores of rows and all keys at hand, capped: BKGrl."""
        query_BKGrD = self._of_rows(self.query_BHSD, rows)
        key_BKlD = self.key_BKSD[:, :, rows.keys].to(self._wide)
        scores_BKGrl = torch.einsum("bkgrd,bkld->bkgrl", query_BKGrD, key_BKlD).mul_(self.scaling)
        if self.soft_cap is None:
            return scores_BKGrl
        return scores_BKGrl.div_(self.soft_cap).tanh_().mul_(self.soft_cap)

    def _growth(self, scores_BKGrl: Tensor) -> Tensor | float:
        """What a score grows by with the product of its query and key."""
        if self.soft_cap is None:
            return self.scaling
        return (scores_BKGrl / self.soft_cap).square_().neg_().add_(1).mul_(self.scaling)

    def _hide_(self, scores_BKGrl: Tensor, rows: "_Stretch") -> Tensor:
        """Put minus infinity where a token does not read a key, in place."""
        device = scores_BKGrl.device
        back_rl = torch.arange(rows.queries.start, rows.queries.stop, device=device)[:, None]
        back_rl = back_rl - torch.arange(rows.keys.start, rows.keys.stop, device=device)
        hidden_rl = back_rl < 0
        if self.window_tokens is not None:
            hidden_rl |= back_rl >= self.window_tokens
        return scores_BKGrl.masked_fill_(hidden_rl, -math.inf)


class _Stretch(NamedTuple):
    """Rows of queries at hand, and the stretch of keys that one of them reads at least."""

    queries: slice
    keys: slice

"""Plain blocks: attention within a window, or with capped scores, in plain PyTorch, some rows of
queries at a time, forward and backward, in any dtype and on any device.

The rows at hand, those computed together, read one contiguous stretch of keys, so that no key is
gathered. The number of scores in memory has a bound, and memory is linear in the length. Scores and
sums are in float32 or wider.

Also here: the reference that every attention must equal, the textbook formula in float64. It is
quadratic in memory on purpose: only tests and benchmarks use it.

Shapes:  B documents  H query heads  K key/value heads  G query heads of each: H/K  S tokens of a
         document, or of a packed row  r rows at hand  l keys that they read  D head size
         Q queries of a document
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from highwater.nouns.layout import stretch


class PlainBlock(NamedTuple):
    """Documents of one length, each of which attends causally to itself."""

    query_BHSD: Tensor
    key_BKSD: Tensor
    value_BKSD: Tensor
    scaling: float
    window_tokens: int | None = None
    """Number of tokens that a token reads, itself included; None: all before it."""
    soft_cap: float | None = None
    """Bound of a score's magnitude: ``cap * tanh(score / cap)``; None: no cap."""
    is_for_memory: bool = False
    """True in memory-only trials: only the rows that take the most memory are computed."""

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the output, BHSD, and each query's log-sum-exp, BHS, in float32 or wider."""
        output_BHSD = torch.zeros_like(self.query_BHSD)
        log_sums_BHS = torch.zeros_like(self.query_BHSD[..., 0], dtype=self._wide)
        for rows in self._rows():
            self._attend_(rows, output_BHSD, log_sums_BHS)
        return output_BHSD, log_sums_BHS

    def backward(
        self, gradient_BHSD: Tensor, output_BHSD: Tensor, log_sums_BHS: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of queries, BHSD, keys and values, BKSD, from these keys' share of the
        softmax. ``output`` and ``log_sums`` include everything in the softmax, such as sinks.
        """
        sums = (
            torch.zeros_like(self.query_BHSD),
            torch.zeros_like(self.key_BKSD, dtype=self._wide),
            torch.zeros_like(self.value_BKSD, dtype=self._wide),
        )
        for rows in self._rows():
            self._add_gradients_(rows, (gradient_BHSD, output_BHSD, log_sums_BHS), sums)
        query_gradient, key_gradient, value_gradient = sums
        dtype = query_gradient.dtype
        return query_gradient, key_gradient.to(dtype), value_gradient.to(dtype)

    def _attend_(self, rows: "RowsAtHand", output_BHSD: Tensor, log_sums_BHS: Tensor) -> None:
        """Write the output of these rows. Like ``_add_gradients_`` this is a separate method, so
        that its buffers are freed before the next rows allocate theirs.
        """
        scores_BKGrl = self._hide_(self._scores(rows), rows)
        most_BKGr1 = scores_BKGrl.amax(-1, keepdim=True)
        weights_BKGrl = scores_BKGrl.sub_(most_BKGr1).exp_()
        sums_BKGr1 = weights_BKGrl.sum(-1, keepdim=True)
        value_BKlD = self._of_keys(self.value_BKSD, rows)
        found_BKGrD = torch.einsum("bkgrl,bkld->bkgrd", weights_BKGrl, value_BKlD).div_(sums_BKGr1)
        output_BHSD[:, :, rows.queries] = found_BKGrD.flatten(1, 2)
        log_sums_BHS[:, :, rows.queries] = sums_BKGr1.log_().add_(most_BKGr1)[..., 0].flatten(1, 2)

    def _add_gradients_(
        self,
        rows: "RowsAtHand",
        upstream: tuple[Tensor, Tensor, Tensor],
        sums: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Write the gradients of these rows' queries; add those of the keys and values read."""
        query_gradient, key_gradient, value_gradient = sums
        upstream_BKGrD, output_BKGrD = (self._of_rows(each, rows) for each in upstream[:2])
        log_sums_BKGr = self._by_groups(upstream[2], rows)
        # a score's gradient is its weight times how far its value is above the mean
        mean_BKGr = (upstream_BKGrD * output_BKGrD).sum(-1)
        scores_BKGrl = self._scores(rows)
        growth = self.scaling  # derivative of a score by the product of its query and key
        if self.soft_cap is not None:
            growth = (scores_BKGrl / self.soft_cap).square_().neg_().add_(1).mul_(self.scaling)
        weights_BKGrl = self._hide_(scores_BKGrl, rows).sub_(log_sums_BKGr[..., None]).exp_()
        value_gradient[:, :, rows.keys] += torch.einsum(
            "bkgrl,bkgrd->bkld", weights_BKGrl, upstream_BKGrD
        )
        for_scores_BKGrl = torch.einsum(
            "bkgrd,bkld->bkgrl", upstream_BKGrD, self._of_keys(self.value_BKSD, rows)
        )
        for_scores_BKGrl.sub_(mean_BKGr[..., None]).mul_(weights_BKGrl).mul_(growth)
        query_gradient[:, :, rows.queries] = torch.einsum(
            "bkgrl,bkld->bkgrd", for_scores_BKGrl, self._of_keys(self.key_BKSD, rows)
        ).flatten(1, 2)
        key_gradient[:, :, rows.keys] += torch.einsum(
            "bkgrl,bkgrd->bkld", for_scores_BKGrl, self._of_rows(self.query_BHSD, rows)
        )

    @property
    def _wide(self) -> torch.dtype:
        return torch.promote_types(self.query_BHSD.dtype, torch.float32)

    def _rows(self) -> Iterator["RowsAtHand"]:
        """Yield all rows in groups of bounded scores, from the end: the last rows read the most
        keys, so that later buffers fit into the memory that earlier ones freed.
        """
        documents, heads, length, _ = self.query_BHSD.shape
        return self._stretches(*stretch(length, self.window_tokens, documents * heads))

    def _stretches(self, at_once: int, keys: int) -> Iterator["RowsAtHand"]:
        length = self.query_BHSD.shape[2]
        for stop in range(length, 0, -at_once):
            first = max(0, stop - at_once)
            yield RowsAtHand(slice(first, stop), slice(max(0, stop - keys), stop))
            if self.is_for_memory:
                return

    def _by_groups(self, tensor_BHSx: Tensor, rows: "RowsAtHand") -> Tensor:
        """View these rows of a tensor by groups of heads: BKGr, then any further dimensions."""
        return tensor_BHSx[:, :, rows.queries].unflatten(1, (self.key_BKSD.shape[1], -1))

    def _of_rows(self, tensor_BHSD: Tensor, rows: "RowsAtHand") -> Tensor:
        """Return these rows of a tensor, BKGrD, in float32 or wider and contiguous."""
        rows_BKGrD = self._by_groups(tensor_BHSD, rows)
        return rows_BKGrD.to(self._wide, memory_format=torch.contiguous_format)

    def _of_keys(self, tensor_BKSD: Tensor, rows: "RowsAtHand") -> Tensor:
        """Return the keys' part of a tensor that rows read, BKlD, wide and contiguous."""
        return tensor_BKSD[:, :, rows.keys].to(self._wide, memory_format=torch.contiguous_format)

    def _scores(self, rows: "RowsAtHand") -> Tensor:
        """Return scores of the rows with all keys of their stretch, capped: BKGrl."""
        query_BKGrD = self._of_rows(self.query_BHSD, rows)
        key_BKlD = self._of_keys(self.key_BKSD, rows)
        scores_BKGrl = torch.einsum("bkgrd,bkld->bkgrl", query_BKGrD, key_BKlD).mul_(self.scaling)
        if self.soft_cap is None:
            return scores_BKGrl
        return scores_BKGrl.div_(self.soft_cap).tanh_().mul_(self.soft_cap)

    def _hide_(self, scores_BKGrl: Tensor, rows: "RowsAtHand") -> Tensor:
        """Write minus infinity to the scores of keys that a query does not read, in place."""
        device = scores_BKGrl.device
        row_r1 = torch.arange(rows.queries.start, rows.queries.stop, device=device)[:, None]
        key_l = torch.arange(rows.keys.start, rows.keys.stop, device=device)
        hidden_rl = key_l > row_r1
        if self.window_tokens is not None:
            hidden_rl |= key_l <= row_r1 - self.window_tokens
        return scores_BKGrl.masked_fill_(hidden_rl, -math.inf)


class RowsAtHand(NamedTuple):
    """Some rows of queries, and the stretch of keys and values that they read."""

    queries: slice
    keys: slice


def reference_attention(
    query_SHD: Tensor,
    key_SKD: Tensor,
    value_SKD: Tensor,
    *,
    document_lengths: Sequence[int],
    scaling: float,
) -> Tensor:
    """Causal softmax attention of each document over itself, shape SHD, in float64.

    ``document_lengths`` add up to S. Query head h reads key/value head ``h // (H / K)``.
    """
    groups = query_SHD.shape[1] // key_SKD.shape[1]
    documents = zip(
        query_SHD.double().split(list(document_lengths)),
        key_SKD.double().repeat_interleave(groups, dim=1).split(list(document_lengths)),
        value_SKD.double().repeat_interleave(groups, dim=1).split(list(document_lengths)),
        strict=True,
    )
    return torch.cat([_one_document(q, k, v, scaling) for q, k, v in documents])


def _one_document(query_SHD: Tensor, key_SHD: Tensor, value_SHD: Tensor, scaling: float) -> Tensor:
    scores_HQK = torch.einsum("qhd,khd->hqk", query_SHD, key_SHD) * scaling
    ahead = torch.ones(scores_HQK.shape[-2:], dtype=torch.bool, device=scores_HQK.device).triu(1)
    weights_HQK = scores_HQK.masked_fill(ahead, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights_HQK, value_SHD)

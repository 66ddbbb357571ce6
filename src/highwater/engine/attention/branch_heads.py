"""The heads of a branch, and what they have of tensors in groups that read one key/value head.

Shapes:  B sequences  H query heads  h those of a branch  K key/value heads  k those that it reads
         T tokens held  D head size  n groups of a sequence's heads  N those of all sequences
         G query heads of a group
"""

from typing import NamedTuple

import torch
from torch import Tensor

from highwater.engine.attention.branches import Branch


class BranchHeads(NamedTuple):
    """The heads of a branch: those of queries, and of keys and values the ones that they read."""

    of_queries: slice
    sent_k: Tensor
    """Key/value heads that are read, each once."""
    read_n: Tensor
    """Of these, the one that each group reads."""
    are_all: bool
    """Whether all key/value heads are read, by a group of query heads each."""

    @classmethod
    def of(cls, branch: Branch, query_BHTD: Tensor, key_BKTD: Tensor) -> "BranchHeads":
        """Those of a branch, of such queries and keys."""
        heads, kv_heads = query_BHTD.shape[1], key_BKTD.shape[1]
        queries_h = torch.arange(heads)[branch.heads]
        sent_k, read_n = (queries_h // (heads // kv_heads)).unique(return_inverse=True)
        groups = len(queries_h) // len(sent_k)
        in_groups = read_n.view(-1, groups) if groups * len(sent_k) == len(queries_h) else None
        is_grouped = in_groups is not None and bool((in_groups == in_groups[:, :1]).all())
        if in_groups is not None and is_grouped:
            read_n = in_groups[:, 0]
        device = query_BHTD.device
        are_all = is_grouped and len(sent_k) == kv_heads
        return cls(branch.heads, sent_k.to(device), read_n.to(device), are_all)

    def grouped(self, tensor_BHTX: Tensor) -> Tensor:
        """Queries, or what they have; NGTX."""
        own_BhTX = tensor_BHTX[:, self.of_queries]
        return own_BhTX.unflatten(1, (len(self.read_n), -1)).flatten(0, 1)

    def ungrouped(self, tensor_NGTX: Tensor, batch: int) -> Tensor:
        """The same as the heads have it; BhTX."""
        return tensor_NGTX.unflatten(0, (batch, -1)).flatten(1, 2)

    def sent(self, tensor_BKTD: Tensor) -> Tensor:
        """Keys or values that are read; BkTD."""
        return tensor_BKTD if self.are_all else tensor_BKTD[:, self.sent_k]

    def read(self, tensor_BkTD: Tensor) -> Tensor:
        """Keys or values for each group; NTD."""
        return (tensor_BkTD if self.are_all else tensor_BkTD[:, self.read_n]).flatten(0, 1)

    def add_read_(self, sum_BkTD: Tensor, gradients_NTD: Tensor) -> None:
        """Add their gradients to the heads that were read."""
        gradients_BnTD = gradients_NTD.unflatten(0, (len(sum_BkTD), -1)).to(sum_BkTD.dtype)
        if self.are_all:
            sum_BkTD += gradients_BnTD
        else:
            sum_BkTD.index_add_(1, self.read_n, gradients_BnTD)

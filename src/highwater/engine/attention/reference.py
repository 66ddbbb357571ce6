"""Reference attention: the textbook formula in float64, document by document.

Every other attention must equal it. Quadratic in memory on purpose: it is only for tests.

Shapes:  S packed tokens  H query heads  K key/value heads  D head size  Q queries of a document
"""

from collections.abc import Sequence

import torch
from torch import Tensor


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

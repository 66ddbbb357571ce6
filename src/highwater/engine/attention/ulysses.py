"""Ulysses attention: trade the sequence shard for a head shard around one attention call.

Shapes, per rank:  B 1  S packed tokens  s = S/U  H query heads  h = H/U  K key/value heads
                   k = max(K, U)/U  D head size  U ``ulysses_degree``
Source: Jacobs et al., DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509
"""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from highwater.engine.parallel.collectives import exchange

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention over whole sequences: query BhSD, key and value BkSD, to BShD."""


def attend_sharded(
    query_BHsD: Tensor,
    key_BKsD: Tensor,
    value_BKsD: Tensor,
    *,
    group: dist.ProcessGroup,
    attend: Attend,
) -> Tensor:
    """Attention over the whole sequence, computed by heads and returned by positions: BsHD.

    This rank computes its share of the heads for all positions, and receives all heads of its own
    positions. If the degree exceeds the number of key/value heads these are repeated, so that every
    rank has those that its query heads read.
    """
    degree = dist.get_world_size(group)
    repeats = max(1, degree // key_BKsD.shape[1])
    keys, values = (
        t.repeat_interleave(repeats, dim=1) if repeats > 1 else t for t in (key_BKsD, value_BKsD)
    )
    whole = [scatter_heads(t, group, degree) for t in (query_BHsD, keys, values)]
    return gather_heads(attend(*whole), group, degree)


def scatter_heads(tensor_BHsD: Tensor, group: dist.ProcessGroup, degree: int) -> Tensor:
    """Trade all heads of this rank's positions for all positions of this rank's heads: BhSD."""
    # Ranks must be dimension 0, which is the one that an all-to-all splits.
    parts_UsBhD = tensor_BHsD.unflatten(1, (degree, -1)).permute(1, 3, 0, 2, 4)
    whole_SBhD = exchange(parts_UsBhD, group).flatten(0, 1)
    return whole_SBhD.permute(1, 2, 0, 3)


def gather_heads(tensor_BShD: Tensor, group: dist.ProcessGroup, degree: int) -> Tensor:
    """Trade all positions of this rank's heads for all heads of this rank's positions: BsHD."""
    parts_UsBhD = tensor_BShD.unflatten(1, (degree, -1)).permute(1, 2, 0, 3, 4)
    sharded_UsBhD = exchange(parts_UsBhD, group)
    return sharded_UsBhD.permute(2, 1, 0, 3, 4).flatten(2, 3)

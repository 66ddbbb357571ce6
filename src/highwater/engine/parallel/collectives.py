"""Collectives with gradients, and transfers between the ranks of a ring.

Ulysses attention exchanges the sequence shard for a head shard around one attention call.

Shapes, per rank:  B 1  S packed tokens  s = S/U  H query heads  h = H/U  K key/value heads
                   k = max(K, U)/U  D head size  U ``ulysses_degree``
Source: Jacobs et al., DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from highwater.engine.parallel.sequence_layout import Route

Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


def exchange(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all over dimension 0, cut into equal parts, one for each rank.

    Part i is sent to rank i, and part i of the result is from rank i. Differentiable: the gradient
    of a part is sent back to the rank that it came from.
    """
    return _Collective.apply(tensor, group, _all_to_all, _all_to_all)


def routed(tensor_TX: Tensor, there: Route, back: Route, group: dist.ProcessGroup) -> Tensor:
    """Send the tokens, TX, of all ranks that share a row along a route; differentiable."""
    ways = (partial(_moved, route=route) for route in (there, back))
    return _Collective.apply(tensor_TX, group, *ways)


def gather_rows(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Join every rank's tensor, all of one shape, along dimension 0; without a gradient."""
    if group is None:
        return tensor
    whole = tensor.new_empty((dist.get_world_size(group) * tensor.shape[0], *tensor.shape[1:]))
    # A deprecated name, because torch 2.11 has no other.
    dist.all_gather_into_tensor(whole, tensor.contiguous(), group=group)  # pyright: ignore[reportDeprecated]
    return whole


def sum_over(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum every rank's tensor, with the result on every rank.

    Differentiable: a tensor's gradient is the sum over ranks of the gradients of the result.
    """
    return tensor if group is None else _Collective.apply(tensor, group, _all_reduce, _all_reduce)


def pass_on(
    tensors: Sequence[Tensor], group: dist.ProcessGroup
) -> tuple[list[Tensor], list[dist.Work]]:
    """Start sending contiguous tensors to the next rank of a ring. Returns the buffers that receive
    the previous rank's tensors, of the same shapes, and the transfers to wait for.
    """
    rank, degree = dist.get_rank(group), dist.get_world_size(group)
    after, before = (dist.get_global_rank(group, (rank + step) % degree) for step in (1, -1))
    received = [torch.empty_like(tensor) for tensor in tensors]
    transfers = [dist.P2POp(dist.isend, tensor, after, group) for tensor in tensors]
    transfers += [dist.P2POp(dist.irecv, tensor, before, group) for tensor in received]
    return received, dist.batch_isend_irecv(transfers)


def swap(
    sent: Tensor | None, received: Tensor | None, *, to: int, source: int, group: dist.ProcessGroup
) -> list[dist.Work]:
    """Start sending a contiguous tensor to rank ``to`` of a group and receiving one from
    ``source``; None: nothing is sent or received. Returns the transfers to wait for.
    """
    transfers: list[dist.P2POp] = []
    if sent is not None:
        transfers.append(dist.P2POp(dist.isend, sent, dist.get_global_rank(group, to), group))
    if received is not None:
        other = dist.get_global_rank(group, source)
        transfers.append(dist.P2POp(dist.irecv, received, other, group))
    return dist.batch_isend_irecv(transfers) if transfers else []


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    result = tensor.clone()
    dist.all_reduce(result, group=group)
    return result


class _Collective(torch.autograd.Function):
    """Autograd function of a collective, with its adjoint in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        group: dist.ProcessGroup,
        collective: Collective,
        adjoint: Collective,
    ) -> Tensor:
        ctx.group, ctx.adjoint = group, adjoint
        return collective(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.adjoint(gradients[0], ctx.group), None, None, None


def _all_to_all(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    source = tensor.contiguous()
    result = torch.empty_like(source)
    dist.all_to_all_single(result, source, group=group)
    return result


def _moved(tensor_TX: Tensor, group: dist.ProcessGroup, *, route: Route) -> Tensor:
    received_TX = tensor_TX.new_empty(tensor_TX.shape)
    dist.all_to_all_single(
        received_TX, tensor_TX[route.leaving_T], route.received, route.sent, group=group
    )
    return received_TX[route.arriving_T]


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
    """Exchange all heads of this rank's positions for all positions of its own heads: BhSD."""
    # Ranks must be dimension 0, which is the one that an all-to-all splits.
    parts_UsBhD = tensor_BHsD.unflatten(1, (degree, -1)).permute(1, 3, 0, 2, 4)
    whole_SBhD = exchange(parts_UsBhD, group).flatten(0, 1)
    return whole_SBhD.permute(1, 2, 0, 3)


def gather_heads(tensor_BShD: Tensor, group: dist.ProcessGroup, degree: int) -> Tensor:
    """Exchange all positions of this rank's heads for all heads of its own positions: BsHD."""
    parts_UsBhD = tensor_BShD.unflatten(1, (degree, -1)).permute(1, 2, 0, 3, 4)
    sharded_UsBhD = exchange(parts_UsBhD, group)
    return sharded_UsBhD.permute(2, 1, 0, 3, 4).flatten(2, 3)

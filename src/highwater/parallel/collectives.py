"""Collectives that autograd can pass through."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def exchange(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all over dimension 0, cut into equal parts: part i goes to rank i, part i of the result came from it.

    Differentiable: the gradient of a part goes back the way that the part came.
    """
    return _Exchange.apply(tensor, group)


class _Exchange(torch.autograd.Function):
    """Its own inverse, and so its own backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradients[0], ctx.group), None


def _all_to_all(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    source = tensor.contiguous()
    result = torch.empty_like(source)
    dist.all_to_all_single(result, source, group=group)
    return result

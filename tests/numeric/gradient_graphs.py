"""Small graphs where gradients meet, on any device: alone, shared, held, viewed, expanded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

held: list[Tensor] = []
"""What Python holds of gradients."""


class _Doubled(torch.autograd.Function):
    """Its gradient comes from Python, which holds it if told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_held: bool) -> Tensor:
        ctx.is_held = is_held
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0] * 2
        if ctx.is_held:
            held.append(gradient)
        return gradient, None


class _AddsUp(torch.autograd.Function):
    """Adds two tensors that are its own in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 5

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2 + gradients[0] * 3


class _Head(torch.autograd.Function):
    """The gradient of its weight is a product, not a view of one."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].T @ hidden


def _leaf(device: str) -> Tensor:
    return torch.ones(8, 8, device=device, requires_grad=True)


def _shared(x: Tensor) -> Tensor:
    other = _leaf(x.device.type) * 1
    y = x * 1
    return (y * 2).sum() + ((other + y) * 3).sum()


def _retained(x: Tensor) -> Tensor:
    y = x * 1
    y.retain_grad()
    return (y * 2).sum() + (y * 3).sum()


def _hooked(x: Tensor) -> Tensor:
    a, b = x * 2, x * 3
    a.register_hook(lambda _: None)
    return a.sum() + b.sum()


def _tied(x: Tensor, head: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return head(F.embedding(torch.arange(4, device=x.device), x), x).sum()


GRAPHS: dict[str, Callable[[Tensor], Tensor]] = {
    "two branches": lambda x: (x * 2).sum() + (x * 3).sum(),
    "three branches": lambda x: (x * 2).sum() + (x * 3).sum() + (x * 4).sum(),
    "residual": lambda x: ((x * 2 + x) * 3).sum(),
    "residual, twice": lambda x: (((y := x * 2 + x) * 3 + y) * 4).sum(),
    "residual, expanded": lambda x: (x * 2 + x).sum(),
    "expanded first": lambda x: (x * 2).sum() + x.sum(),
    "expanded last": lambda x: x.sum() + (x * 2).sum(),
    "both expanded": lambda x: x.sum() + x.sum(),
    "shared with another value": _shared,
    "tied embedding, a view's head": lambda x: _tied(x, lambda hidden, weight: hidden @ weight.T),
    "tied embedding, a product's head": lambda x: _tied(x, _Head.apply),
    "transposed": lambda x: (x.T * torch.ones(8, 8, device=x.device)).sum() + (x.T * 3).sum(),
    "made with other strides": lambda x: (
        (x * torch.ones(8, 8, device=x.device).T).sum() + (x * 3).sum()
    ),
    "viewed": lambda x: (x.view(-1) * 2).sum() + (x.view(-1) * 3).sum(),
    "viewed first": lambda x: (x * 2).sum() + (x.view(-1) * 3).sum(),
    "viewed last": lambda x: (x.view(-1) * 3).sum() + (x * 2).sum(),
    "parts": lambda x: (x[:4] * 2).sum() + (x[4:] * 2).sum(),
    "parts and whole": lambda x: sum(((part * 2).sum() for part in x.chunk(2)), (x * 2).sum()),
    "products": lambda x: (
        (x @ torch.ones(8, 8, device=x.device)).sum()
        + (x @ torch.ones(8, 8, device=x.device)).sum()
    ),
    "other dtype": lambda x: (x.double() * 2).sum() + (x.double() * 3).sum(),
    "from Python": lambda x: (
        (_Doubled.apply(x, False) * 2).sum() + (_Doubled.apply(x, False) * 3).sum()
    ),
    "from Python first": lambda x: (x * 3).sum() + (_Doubled.apply(x, False) * 2).sum(),
    "from Python last": lambda x: (_Doubled.apply(x, False) * 2).sum() + (x * 3).sum(),
    "held by Python": lambda x: (
        (_Doubled.apply(x, True) * 2).sum() + (_Doubled.apply(x, True) * 3).sum()
    ),
    "held by Python, last": lambda x: (_Doubled.apply(x, True) * 2).sum() + (x * 3).sum(),
    "hooked": _hooked,
    "retained": _retained,
    "recomputed": lambda x: (
        checkpoint(lambda y: (y * 2 + y) * 3, x, use_reentrant=False).sum() + (x * 2).sum()
    ),
    "added up in Python": lambda x: _AddsUp.apply(x).sum(),
    "added up in C++": lambda x: sum(torch.var_mean(x)),
}


def loss(name: str, device: str) -> Tensor:
    """Of a leaf where its weight is tied, else of a value made from one."""
    leaf = _leaf(device)
    return GRAPHS[name](leaf if name.startswith("tied") else leaf * 1)

"""Experts of a mixture in tiles of tokens: copies of tokens for their experts, and the products of
those, are there for one tile at a time, forward and backward.

Kept for the backward pass are the experts' input, which experts each token goes to and with what
weights; a tile's products are computed again, but for the last: the gradient of an expert's weight
in the sum is the product of what goes into its last matrix and the gradient of that. As with a
gated MLP (gated_mlp.py) that costs no time where layers are recomputed. Routers are not part of it:
they see all tokens at once. Tokens of one tile take the family's own way.

A family's own experts are what transformers calls one experts implementation of several, of which
this is another; they keep their parameters.

Shapes:  T tokens  t tokens of a tile  X experts  K experts of a token  S = t K copies, by expert
         E hidden size  F width of an expert  I inputs  O outputs
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from highwater.engine.kernels import gates as gate_kernels
from highwater.nouns.layout import expert_tile_tokens

IMPLEMENTATION = "highwater_tiles"
"""Name of the experts implementation that is registered with transformers."""


def use_tiles(experts: Any, *, tiles: int | None, untiled: Callable[..., Tensor]) -> None:
    """Note on a family's experts in how many tiles they go (None: of a fixed size), and the
    implementation that computes tokens of one tile.
    """
    experts.tiles, experts.untiled = tiles, untiled


def experts_output(
    experts: Any, hidden_TE: Tensor, chosen_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Return the sum of each token's experts, weighted; this is the experts implementation."""
    rows = expert_tile_tokens(len(hidden_TE), tiles=experts.tiles)
    if rows >= len(hidden_TE):
        return experts.untiled(experts, hidden_TE, chosen_TK, weights_TK)
    weights = _Weights(experts.gate_up_proj, experts.down_proj)
    # Two functions, so that the kept tensors, at which a recomputation ends, come before the
    # products are computed.
    kept_TE: Tensor = _KeepExperts.apply(hidden_TE, chosen_TK, weights_TK, rows, *weights)
    detached = (each.detach() for each in (weights_TK, *weights))
    return cast(Tensor, _ComputeExperts.apply(kept_TE, rows, chosen_TK, *detached))


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_output)


class _Weights(NamedTuple):
    gate_up_XOE: Tensor
    """Gate above up."""
    down_XEF: Tensor

    @property
    def into(self) -> tuple[Tensor, ...]:
        """Gate and up, each of (X, F, E)."""
        return self.gate_up_XOE.chunk(2, dim=1)


class _KeepExperts(torch.autograd.Function):
    """Autograd function that passes its input on, and computes all gradients: its backward pass is
    given the gradient of the experts' *output*.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TE: Tensor,
        chosen_TK: Tensor,
        weights_TK: Tensor,
        rows: int,
        *weights: Tensor,
    ) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(x_TE, chosen_TK, weights_TK, *weights)
        return x_TE.view_as(x_TE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TE, chosen_TK, weights_TK, *kept = ctx.saved_tensors
        gradient_TE, weights = gradients[0].contiguous(), _Weights(*kept)
        x_gradient_TE, weights_gradient_TK = torch.empty_like(x_TE), torch.empty_like(weights_TK)
        sums = _ExpertSums(weights, ctx.needs_input_grad[4:])
        whole = (x_TE, chosen_TK, weights_TK, gradient_TE, x_gradient_TE, weights_gradient_TK)
        for tile in zip(*(each.split(ctx.rows) for each in whole), strict=True):
            # in a function, so that a tile's products are freed before the next one's are made
            _tile_backward(tile, weights, sums)
        return x_gradient_TE, None, weights_gradient_TK, None, *sums.totals()


class _ComputeExperts(torch.autograd.Function):
    """Autograd function that computes the output, keeps nothing, and passes the gradient on."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ARG004 -- it keeps nothing
        x_TE: Tensor,
        rows: int,
        chosen_TK: Tensor,
        weights_TK: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        out_TE = torch.empty_like(x_TE)
        whole = (x_TE, chosen_TK, weights_TK, out_TE)
        for tile in zip(*(each.split(rows) for each in whole), strict=True):
            _tile_forward(tile, _Weights(*weights))
        return out_TE

    @staticmethod
    # autograd hands ctx in, used or not.
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        return gradients[0], None, None, None, None, None


@dataclass(frozen=True, slots=True)
class _Copies:
    """The copies of a tile's tokens, in the order of the experts that they go to."""

    order_S: Tensor
    """Number of each copy, as tokens have theirs one after another."""
    token_S: Tensor
    place_S: Tensor
    """Where each token's copies are, one token after another."""
    end_X: Tensor
    """Where each expert's copies end."""

    @staticmethod
    def of(chosen_tK: Tensor, experts: int) -> "_Copies":
        """Sort the copies of a tile's tokens."""
        expert_S, order_S = chosen_tK.flatten().sort()
        numbers = torch.arange(max(experts, len(order_S)), device=order_S.device)
        place_S = torch.empty_like(order_S).scatter_(0, order_S, numbers[: len(order_S)])
        end_X = torch.searchsorted(expert_S, numbers[:experts], right=True, out_int32=True)
        return _Copies(order_S, order_S // chosen_tK.shape[1], place_S, end_X)


class _ExpertSums:
    """Gradients of the weights that have one, summed over tiles in float32: a tile's share is
    rounded as one of all tokens is.
    """

    def __init__(self, weights: _Weights, needed: Sequence[bool]) -> None:
        self._dtype = weights.down_XEF.dtype
        wide = torch.promote_types(self._dtype, torch.float32)
        self._sums = [
            torch.zeros_like(each, dtype=wide) if is_needed else None
            for each, is_needed in zip(weights, needed, strict=True)
        ]

    def add_into(self, part: int, gradient_SF: Tensor, x_SE: Tensor, end_X: Tensor) -> None:
        """Add a tile's share of gate (part 0) or up (1)."""
        if (sum_XOE := self._sums[0]) is not None:
            sum_XOE.chunk(2, dim=1)[part].add_(_grouped(gradient_SF.T, x_SE, end_X))

    def add_down(self, gradient_SE: Tensor, inner_SF: Tensor, end_X: Tensor) -> None:
        """Add a tile's share of down."""
        if (sum_XEF := self._sums[1]) is not None:
            sum_XEF.add_(_grouped(gradient_SE.T, inner_SF, end_X))

    def totals(self) -> list[Tensor | None]:
        """Return the gradients, None for a weight without one."""
        for number, each in enumerate(self._sums):  # freed before the next one is rounded
            self._sums[number] = None if each is None else each.to(self._dtype)
        return self._sums


def _tile_forward(tile: tuple[Tensor, ...], weights: _Weights) -> None:
    """Write the output of one tile."""
    x_tE, chosen_tK, weights_tK, out_tE = tile
    copies = _Copies.of(chosen_tK, len(weights.down_XEF))
    x_SE = x_tE[copies.token_S]
    inner_SF, up_SF = (_grouped(x_SE, each.mT, copies.end_X) for each in weights.into)
    del x_SE
    gate_kernels.product_(inner_SF, up_SF)
    del up_SF
    out_SE = _grouped(inner_SF, weights.down_XEF.mT, copies.end_X)
    del inner_SF
    # float32 weights give a float32 product, as in the families' own
    weighted_SE = out_SE * weights_tK.flatten()[copies.order_S][:, None]
    del out_SE
    weighted_SE = weighted_SE[copies.place_S]
    out_tE.copy_(weighted_SE.view(*chosen_tK.shape, -1).sum(dim=1))


def _tile_backward(tile: tuple[Tensor, ...], weights: _Weights, sums: _ExpertSums) -> None:
    """Compute the gradients of one tile, whose products are computed again and overwritten."""
    x_tE, chosen_tK, weights_tK, gradient_tE, x_gradient_tE, weights_gradient_tK = tile
    copies = _Copies.of(chosen_tK, len(weights.down_XEF))
    end_X, into = copies.end_X, weights.into
    x_SE = x_tE[copies.token_S]
    gate_SF, up_SF = (_grouped(x_SE, each.mT, end_X) for each in into)
    del x_SE
    # Of the sum before it is weighted: all gradients are those times a copy's weight.
    gradient_SE = gradient_tE[copies.token_S]
    inner_SF = _grouped(gradient_SE, weights.down_XEF, end_X)
    share_SF = inner_SF.clone()
    gate_kernels.backward_(gate_SF, up_SF, inner_SF)
    # After backward_: gate and up hold their gradients, inner what goes into the last matrix.
    weights_gradient_S = share_SF.mul_(inner_SF).sum(dim=-1)
    del share_SF
    weights_gradient_tK.copy_(weights_gradient_S[copies.place_S].view_as(chosen_tK))
    weights_S1 = weights_tK.flatten()[copies.order_S][:, None]
    sums.add_down(gradient_SE, inner_SF.mul_(weights_S1), end_X)
    del gradient_SE, inner_SF
    x_SE = x_tE[copies.token_S]
    sums.add_into(0, gate_SF.mul_(weights_S1), x_SE, end_X)
    sums.add_into(1, up_SF.mul_(weights_S1), x_SE, end_X)
    del x_SE
    x_gradient_SE = _grouped(up_SF, into[1], end_X)
    del up_SF
    x_gradient_SE += _grouped(gate_SF, into[0], end_X)
    del gate_SF
    x_gradient_SE = x_gradient_SE[copies.place_S]
    torch.sum(x_gradient_SE.view(*chosen_tK.shape, -1), dim=1, out=x_gradient_tE)


def _grouped(a: Tensor, b: Tensor, end_X: Tensor) -> Tensor:
    """Return the products of each expert's copies: a's rows with its matrix in ``b``, or, of two
    matrices, a's columns with b's rows.
    """
    if a.dtype is not torch.float64:
        return F.grouped_mm(a, b, offs=end_X)
    starts, ends = [0, *end_X[:-1].tolist()], end_X.tolist()  # PyTorch has none in float64
    each = [slice(*bounds) for bounds in zip(starts, ends, strict=True)]
    if b.ndim == 3:
        return torch.cat([a[rows] @ matrix for rows, matrix in zip(each, b, strict=True)])
    return torch.stack([a[:, rows] @ b[rows] for rows in each])

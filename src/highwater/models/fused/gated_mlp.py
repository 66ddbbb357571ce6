"""A gated MLP, ``down(silu(gate(x)) * up(x))``, that keeps nothing but its input.

It never holds its products for all tokens. Tokens go through in tiles: forward, a tile's products
are dropped; backward, they are computed again and overwritten by their own gradients. Under
recomputation that costs nothing: the recomputation of a layer ends where the last tensor was kept,
which is here before the MLP computes anything, so that gate and up are computed as often as they
would be without tiles.

Shapes:  T tokens  t tokens of one tile  E hidden size  F intermediate size
"""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from highwater.kernels import gates as gate_kernels
from highwater.models.fused.weight_gradient import WeightGradient
from highwater.spec.working_sizes import TILE_BYTES

_ROWS = 128
"""Tiles are multiples of this many tokens, where there is more than one."""


class GatedMlp(nn.Module):
    """The MLP of a decoder layer, under the parameter names of the family's own."""

    def __init__(self, projections: dict[str, nn.Linear], *, tiles: int | None) -> None:
        """Take over ``projections``, by name: ``down_proj``, ``gate_proj`` and ``up_proj``.

        ``gate_up_proj`` may stand for the latter two. ``tiles`` is how many tiles the tokens are
        cut into; with None as many as keep a tile's product within ``TILE_BYTES``.
        """
        super().__init__()
        for name, projection in projections.items():
            self.add_module(name, projection)
        self.tiles = tiles

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the MLP of ``hidden``, of shape (..., E)."""
        weights = self._weights()
        x_TE = hidden.flatten(0, -2)
        rows = tile_rows(len(x_TE), weights.down_EF, tiles=self.tiles)
        # Two functions, so that what is kept, and with it the end of a recomputation, comes before
        # what is computed.
        kept_TE: Tensor = _Keep.apply(x_TE, rows, *weights)
        return cast(Tensor, _Compute.apply(kept_TE, rows, *_detached(weights))).view(hidden.shape)

    def _weights(self) -> "_Weights":
        down: Any = self.down_proj
        fused: Any = getattr(self, "gate_up_proj", None)
        if fused is not None:
            gate, up = fused.weight.chunk(2)
            gate_bias, up_bias = (None, None) if fused.bias is None else fused.bias.chunk(2)
            return _Weights(gate, up, down.weight, gate_bias, up_bias, down.bias)
        own: Any = self
        gate, up = own.gate_proj, own.up_proj
        return _Weights(gate.weight, up.weight, down.weight, gate.bias, up.bias, down.bias)


def tile_rows(tokens: int, down_EF: Tensor, *, tiles: int | None) -> int:
    """Tokens of one tile; the last tile may be smaller."""
    if tiles is not None:
        return max(1, -(-tokens // tiles))
    row_bytes = down_EF.shape[1] * down_EF.element_size()
    return max(_ROWS, TILE_BYTES[down_EF.device.type] // row_bytes // _ROWS * _ROWS)


class _Weights(NamedTuple):
    gate_FE: Tensor
    up_FE: Tensor
    down_EF: Tensor
    gate_bias_F: Tensor | None
    up_bias_F: Tensor | None
    down_bias_E: Tensor | None


def _detached(weights: _Weights) -> _Weights:
    return _Weights(*(None if w is None else w.detach() for w in weights))  # pyright: ignore[reportArgumentType]


class _Keep(torch.autograd.Function):
    """Hand on its input as it is, and compute all gradients.

    Its backward pass is handed the gradient of the MLP's *output*, and returns the gradients of
    input and parameters.
    """

    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, rows: int, *weights: Tensor | None) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(x_TE, *weights)
        return x_TE.view_as(x_TE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TE, *saved = ctx.saved_tensors
        weights = _Weights(*saved)
        gradient_TE = gradients[0].contiguous()
        x_gradient_TE = torch.empty_like(x_TE)
        sums = _WeightGradients(weights)
        for x, gradient, x_gradient in zip(
            *(t.split(ctx.rows) for t in (x_TE, gradient_TE, x_gradient_TE)), strict=True
        ):
            _tile_backward(x, gradient, x_gradient, weights, sums)
        return x_gradient_TE, None, *sums.totals()


class _Compute(torch.autograd.Function):
    """Compute the MLP of what _Keep returned, and keep nothing.

    Its backward pass hands the gradient of the output to _Keep as it is.
    """

    @staticmethod
    # It keeps nothing in ctx.
    def forward(ctx: Any, x_TE: Tensor, rows: int, *tensors: Tensor | None) -> Tensor:  # noqa: ARG004
        weights = _Weights(*tensors)  # pyright: ignore[reportArgumentType]
        out_TE = torch.empty_like(x_TE)
        for x, out in zip(x_TE.split(rows), out_TE.split(rows), strict=True):
            # a function of its own: a tile's products are gone before the next one's come
            _tile_forward(x, out, weights)
        return out_TE

    @staticmethod
    # autograd hands ctx in, used or not.
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        return gradients[0], None, *[None] * len(_Weights._fields)


class _WeightGradients:
    """Gradients of all weights and biases, summed over tiles."""

    def __init__(self, weights: _Weights) -> None:
        self.matrices = [WeightGradient(w) for w in weights[:3]]
        self.biases = [
            None if b is None else torch.zeros_like(b, dtype=sum_.wide)
            for b, sum_ in self._biases(weights)
        ]
        self.dtype = weights.down_EF.dtype

    def _biases(self, weights: _Weights) -> Any:
        return zip(weights[3:], self.matrices, strict=True)

    def add(self, index: int, gradient: Tensor, of: Tensor) -> None:
        """Add one tile's share to weight ``index`` and its bias."""
        self.matrices[index].add(gradient, of)
        bias = self.biases[index]
        if bias is not None:
            bias += gradient.sum(dim=0, dtype=bias.dtype)

    def totals(self) -> list[Tensor | None]:
        """Gradients of the three weights, then of their biases, None where there is no bias."""
        return [m.total() for m in self.matrices] + [
            None if b is None else b.to(self.dtype) for b in self.biases
        ]


def _tile_forward(x_tE: Tensor, out_tE: Tensor, weights: _Weights) -> None:
    """Write the output of one tile."""
    product_tF, up_tF = (
        F.linear(x_tE, weights.gate_FE, weights.gate_bias_F),
        F.linear(x_tE, weights.up_FE, weights.up_bias_F),
    )
    gate_kernels.product_(product_tF, up_tF)
    torch.mm(product_tF, weights.down_EF.T, out=out_tE)
    if weights.down_bias_E is not None:
        out_tE += weights.down_bias_E


def _tile_backward(
    x_tE: Tensor,
    gradient_tE: Tensor,
    x_gradient_tE: Tensor,
    weights: _Weights,
    sums: _WeightGradients,
) -> None:
    """Compute the gradients of one tile, whose products are computed again and overwritten."""
    gate_tF, up_tF = (
        F.linear(x_tE, weights.gate_FE, weights.gate_bias_F),
        F.linear(x_tE, weights.up_FE, weights.up_bias_F),
    )
    product_tF = gradient_tE @ weights.down_EF  # the product's gradient, then the product itself
    gate_kernels.backward_(gate_tF, up_tF, product_tF)
    # After backward_: gate and up hold their gradients, product the product.
    sums.add(2, gradient_tE, product_tF)
    sums.add(0, gate_tF, x_tE)
    sums.add(1, up_tF, x_tE)
    torch.mm(gate_tF, weights.gate_FE, out=x_gradient_tE)
    x_gradient_tE.addmm_(up_tF, weights.up_FE)

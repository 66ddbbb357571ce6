"""Gated MLP, ``down(silu(gate(x)) * up(x))``, which keeps only its input for the backward pass.

Products are never held for all tokens. Tokens are computed in tiles: in the forward pass a tile's
products are freed; in the backward pass they are recomputed and overwritten by their gradients.
With recomputation this costs nothing: a layer's recomputation ends at the last tensor that was
kept, here the MLP's input, so that gate and up are computed as often as without tiles. Adapters of
its projections use the same tiles. A frozen weight has no gradient and may be packed (nf4.py): it
is unpacked for each product of a tile, one weight at a time.

Shapes:  T tokens  t tokens of one tile  E hidden size  F intermediate size  R rank of an adapter
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from highwater.engine.kernels import gates as gate_kernels
from highwater.engine.models.fused.adapted_linear import (
    Adapter,
    AdapterGradient,
    WeightGradient,
    adapted_product,
    parts_of,
)
from highwater.engine.models.fused.nf4 import Weight, as_tensor, halves, weight_of, whole
from highwater.nouns.layout import TILE_BYTES

_ROWS = 128
"""Tiles of a size that ``TILE_BYTES`` decides have a multiple of this many tokens."""


class GatedMlp(nn.Module):
    """Gated MLP of a decoder layer, with the family's own parameter names."""

    def __init__(self, projections: dict[str, nn.Linear], *, tiles: int | None) -> None:
        """Use ``projections`` as children, by name: ``down_proj``, ``gate_proj`` and ``up_proj``.

        ``gate_up_proj`` may replace the latter two. ``tiles`` is the number of tiles; None: as many
        as keep a tile's product within ``TILE_BYTES``.
        """
        super().__init__()
        for name, projection in projections.items():
            self.add_module(name, projection)
        self.tiles = tiles

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the MLP's output for ``hidden``, of shape (..., E)."""
        weights, scale = self._weights()
        x_TE = hidden.flatten(0, -2)
        rows = tile_rows(x_TE, weights.down_EF.shape[1], tiles=self.tiles)
        # Two functions, so that a recomputation, which ends at the last kept tensor, computes no
        # products.
        kept_TE: Tensor = _Keep.apply(x_TE, rows, scale, *weights)
        detached = (w.detach() if isinstance(w, Tensor) else w for w in weights)
        out_TE = cast(Tensor, _Compute.apply(kept_TE, rows, scale, *detached))
        return out_TE.view(hidden.shape)

    def _weights(self) -> tuple["_Weights", float]:
        """Return the projections' tensors, and the scale of their adapters."""
        down, down_adapter = parts_of(self.down_proj)
        if hasattr(self, "gate_up_proj"):
            fused, adapter = parts_of(self.gate_up_proj)
            gate, up = halves(weight_of(fused))
            has_bias = "bias" in dict(fused.named_parameters())
            gate_bias, up_bias = fused.bias.chunk(2) if has_bias else (None, None)
            gate_adapter, up_adapter = (None, None)
            if adapter is not None:  # one A, and a half of B each
                gate_adapter, up_adapter = (adapter._replace(b_OR=b) for b in adapter.b_OR.chunk(2))
        else:
            gate_layer, gate_adapter = parts_of(self.gate_proj)
            up_layer, up_adapter = parts_of(self.up_proj)
            gate, gate_bias = weight_of(gate_layer), gate_layer.bias
            up, up_bias = weight_of(up_layer), up_layer.bias
        adapters = (gate_adapter, up_adapter, down_adapter)
        pairs = ((None, None) if adapter is None else adapter[:2] for adapter in adapters)
        matrices = chain.from_iterable(pairs)
        scale = next((adapter.scale for adapter in adapters if adapter is not None), 1.0)
        biases = (gate_bias, up_bias, down.bias)
        return _Weights(gate, up, weight_of(down), *biases, *matrices), scale


def tile_rows(x_TE: Tensor, width: int, *, tiles: int | None) -> int:
    """Return the number of tokens in a tile of an MLP of this width; the last may have fewer."""
    if tiles is not None:
        return max(1, -(-len(x_TE) // tiles))
    row_bytes = width * x_TE.element_size()
    return max(_ROWS, TILE_BYTES[x_TE.device.type] // row_bytes // _ROWS * _ROWS)


class _Weights(NamedTuple):
    gate_FE: Weight
    up_FE: Weight
    down_EF: Weight
    gate_bias_F: Tensor | None = None
    up_bias_F: Tensor | None = None
    down_bias_E: Tensor | None = None
    gate_a_RE: Tensor | None = None
    gate_b_FR: Tensor | None = None
    up_a_RE: Tensor | None = None
    up_b_FR: Tensor | None = None
    down_a_RF: Tensor | None = None
    down_b_ER: Tensor | None = None

    def projection(self, index: int, scale: float) -> tuple[Weight, Tensor | None, Adapter | None]:
        """Return weight, bias and adapter of gate (0), up (1) or down (2)."""
        a, b = map(as_tensor, self[6 + 2 * index : 8 + 2 * index])
        adapter = None if a is None or b is None else Adapter(a, b, scale)
        return self[index], self[3 + index], adapter  # pyright: ignore[reportReturnType]


class _Keep(torch.autograd.Function):
    """Autograd function that returns its input unchanged, and computes all gradients.

    In the backward pass it is given the gradient of the MLP's *output*, and returns the gradients
    of input and parameters.
    """

    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, rows: int, scale: float, *weights: Weight | None) -> Tensor:
        ctx.rows, ctx.scale = rows, scale
        ctx.packed = tuple(None if isinstance(each, Tensor) else each for each in weights)
        ctx.save_for_backward(x_TE, *map(as_tensor, weights))
        return x_TE.view_as(x_TE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TE, *saved = ctx.saved_tensors
        kept = (one if two is None else two for one, two in zip(saved, ctx.packed, strict=True))
        weights = _Weights(*kept)
        gradient_TE = gradients[0].contiguous()
        x_gradient_TE = torch.empty_like(x_TE)
        sums = _Sums(weights, ctx.scale, ctx.needs_input_grad[3:])
        tiles = (t.split(ctx.rows) for t in (x_TE, gradient_TE, x_gradient_TE))
        for x, gradient, x_gradient in zip(*tiles, strict=True):
            _tile_backward(x, gradient, x_gradient, weights, sums)
        return x_gradient_TE, None, None, *sums.totals()


class _Compute(torch.autograd.Function):
    """Autograd function that computes the MLP, keeps nothing, and returns the gradient to _Keep."""

    @staticmethod
    # It keeps nothing in ctx.
    def forward(ctx: Any, x_TE: Tensor, rows: int, scale: float, *tensors: Weight | None) -> Tensor:  # noqa: ARG004
        weights = _Weights(*tensors)  # pyright: ignore[reportArgumentType]
        out_TE = torch.empty_like(x_TE)
        for x, out in zip(x_TE.split(rows), out_TE.split(rows), strict=True):
            # in a function, so that a tile's products are freed before the next one's are made
            _tile_forward(x, out, weights, scale)
        return out_TE

    @staticmethod
    # autograd hands ctx in, used or not.
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        return gradients[0], None, None, *[None] * len(_Weights._fields)


class _Sums:
    """Gradients of trained weights, biases and adapters, summed over tiles."""

    def __init__(self, weights: _Weights, scale: float, needed: Sequence[bool]) -> None:
        self.scale, self.dtype = scale, weights.down_EF.dtype
        self._matrices = [
            WeightGradient(weight) if is_needed and isinstance(weight, Tensor) else None
            for weight, is_needed in zip(weights[:3], needed[:3], strict=True)
        ]
        wide = torch.promote_types(self.dtype, torch.float32)
        self._biases = [
            torch.zeros_like(bias, dtype=wide) if bias is not None and is_needed else None
            for bias, is_needed in zip(weights[3:6], needed[3:6], strict=True)
        ]
        adapters = (weights.projection(index, scale)[2] for index in range(3))
        self._adapters = [None if each is None else AdapterGradient(each) for each in adapters]

    def add(self, index: int, gradient: Tensor, of: Tensor) -> Tensor | None:
        """Add a tile's gradient to projection ``index``; returns that of ``x A^T``, if adapted."""
        matrix, bias, adapter = self._matrices[index], self._biases[index], self._adapters[index]
        if matrix is not None:
            matrix.add(gradient, of)
        if bias is not None:
            bias += gradient.sum(dim=0, dtype=bias.dtype)
        return None if adapter is None else adapter.add(gradient, of)

    def totals(self) -> list[Tensor | None]:
        """Return the gradients in the order of the weights; None for frozen weights."""
        of_adapters = ((None, None) if each is None else each.totals() for each in self._adapters)
        return [
            *(None if each is None else each.total() for each in self._matrices),
            *(None if each is None else each.to(self.dtype) for each in self._biases),
            *chain.from_iterable(of_adapters),
        ]


def _tile_forward(x_tE: Tensor, out_tE: Tensor, weights: _Weights, scale: float) -> None:
    """Compute the MLP's output of one tile into ``out_tE``."""
    product_tF, up_tF = (adapted_product(x_tE, *weights.projection(i, scale)) for i in (0, 1))
    gate_kernels.product_(product_tF, up_tF)
    down_EF, bias_E, adapter = weights.projection(2, scale)
    torch.mm(product_tF, whole(down_EF).T, out=out_tE)
    if bias_E is not None:
        out_tE += bias_E
    if adapter is not None:
        out_tE.addmm_(product_tF @ adapter.a_RI.T, adapter.b_OR.T, alpha=scale)


def _tile_backward(
    x_tE: Tensor, gradient_tE: Tensor, x_gradient_tE: Tensor, weights: _Weights, sums: _Sums
) -> None:
    """Compute the gradients of one tile; its products are recomputed and overwritten."""
    gate_tF, up_tF = (adapted_product(x_tE, *weights.projection(i, sums.scale)) for i in (0, 1))
    # holds the product's gradient; backward_ overwrites it with the product
    product_tF = gradient_tE @ whole(weights.down_EF)
    if weights.down_a_RF is not None and weights.down_b_ER is not None:
        product_tF.addmm_(gradient_tE @ weights.down_b_ER, weights.down_a_RF, alpha=sums.scale)
    gate_kernels.backward_(gate_tF, up_tF, product_tF)
    # After backward_: gate and up hold their gradients, product the product.
    sums.add(2, gradient_tE, product_tF)
    of_gate_tR, of_up_tR = sums.add(0, gate_tF, x_tE), sums.add(1, up_tF, x_tE)
    torch.mm(gate_tF, whole(weights.gate_FE), out=x_gradient_tE)
    x_gradient_tE.addmm_(up_tF, whole(weights.up_FE))
    for of_adapter_tR, a_RE in ((of_gate_tR, weights.gate_a_RE), (of_up_tR, weights.up_a_RE)):
        if of_adapter_tR is not None and a_RE is not None:
            x_gradient_tE.addmm_(of_adapter_tR, a_RE)

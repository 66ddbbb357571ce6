"""Experts of a mixture in tiles of tokens: copies of tokens for their experts, and the products of
those, are there for one tile at a time, forward and backward.

Kept for the backward pass are the experts' input, which experts each token goes to and with what
weights; a tile's products are computed again, but for the last: the gradient of an expert's weight
in the sum is the product of what goes into its last matrix and the gradient of that. As with a
gated MLP (gated_mlp.py) that costs no time where layers are recomputed. Routers are not part of it:
they see all tokens at once. Adapters of experts (LoRA) always go in tiles.

A family's own experts are what transformers calls one experts implementation of several, of which
this is another; they keep their parameters and their gate.

Shapes:  T tokens  t tokens of a tile  X experts  K experts of a token  S = t K copies, by expert
         E hidden size  F width of an expert  I inputs  O outputs  R rank of an adapter
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from highwater.engine.kernels import gates as gate_kernels
from highwater.engine.models.fused.adapted_linear import Adapter
from highwater.engine.models.fused.gated_mlp import tile_rows
from highwater.nouns.layout import EXPERT_TILE_TOKENS

IMPLEMENTATION = "highwater_tiles"
"""Name of the experts implementation that is registered with transformers."""
_ALIGNED = 8
"""Columns of a matrix whose rows a grouped product takes: 16 bytes of bfloat16."""


class AdaptedExperts(nn.Module):
    """Experts with an adapter on one of their parameters, by peft's names: around the experts, or
    around those with an adapter on the other one.
    """

    def __init__(self, theirs: Any, *, scale: float) -> None:
        """Take over the children of peft's own wrapper."""
        super().__init__()
        for name in ("base_layer", "lora_A", "lora_B"):
            self.add_module(name, getattr(theirs, name))
        self.parameter_name, self.scale = cast(str, theirs.parameter_name), scale
        self.is_on = True
        """True if the adapter takes part."""

    @property
    def adapter(self) -> Adapter | None:
        """The adapter, a matrix for each expert; None while it is turned off."""
        own: Any = self
        if not self.is_on:
            return None
        a, b = own.lora_A["default"].weight, own.lora_B["default"].weight
        experts = self.adapted()[0].num_experts
        # peft's A has the ranks of one expert after another, its B the experts of each rank
        a_XRI = a.view(experts, -1, a.shape[1])
        b_XOR = b.view(len(b), -1, experts).permute(2, 0, 1).contiguous()
        return Adapter(a_XRI, b_XOR, self.scale)

    def adapted(self) -> tuple[Any, "dict[str, AdaptedExperts]"]:
        """Return the experts themselves, and the adapters around them by the parameter's name."""
        inner = self.base_layer
        base, around = inner.adapted() if isinstance(inner, AdaptedExperts) else (inner, {})
        return base, {**around, self.parameter_name: self}

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the experts' output."""
        base, around = self.adapted()
        adapters = {name: each.adapter for name, each in around.items()}
        return experts_output(base, hidden, chosen, weights, adapters)


def use_tiles(experts: Any, *, tiles: int | None, is_plain: bool) -> None:
    """Note on a family's experts in how many tiles they go (None: of a fixed size), and whether
    their gate is ``silu(gate) * up`` of the first and the second half.
    """
    experts.tiles, experts.is_plain = tiles, is_plain


def experts_output(
    experts: Any,
    hidden_TE: Tensor,
    chosen_TK: Tensor,
    weights_TK: Tensor,
    adapters: dict[str, Adapter | None] | None = None,
) -> Tensor:
    """Return the sum of each token's experts, weighted; this is the experts implementation."""
    (gate_up, gate_up_scale), (down, down_scale) = (
        ((None, None), 1.0) if adapter is None else (adapter[:2], adapter.scale)
        for adapter in ((adapters or {}).get(name) for name in ("gate_up_proj", "down_proj"))
    )
    biases = (None, None)
    if experts.has_bias:
        biases = (experts.gate_up_proj_bias, experts.down_proj_bias)
    tensors = _Tensors(experts.gate_up_proj, experts.down_proj, *biases, *gate_up, *down)
    width = experts.down_proj.shape[1 if experts.is_transposed else 2]
    least = EXPERT_TILE_TOKENS[hidden_TE.device.type]
    width *= chosen_TK.shape[1]
    how = _Tiling(
        experts,
        tile_rows(hidden_TE, width, tiles=experts.tiles, least=least),
        (gate_up_scale, down_scale),
    )
    # Two functions, so that the kept tensors, at which a recomputation ends, come before the
    # products are computed.
    kept_TE: Tensor = _KeepExperts.apply(hidden_TE, chosen_TK, weights_TK, how, *tensors)
    detached = (None if each is None else each.detach() for each in tensors)
    routed = (chosen_TK, weights_TK.detach())
    return cast(Tensor, _ComputeExperts.apply(kept_TE, *routed, how, *detached))


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_output)


class _Tiling(NamedTuple):
    experts: Any
    """The family's module, for its gate."""
    rows: int
    """Tokens of a tile."""
    scales: tuple[float, float]
    """Scales of the adapters on gate and up, and on down."""


class _Tensors(NamedTuple):
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate_up_a: Tensor | None = None
    gate_up_b: Tensor | None = None
    down_a: Tensor | None = None
    down_b: Tensor | None = None


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
        how: _Tiling,
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.how = how
        ctx.save_for_backward(x_TE, chosen_TK, weights_TK, *tensors)
        return x_TE.view_as(x_TE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TE, chosen_TK, weights_TK, *kept = ctx.saved_tensors
        how, tensors = cast(_Tiling, ctx.how), _Tensors(*kept)
        gradient_TE = gradients[0].contiguous()
        x_gradient_TE, weights_gradient_TK = torch.empty_like(x_TE), torch.empty_like(weights_TK)
        into, out = _products(how, tensors)
        sums = _ExpertSums(how, tensors, ctx.needs_input_grad[4:])
        whole = (x_TE, chosen_TK, weights_TK, gradient_TE, x_gradient_TE, weights_gradient_TK)
        for tile in zip(*(each.split(how.rows) for each in whole), strict=True):
            # in a function, so that a tile's products are freed before the next one's are made
            _tile_backward(how, tile, into, out, sums)
        return x_gradient_TE, None, weights_gradient_TK, None, *sums.totals()


class _ComputeExperts(torch.autograd.Function):
    """Autograd function that computes the output, keeps nothing, and passes the gradient on."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ARG004 -- it keeps nothing
        x_TE: Tensor,
        chosen_TK: Tensor,
        weights_TK: Tensor,
        how: _Tiling,
        *tensors: Tensor | None,
    ) -> Tensor:
        out_TE = torch.empty_like(x_TE)
        into, out = _products(how, _Tensors(*tensors))  # pyright: ignore[reportArgumentType]
        for tile in zip(
            *(each.split(how.rows) for each in (x_TE, chosen_TK, weights_TK, out_TE)), strict=True
        ):
            _tile_forward(how, tile, into, out)
        return out_TE

    @staticmethod
    # autograd hands ctx in, used or not.
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        return gradients[0], None, None, None, *[None] * len(_Tensors._fields)


@dataclass(frozen=True, slots=True)
class _Copies:
    """The copies of a tile's tokens, in the order of the experts that they go to."""

    order_S: Tensor
    """Number of each copy, as tokens have theirs one after another."""
    token_S: Tensor
    expert_S: Tensor
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
        return _Copies(order_S, order_S // chosen_tK.shape[1], expert_S, place_S, end_X)


@dataclass(frozen=True, slots=True)
class _Product:
    """A matrix of each expert, with its bias and adapter."""

    weight_XOI: Tensor
    bias_XO: Tensor | None
    adapter: Adapter | None

    def of(self, x_SI: Tensor, copies: _Copies) -> Tensor:
        """Return the product with each copy."""
        out_SO = _grouped(x_SI, self.weight_XOI.mT, copies.end_X)
        if self.bias_XO is not None:
            out_SO += self.bias_XO[copies.expert_S]
        if self.adapter is not None:
            a_XRI, b_XOR, scale = self.adapter
            x_SR = _grouped(x_SI, a_XRI.mT, copies.end_X)
            out_SO.add_(_grouped(x_SR, b_XOR.mT, copies.end_X), alpha=scale)
        return out_SO

    def input_gradient(self, gradient_SO: Tensor, copies: _Copies) -> Tensor:
        """Return the gradient of the copies."""
        x_gradient_SI = _grouped(gradient_SO, self.weight_XOI, copies.end_X)
        if self.adapter is not None:
            a_XRI, b_XOR, scale = self.adapter
            of_SR = _grouped(gradient_SO, b_XOR, copies.end_X)
            x_gradient_SI.add_(_grouped(of_SR, a_XRI, copies.end_X), alpha=scale)
        return x_gradient_SI


def _products(how: _Tiling, tensors: _Tensors) -> tuple[list[_Product], _Product]:
    """Return the products with a token, gate and up or both in one, and the one that leads out."""
    experts, (into_scale, out_scale) = how.experts, how.scales
    parts = 2 if experts.is_plain else 1
    gate_up, down = (
        each.mT if experts.is_transposed else each for each in (tensors.gate_up, tensors.down)
    )
    a, bias = tensors.gate_up_a, tensors.gate_up_bias
    biases = (None,) * parts if bias is None else bias.chunk(parts, 1)
    halves = (None,) * parts if tensors.gate_up_b is None else tensors.gate_up_b.chunk(parts, 1)
    into = [
        _Product(weight, bias, None if a is None or b is None else Adapter(a, b, into_scale))
        for weight, bias, b in zip(gate_up.chunk(parts, 1), biases, halves, strict=True)
    ]
    a, b = tensors.down_a, tensors.down_b
    adapter = None if a is None or b is None else Adapter(a, b, out_scale)
    return into, _Product(down, tensors.down_bias, adapter)


class _ExpertSums:
    """Gradients of all tensors that have one, summed over tiles in float32: a tile's share is
    rounded as one of all tokens is.
    """

    def __init__(self, how: _Tiling, tensors: _Tensors, needed: Sequence[bool]) -> None:
        self._how, self._dtype = how, tensors.down.dtype
        wide = torch.promote_types(self._dtype, torch.float32)
        self._sums = _Tensors(
            *(  # pyright: ignore[reportArgumentType]
                torch.zeros_like(each, dtype=wide, memory_format=torch.contiguous_format)
                if each is not None and is_needed
                else None
                for each, is_needed in zip(tensors, needed, strict=True)
            )
        )

    def add(
        self,
        product: _Product,
        copies: _Copies,
        gradient_SO: Tensor,
        x_SI: Tensor,
        *,
        part: int | None = None,
        weights_S: Tensor | None = None,
    ) -> None:
        """Add a tile's share of a product, ``part`` of that with a token, None the last one's;
        ``weights_S`` are in ``x_SI``, not in the gradient.
        """
        name, is_plain = (
            ("down", False) if part is None else ("gate_up", self._how.experts.is_plain)
        )
        sums: dict[str, Tensor | None] = self._sums._asdict()
        parts, part, end_X = (2 if is_plain else 1), part or 0, copies.end_X
        if (weight := sums[name]) is not None:
            if self._how.experts.is_transposed:
                weight.chunk(parts, 2)[part].add_(_grouped(x_SI.T, gradient_SO, end_X))
            else:
                weight.chunk(parts, 1)[part].add_(_grouped(gradient_SO.T, x_SI, end_X))
        if (bias := sums[f"{name}_bias"]) is not None:
            column = torch.ones_like(copies.token_S) if weights_S is None else weights_S
            columns_SA = column.to(gradient_SO.dtype)[:, None].repeat(1, _ALIGNED)
            bias.chunk(parts, 1)[part].add_(_grouped(columns_SA.T, gradient_SO, end_X)[:, 0])
        a, b = sums[f"{name}_a"], sums[f"{name}_b"]
        if a is not None and b is not None and product.adapter is not None:
            a_XRI, b_XOR, scale = product.adapter
            of_SR = _grouped(gradient_SO, b_XOR, end_X)
            a.add_(_grouped(of_SR.T, x_SI, end_X), alpha=scale)
            x_SR = _grouped(x_SI, a_XRI.mT, end_X)
            b.chunk(parts, 1)[part].add_(_grouped(gradient_SO.T, x_SR, end_X), alpha=scale)

    def totals(self) -> list[Tensor | None]:
        """Return the gradients in the order of the tensors, None for those without one."""
        sums = list(self._sums)
        del self._sums
        for number, each in enumerate(sums):  # each is freed before the next one is rounded
            sums[number] = None if each is None else each.to(self._dtype)
        return sums


def _tile_forward(
    how: _Tiling, tile: tuple[Tensor, ...], into: Sequence[_Product], out: _Product
) -> None:
    """Write the output of one tile."""
    x_tE, chosen_tK, weights_tK, out_tE = tile
    copies = _Copies.of(chosen_tK, how.experts.num_experts)
    x_SE = x_tE[copies.token_S]
    products = [each.of(x_SE, copies) for each in into]
    del x_SE
    if how.experts.is_plain:
        gate_kernels.product_(products[0], products[1])
    else:
        products[0] = how.experts._apply_gate(products[0])
    out_SE = out.of(products[0], copies)
    del products
    # float32 weights give a float32 product, as in the families' own
    weighted_SE = out_SE * weights_tK.flatten()[copies.order_S][:, None]
    del out_SE
    weighted_SE = weighted_SE[copies.place_S]
    out_tE.copy_(weighted_SE.view(*chosen_tK.shape, -1).sum(dim=1))


def _tile_backward(
    how: _Tiling,
    tile: tuple[Tensor, ...],
    into: Sequence[_Product],
    out: _Product,
    sums: _ExpertSums,
) -> None:
    """Compute the gradients of one tile, whose products are computed again."""
    x_tE, chosen_tK, weights_tK, gradient_tE, x_gradient_tE, weights_gradient_tK = tile
    copies = _Copies.of(chosen_tK, how.experts.num_experts)
    x_SE = x_tE[copies.token_S]
    products = [each.of(x_SE, copies) for each in into]
    del x_SE
    # Of the sum before it is weighted: all gradients are those times a copy's weight.
    gradient_SE = gradient_tE[copies.token_S]
    inner_SF = out.input_gradient(gradient_SE, copies)
    share_SF = inner_SF.clone()
    inner_SF, gradients = _gate_backward(how, products, inner_SF)
    del products
    weights_gradient_S = share_SF.mul_(inner_SF).sum(dim=-1)
    del share_SF
    if out.bias_XO is not None:
        weights_gradient_S += (gradient_SE * out.bias_XO[copies.expert_S]).sum(dim=-1)
    weights_gradient_tK.copy_(weights_gradient_S[copies.place_S].view_as(chosen_tK))
    weights_S = weights_tK.flatten()[copies.order_S]
    inner_SF.mul_(weights_S[:, None])
    sums.add(out, copies, gradient_SE, inner_SF, weights_S=weights_S)
    del gradient_SE, inner_SF
    x_SE = x_tE[copies.token_S]
    for part, product in enumerate(into):
        gradients[part].mul_(weights_S[:, None])
        sums.add(product, copies, gradients[part], x_SE, part=part)
    del x_SE
    x_gradient_SE = into[-1].input_gradient(gradients.pop(), copies)
    for product in into[:-1]:
        x_gradient_SE += product.input_gradient(gradients.pop(), copies)
    x_gradient_SE = x_gradient_SE[copies.place_S]
    torch.sum(x_gradient_SE.view(*chosen_tK.shape, -1), dim=1, out=x_gradient_tE)


def _gate_backward(
    how: _Tiling, products: list[Tensor], gradient_SF: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Return what the gate gives, and the gradients of its inputs; a plain gate overwrites all."""
    if how.experts.is_plain:
        gate_kernels.backward_(products[0], products[1], gradient_SF)
        return gradient_SF, list(products)
    with torch.enable_grad():
        inputs = products[0].requires_grad_()
        inner_SF: Tensor = how.experts._apply_gate(inputs)
    (gradient,) = torch.autograd.grad(inner_SF, inputs, gradient_SF)
    return inner_SF.detach(), [gradient]


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

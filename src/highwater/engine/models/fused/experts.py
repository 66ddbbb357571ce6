"""Experts of a mixture in tiles of tokens: the copies of tokens for their experts, and the products
of these copies, exist for one tile at a time, forward and backward.

Kept for the backward pass are the experts' input, and the experts and weights of each token. A
tile's products are computed again, except the last: the gradient of a token's weight for an expert
is the last matrix's input times that input's gradient. As with a gated MLP (gated_mlp.py) this
costs no time where layers are recomputed. Routers are not in tiles: they see all tokens at once. If
all tokens fit one tile and there is no LoRA, the family's own implementation computes them.

This is registered with transformers as one more experts implementation; a family's experts keep
their parameters.

Shapes:  T tokens  t tokens of a tile  X experts  K experts of a token  S = t K copies, by expert
         E hidden size  F width of an expert  I inputs  O outputs  R rank of an adapter
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from highwater.engine.kernels import gates as gate_kernels
from highwater.nouns.layout import expert_tile_tokens

IMPLEMENTATION = "highwater_tiles"
"""Name of the experts implementation that is registered with transformers."""


def use_tiles(experts: Any, *, tiles: int | None, untiled: Callable[..., Tensor]) -> None:
    """Set the number of tiles on a family's experts (None: tiles of a fixed size), and the
    implementation to use if all tokens fit in one tile.
    """
    experts.tiles, experts.untiled = tiles, untiled


class AdaptedExperts(nn.Module):
    """Experts with an adapter on one of their parameters, by peft's names. The base layer is the
    family's experts, or AdaptedExperts with an adapter on the other parameter.
    """

    def __init__(self, theirs: Any, *, scale: float) -> None:
        """Use the children of ``theirs``, peft's own wrapper, as those of this one."""
        super().__init__()
        inner = theirs.base_layer
        self.base_layer = AdaptedExperts(inner, scale=scale) if hasattr(inner, "lora_A") else inner
        self.lora_A, self.lora_B = theirs.lora_A, theirs.lora_B
        self.parameter_name, self.scale = cast(str, theirs.parameter_name), scale
        self.is_on = True
        """True if the adapter takes part."""

    def adapted(self) -> tuple[Any, dict[str, Tensor]]:
        """Return the inner experts, and all adapters' A and B by the names of _ExpertWeights."""
        inner = self.base_layer
        base, around = inner.adapted() if isinstance(inner, AdaptedExperts) else (inner, {})
        if not self.is_on:
            return base, around
        a, b = self.lora_A["default"].weight, self.lora_B["default"].weight
        # peft's A has the ranks of one expert after another, its B the experts of each rank
        a_XRI = a.view(base.num_experts, -1, a.shape[1])
        b_ORX = b.view(len(b), -1, base.num_experts)
        name = self.parameter_name.removesuffix("_proj")
        return base, {**around, f"{name}_a": a_XRI, f"{name}_b": b_ORX}

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the experts' output."""
        base, adapters = self.adapted()
        return experts_output(base, hidden, chosen, weights, adapters, scale=self.scale)


def experts_output(
    experts: Any,
    hidden_TE: Tensor,
    chosen_TK: Tensor,
    weights_TK: Tensor,
    adapters: Mapping[str, Tensor] = MappingProxyType({}),
    scale: float = 1.0,
) -> Tensor:
    """Return each token's weighted sum of its experts' outputs, (T, E); transformers calls this."""
    rows = expert_tile_tokens(len(hidden_TE), tiles=experts.tiles)
    if rows >= len(hidden_TE) and not adapters:
        return experts.untiled(experts, hidden_TE, chosen_TK, weights_TK)
    weights = _ExpertWeights(experts.gate_up_proj, experts.down_proj, **adapters)
    # Two functions, so that a recomputation, which ends at the last kept tensor, computes no
    # products.
    kept_TE: Tensor = _KeepExperts.apply(hidden_TE, chosen_TK, weights_TK, rows, scale, *weights)
    detached = (None if each is None else each.detach() for each in (weights_TK, *weights))
    return cast(Tensor, _ComputeExperts.apply(kept_TE, rows, scale, chosen_TK, *detached))


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_output)


class _ExpertWeights(NamedTuple):
    gate_up: Tensor
    """Shape (X, 2 F, E): rows of gate, then rows of up."""
    down: Tensor
    """Shape (X, E, F)."""
    gate_up_a: Tensor | None = None
    """Shape (X, R, E)."""
    gate_up_b: Tensor | None = None
    """Shape (2 F, R, X)."""
    down_a: Tensor | None = None
    down_b: Tensor | None = None

    def products(self, scale: float) -> tuple["_ExpertProduct", ...]:
        """Return the products of gate and up, which share an adapter's A, and of down."""
        halves = (None, None) if self.gate_up_b is None else self.gate_up_b.chunk(2)
        of_each = (
            *zip(self.gate_up.chunk(2, dim=1), (self.gate_up_a,) * 2, halves, strict=True),
            (self.down, self.down_a, self.down_b),
        )
        return tuple(
            _ExpertProduct(weight, a, None if b is None else b.permute(2, 0, 1).contiguous(), scale)
            for weight, a, b in of_each
        )


class _ExpertProduct(NamedTuple):
    """One matrix of every expert, with the adapter on it, if there is one."""

    weight_XOI: Tensor
    a_XRI: Tensor | None
    b_XOR: Tensor | None
    scale: float

    def of(self, x_SI: Tensor, end_X: Tensor) -> Tensor:
        """Return each copy's product with its expert's matrix, SO."""
        out_SO = _grouped(x_SI, self.weight_XOI.mT, end_X)
        if self.a_XRI is not None and self.b_XOR is not None:
            x_SR = _grouped(x_SI, self.a_XRI.mT, end_X)
            out_SO.add_(_grouped(x_SR, self.b_XOR.mT, end_X), alpha=self.scale)
        return out_SO


class _KeepExperts(torch.autograd.Function):
    """Autograd function that returns its input unchanged, and computes all gradients: it is given
    the gradient of the experts' *output* in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TE: Tensor,
        chosen_TK: Tensor,
        weights_TK: Tensor,
        rows: int,
        scale: float,
        *weights: Tensor | None,
    ) -> Tensor:
        ctx.rows, ctx.scale = rows, scale
        ctx.save_for_backward(x_TE, chosen_TK, weights_TK, *weights)
        return x_TE.view_as(x_TE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TE, chosen_TK, weights_TK, *kept = ctx.saved_tensors
        gradient_TE, weights = gradients[0].contiguous(), _ExpertWeights(*kept)
        x_gradient_TE, weights_gradient_TK = torch.empty_like(x_TE), torch.empty_like(weights_TK)
        products, sums = weights.products(ctx.scale), _ExpertSums(weights, ctx.needs_input_grad[5:])
        whole = (x_TE, chosen_TK, weights_TK, gradient_TE, x_gradient_TE, weights_gradient_TK)
        for tile in zip(*(each.split(ctx.rows) for each in whole), strict=True):
            # in a function, so that a tile's products are freed before the next one's are made
            _tile_backward(tile, products, sums)
        return x_gradient_TE, None, weights_gradient_TK, None, None, *sums.totals()


class _ComputeExperts(torch.autograd.Function):
    """Autograd function that computes the output, keeps nothing, and returns the gradient as is."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ARG004 -- it keeps nothing
        x_TE: Tensor,
        rows: int,
        scale: float,
        chosen_TK: Tensor,
        weights_TK: Tensor,
        *weights: Tensor | None,
    ) -> Tensor:
        out_TE = torch.empty_like(x_TE)
        products = _ExpertWeights(*weights).products(scale)  # pyright: ignore[reportArgumentType]
        whole = (x_TE, chosen_TK, weights_TK, out_TE)
        for tile in zip(*(each.split(rows) for each in whole), strict=True):
            _tile_forward(tile, products)
        return out_TE

    @staticmethod
    # autograd hands ctx in, used or not.
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        return gradients[0], None, None, None, None, *[None] * len(_ExpertWeights._fields)


@dataclass(frozen=True, slots=True)
class _ExpertCopies:
    """Copies of a tile's tokens, one for each chosen expert, sorted by expert."""

    order_S: Tensor
    """Index that each copy had before sorting, token after token."""
    token_S: Tensor
    place_S: Tensor
    """Index after sorting of each copy, token after token: the inverse of ``order_S``."""
    end_X: Tensor
    """Index past each expert's last copy."""

    @staticmethod
    def of(chosen_tK: Tensor, experts: int) -> "_ExpertCopies":
        """Sort the copies of a tile's tokens by expert."""
        expert_S, order_S = chosen_tK.flatten().sort()
        numbers = torch.arange(max(experts, len(order_S)), device=order_S.device)
        place_S = torch.empty_like(order_S).scatter_(0, order_S, numbers[: len(order_S)])
        end_X = torch.searchsorted(expert_S, numbers[:experts], right=True, out_int32=True)
        return _ExpertCopies(order_S, order_S // chosen_tK.shape[1], place_S, end_X)


class _ExpertSums:
    """Gradients of weights, summed over tiles in float32 or wider; a tile's gradient is rounded to
    the weights' dtype, as a gradient over all tokens would be.
    """

    def __init__(self, weights: _ExpertWeights, needed: Sequence[bool]) -> None:
        self._dtype = weights.down.dtype
        wide = torch.promote_types(self._dtype, torch.float32)
        self._sums = [
            torch.zeros_like(each, dtype=wide) if each is not None and is_needed else None
            for each, is_needed in zip(weights, needed, strict=True)
        ]

    def add_into(self, part: int, product: _ExpertProduct, *given: Tensor) -> None:
        """Add a tile's gradients for gate (part 0) or up (1); ``given``: the gradient of the
        product, its input, and the index after each expert's last copy.
        """
        weight, _, a, b, *_ = self._sums
        weight = None if weight is None else weight.chunk(2, dim=1)[part]
        _add(product, weight, a, None if b is None else b.chunk(2)[part], *given)

    def add_out(self, product: _ExpertProduct, *given: Tensor) -> None:
        """Add a tile's gradients for down; ``given`` is as in ``add_into``."""
        _, weight, _, _, a, b = self._sums
        _add(product, weight, a, b, *given)

    def totals(self) -> list[Tensor | None]:
        """Return the gradients in the weights' dtype and order; None for frozen weights."""
        for number, each in enumerate(self._sums):  # freed before the next one is rounded
            self._sums[number] = None if each is None else each.to(self._dtype)
        return self._sums


def _add(
    product: _ExpertProduct,
    weight_XOI: Tensor | None,
    a_XRI: Tensor | None,
    b_ORX: Tensor | None,
    gradient_SO: Tensor,
    x_SI: Tensor,
    end_X: Tensor,
) -> None:
    """Add a share to the gradients of a product's weight and adapter."""
    if weight_XOI is not None:
        weight_XOI.add_(_grouped(gradient_SO.T, x_SI, end_X))
    if a_XRI is not None and product.b_XOR is not None:
        of_SR = _grouped(gradient_SO, product.b_XOR, end_X)
        a_XRI.add_(_grouped(of_SR.T, x_SI, end_X), alpha=product.scale)
    if b_ORX is not None and product.a_XRI is not None:
        x_SR = _grouped(x_SI, product.a_XRI.mT, end_X)
        b_XOR = _grouped(gradient_SO.T, x_SR, end_X)
        b_ORX.add_(b_XOR.permute(1, 2, 0), alpha=product.scale)


def _tile_forward(tile: tuple[Tensor, ...], products: tuple[_ExpertProduct, ...]) -> None:
    """Compute the experts' output of one tile into its last tensor."""
    x_tE, chosen_tK, weights_tK, out_tE = tile
    *into, out = products
    copies = _ExpertCopies.of(chosen_tK, len(out.weight_XOI))
    x_SE = x_tE[copies.token_S]
    inner_SF, up_SF = (each.of(x_SE, copies.end_X) for each in into)
    del x_SE
    gate_kernels.product_(inner_SF, up_SF)
    del up_SF
    out_SE = out.of(inner_SF, copies.end_X)
    del inner_SF
    # float32 weights give a float32 product, as in the families' own
    weighted_SE = out_SE * weights_tK.flatten()[copies.order_S][:, None]
    del out_SE
    weighted_SE = weighted_SE[copies.place_S]
    out_tE.copy_(weighted_SE.view(*chosen_tK.shape, -1).sum(dim=1))


def _tile_backward(
    tile: tuple[Tensor, ...], products: tuple[_ExpertProduct, ...], sums: _ExpertSums
) -> None:
    """Compute the gradients of one tile; its products are recomputed and overwritten."""
    x_tE, chosen_tK, weights_tK, gradient_tE, x_gradient_tE, weights_gradient_tK = tile
    *into, out = products
    copies = _ExpertCopies.of(chosen_tK, len(out.weight_XOI))
    end_X = copies.end_X
    x_SE = x_tE[copies.token_S]
    gate_SF, up_SF = (each.of(x_SE, end_X) for each in into)
    del x_SE
    # Without the copies' weights, by which the products' gradients are multiplied below.
    gradient_SE = gradient_tE[copies.token_S]
    inner_SF = _input_gradient([out], [gradient_SE], end_X)
    share_SF = inner_SF.clone()
    gate_kernels.backward_(gate_SF, up_SF, inner_SF)
    # After backward_: gate and up hold their gradients, inner what goes into the last matrix.
    weights_gradient_S = share_SF.mul_(inner_SF).sum(dim=-1)
    del share_SF
    weights_gradient_tK.copy_(weights_gradient_S[copies.place_S].view_as(chosen_tK))
    weights_S1 = weights_tK.flatten()[copies.order_S][:, None]
    sums.add_out(out, gradient_SE, inner_SF.mul_(weights_S1), end_X)
    del gradient_SE, inner_SF
    x_SE = x_tE[copies.token_S]
    sums.add_into(0, into[0], gate_SF.mul_(weights_S1), x_SE, end_X)
    sums.add_into(1, into[1], up_SF.mul_(weights_S1), x_SE, end_X)
    del x_SE
    gradients = [gate_SF, up_SF]
    del gate_SF, up_SF
    x_gradient_SE = _input_gradient(into, gradients, end_X)[copies.place_S]
    torch.sum(x_gradient_SE.view(*chosen_tK.shape, -1), dim=1, out=x_gradient_tE)


def _input_gradient(
    products: Sequence[_ExpertProduct], gradients: list[Tensor], end_X: Tensor
) -> Tensor:
    """Return the gradient of the common input of all ``products``, which share an adapter's A. The
    products' ``gradients`` are freed one after another.
    """
    total_SI = total_SR = None
    for product in reversed(products):
        gradient_SO = gradients.pop()
        share_SI = _grouped(gradient_SO, product.weight_XOI, end_X)
        total_SI = share_SI if total_SI is None else total_SI.add_(share_SI)
        if product.b_XOR is not None:
            share_SR = _grouped(gradient_SO, product.b_XOR, end_X)
            total_SR = share_SR if total_SR is None else total_SR.add_(share_SR)
        del gradient_SO, share_SI
    assert total_SI is not None, "there is a product"
    if total_SR is not None and (a_XRI := products[0].a_XRI) is not None:
        total_SI.add_(_grouped(total_SR, a_XRI, end_X), alpha=products[0].scale)
    return total_SI


def _grouped(a: Tensor, b: Tensor, end_X: Tensor) -> Tensor:
    """Return a product for each expert's copies: of a's rows with the expert's matrix in ``b``, or
    if ``b`` is one matrix, of a's columns with b's rows.
    """
    if a.dtype is not torch.float64:
        return F.grouped_mm(a, b, offs=end_X)
    starts, ends = [0, *end_X[:-1].tolist()], end_X.tolist()  # grouped_mm has no float64
    each = [slice(*bounds) for bounds in zip(starts, ends, strict=True)]
    if b.ndim == 3:
        return torch.cat([a[rows] @ matrix for rows, matrix in zip(each, b, strict=True)])
    return torch.stack([a[:, rows] @ b[rows] for rows in each])

"""Head groups: a layer's attention, computed for some of its key/value heads at a time.

Queries, keys and values, their rotated copies, and what the attention kernel takes while it goes
backward are alive for one group of heads. Kept for the backward pass are the input, and what
attention returns with its log-sum-exps, so that the kernel does not go forward again; queries, keys
and values are projected once more. Products over all heads stay whole, as without groups: the
output projection, and the gradients of input, weights, biases and adapters, from the groups'
gradients side by side. Nothing is summed over groups but the gradients of the heads' norms, in
float32.

Shapes:  B 1  T tokens  E hidden size  D head size  H query heads  K key/value heads, X either
         I inputs  O outputs of a projection, or a group's share of them
"""

from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from highwater.engine.attention.block_attention import Attended, giving, keeping
from highwater.engine.kernels import rotary as rotary_kernels
from highwater.engine.models.fused.adapted_linear import (
    Adapter,
    adapted_product,
    parameter_gradients,
    parts_of,
)
from highwater.engine.models.fused.nf4 import Weight, as_tensor, weight_of, whole

_OUTPUT = 3
"""Number of the output projection, after those of queries, keys and values."""
_FIRST = 7
"""Number of the first projection's weight among the arguments of the autograd function: four of
each projection, its weight, bias, and both matrices of its adapter."""


class Plan(NamedTuple):
    """How the heads are computed."""

    groups: int
    head_dim: int
    epsilons: Sequence[float]
    """Those of the norms of query and key heads; anything without norms."""
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Attention that asks ``attended``: query BHTD, key and value BKTD, to BTHD."""


def attention_in_groups(
    hidden_BTE: Tensor,
    positions_BTD: tuple[Tensor, Tensor],
    norms: Sequence[Tensor | None],
    projections: Sequence[Any],
    plan: Plan,
) -> Tensor:
    """Return a layer's attention, BTE: ``projections`` are those of queries, keys, values and
    output, ``norms`` the weights of the norms of query and key heads, ``positions`` cosines and
    sines.
    """
    pairs = [parts_of(projection) for projection in projections]
    scale = next((adapter.scale for _, adapter in pairs if adapter is not None), 1.0)
    flat = (
        (weight_of(linear), linear.bias, *((None, None) if adapter is None else adapter[:2]))
        for linear, adapter in pairs
    )
    tensors = (each.squeeze(0) for each in (hidden_BTE, *positions_BTD))
    out_TE: Tensor = _Attention.apply(plan, scale, *tensors, *norms, *chain.from_iterable(flat))
    return out_TE[None]


class _Projection(NamedTuple):
    weight_OI: Weight
    bias_O: Tensor | None
    adapter: Adapter | None


class _Layer(NamedTuple):
    """A layer's attention, from what its autograd function is called with."""

    plan: Plan
    x_TE: Tensor
    positions_TD: tuple[Tensor, Tensor]
    norms_D: tuple[Tensor | None, Tensor | None]
    projections: list[_Projection]

    @classmethod
    def of(cls, plan: Plan, scale: float, *tensors: Any) -> "_Layer":
        x_TE, cosines_TD, sines_TD, query_norm_D, key_norm_D, *flat = tensors
        projections = [
            _Projection(weight, bias, None if a is None else Adapter(a, b, scale))
            for weight, bias, a, b in zip(*(flat[part::4] for part in range(4)), strict=True)
        ]
        norms_D = query_norm_D, key_norm_D
        return cls(plan, x_TE, (cosines_TD, sines_TD), norms_D, projections)

    def share(self, group: int, size: int) -> slice:
        """A group's place among all heads, in a dimension of this size."""
        each = size // self.plan.groups
        return slice(group * each, (group + 1) * each)

    def heads(self, number: int, group: int) -> Tensor:
        """Project the queries (0), keys (1) or values (2) of a group's heads: TXD."""
        weight, bias_O, adapter = self.projections[number]
        weight_OI = whole(weight)
        rows = self.share(group, len(weight_OI))
        bias_O = None if bias_O is None else bias_O[rows]
        adapter = None if adapter is None else adapter._replace(b_OR=adapter.b_OR[rows])
        product_TO = adapted_product(self.x_TE, weight_OI[rows], bias_O, adapter)
        return product_TO.unflatten(-1, (-1, self.plan.head_dim))

    def rotated(self, number: int, heads_TXD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Norm and rotate queries (0) or keys (1); also returns what the norm divided heads by."""
        norm_D, eps = self.norms_D[number], self.plan.epsilons[number]
        return rotary_kernels.rotate(heads_TXD, norm_D, eps, *self.positions_TD)

    def output_gradient(self, group: int, gradient_TE: Tensor) -> Tensor:
        """Return the gradient of what attention returns for a group's heads: TO."""
        weight, _, adapter = self.projections[_OUTPUT]
        weight_EI = whole(weight)
        columns = self.share(group, weight_EI.shape[1])
        gradient_TO = gradient_TE @ weight_EI[:, columns]
        if adapter is not None:
            gradient_TO.addmm_(_of_inner(gradient_TE, adapter), adapter.a_RI[:, columns])
        return gradient_TO


class _Attention(torch.autograd.Function):
    """Autograd function over all groups."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, scale: float, *tensors: Any) -> Tensor:
        layer, results = _Layer.of(plan, scale, *tensors), list[Attended]()
        with keeping(results.append):
            outputs_TO = [_forward(layer, group) for group in range(plan.groups)]
        ctx.plan, ctx.scale, ctx.sizes = plan, scale, [len(each) for each in results]
        ctx.packed = [None if isinstance(each, Tensor) else each for each in tensors]
        kept = (*map(as_tensor, tensors), *outputs_TO, *chain.from_iterable(results))
        ctx.save_for_backward(*kept)
        return adapted_product(torch.cat(outputs_TO, dim=1), *layer.projections[_OUTPUT])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kept, (gradient_TE,) = iter(ctx.saved_tensors), gradients
        first = list(islice(kept, len(ctx.packed)))
        tensors = (a if b is None else b for a, b in zip(first, ctx.packed, strict=True))
        layer = _Layer.of(ctx.plan, ctx.scale, *tensors)
        outputs_TO = list(islice(kept, ctx.plan.groups))
        # Detached: a function that returns one of them would hang the graph of its group on it, and
        # so keep the group's heads for as long as this is kept.
        results = [tuple(t.detach() for t in islice(kept, size)) for size in ctx.sizes]
        needed = [ctx.needs_input_grad[_FIRST + 4 * each :][:2] for each in range(_OUTPUT + 1)]
        of_output = _parameters(layer, _OUTPUT, gradient_TE, outputs_TO, needed[_OUTPUT])
        parts_TO: tuple[list[Tensor], ...] = ([], [], [])
        of_norms: list[Tensor | None] = [None, None]
        with giving(lambda: results.pop(0)):
            for group in range(ctx.plan.groups):
                _backward(layer, group, gradient_TE, parts_TO, of_norms)
        x_gradient_TE: Tensor | None = None
        of_others: list[Tensor | None] = []
        for number, parts in enumerate(parts_TO):
            of_heads_TO = torch.cat(parts, dim=1)
            parts.clear()
            if ctx.needs_input_grad[2]:
                x_gradient_TE = _input(layer.projections[number], of_heads_TO, x_gradient_TE)
            of_others += _parameters(layer, number, of_heads_TO, [layer.x_TE], needed[number])
        wide = zip(of_norms, layer.norms_D, strict=True)
        norms = (None if a is None or b is None else a.to(b.dtype) for a, b in wide)
        return None, None, x_gradient_TE, None, None, *norms, *of_others, *of_output


def _forward(layer: _Layer, group: int) -> Tensor:
    """Return what attention returns for a group's heads: TO."""
    query_THD, key_TKD = (layer.rotated(each, layer.heads(each, group))[0] for each in (0, 1))
    return _attended(layer, query_THD, key_TKD, layer.heads(2, group))


def _attended(layer: _Layer, *heads_TXD: Tensor) -> Tensor:
    by_heads = (each.transpose(0, 1)[None] for each in heads_TXD)
    return layer.plan.attend(*by_heads).squeeze(0).flatten(1)


def _backward(
    layer: _Layer,
    group: int,
    gradient_TE: Tensor,
    parts_TO: Sequence[list[Tensor]],
    of_norms: list[Tensor | None],
) -> None:
    """Add the gradients of a group's queries, keys and values as they were projected to
    ``parts_TO``, and those of the norms' weights to ``of_norms``.
    """
    leaves: list[Tensor] = []
    normed: list[tuple[Tensor, Tensor] | None] = []
    for number in (0, 1):
        heads_TXD = layer.heads(number, group)
        rotated_TXD, scales_TX = layer.rotated(number, heads_TXD)
        leaves.append(rotated_TXD)
        normed.append(None if scales_TX is None else (heads_TXD, scales_TX))
        del heads_TXD
    leaves.append(layer.heads(2, group))
    with torch.enable_grad():
        output_TO = _attended(layer, *(leaf.requires_grad_() for leaf in leaves))
    found = torch.autograd.grad(output_TO, leaves, layer.output_gradient(group, gradient_TE))
    leaves.clear()
    for number, (gradient_TXD, kept) in enumerate(zip(found, (*normed, None), strict=True)):
        if number < 2:
            gradient_TXD = _unrotated(layer, number, gradient_TXD, kept, of_norms)
        parts_TO[number].append(gradient_TXD.flatten(1))


def _unrotated(
    layer: _Layer,
    number: int,
    gradient_TXD: Tensor,
    normed: tuple[Tensor, Tensor] | None,
    of_norms: list[Tensor | None],
) -> Tensor:
    """Return the gradient of heads before norm and rotation; adds that of the norm's weight."""
    norm_D = layer.norms_D[number]
    if gradient_TXD.stride(-1) != 1:  # the kernels need a dense last dimension
        gradient_TXD = gradient_TXD.contiguous()
    # Without a norm the heads are read for their shape alone, which the gradient has too.
    heads_TXD, scales_TX = (gradient_TXD, None) if normed is None else normed
    if norm_D is not None:  # its gradient is rounded once, as the sum over all groups
        norm_D = norm_D.to(torch.promote_types(norm_D.dtype, torch.float32))
    found_TXD, of_norm_D = rotary_kernels.backward(
        gradient_TXD, heads_TXD, norm_D, scales_TX, *layer.positions_TD
    )
    before_D = of_norms[number]
    of_norms[number] = of_norm_D if before_D is None or of_norm_D is None else before_D + of_norm_D
    return found_TXD


def _input(projection: _Projection, gradient_TO: Tensor, before_TE: Tensor | None) -> Tensor:
    """Return the gradient of a projection's input, added to ``before``, which it overwrites."""
    weight_OI, adapter = whole(projection.weight_OI), projection.adapter
    if before_TE is None:
        before_TE = gradient_TO @ weight_OI
    else:
        before_TE.addmm_(gradient_TO, weight_OI)
    if adapter is not None:
        before_TE.addmm_(_of_inner(gradient_TO, adapter), adapter.a_RI)
    return before_TE


def _parameters(
    layer: _Layer,
    number: int,
    gradient_TO: Tensor,
    inputs_TI: list[Tensor],
    needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a projection's weight, bias and adapter; ``inputs`` are parts of what
    it was given, side by side.
    """
    adapter = layer.projections[number].adapter
    if adapter is None and not any(needed):
        return (None,) * 4
    x_TI = inputs_TI[0] if len(inputs_TI) == 1 else torch.cat(inputs_TI, dim=1)
    of_inner_TR = None if adapter is None else _of_inner(gradient_TO, adapter)
    return parameter_gradients(gradient_TO, x_TI, adapter, of_inner_TR, needed=needed)


def _of_inner(gradient_TO: Tensor, adapter: Adapter) -> Tensor:
    """Return the gradient of an adapter's inner product, ``x A^T``."""
    return (gradient_TO @ adapter.b_OR).mul_(adapter.scale)

"""Head groups: a layer's attention, computed for some of its key/value heads at a time.

Queries, keys and values, their rotated copies, and the kernel's backward buffers exist for one
group of heads at a time. Kept for the backward pass are the input, and attention's output with its
log-sum-exps, so that the kernel does not run forward again; queries, keys and values are projected
again. Products over all heads stay whole, as without groups: the output projection, and the
gradients of input, weights, biases and adapters, from the concatenated gradients of groups. Only
the gradients of the heads' norms are summed over groups, in float32.

Shapes:  B 1  T tokens  E hidden size  D head size  I inputs  R rank of an adapter  O outputs of a
         projection, or a group's share of them
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from highwater.engine.attention.block_attention import Attended, giving, keeping
from highwater.engine.models.fused.adapted_linear import (
    Adapter,
    adapted_product,
    parts_of,
    product_backward,
)
from highwater.engine.models.fused.nf4 import Weight, as_tensor, weight_of, whole

AttendHeads = Callable[..., Tensor]
"""Function of a group's projected queries, keys and values, each TO, and the weights of the norms
of query and key heads, each D or None; returns attention's output, TO. It calls ``attended``."""


def attention_in_groups(
    hidden_BTE: Tensor,
    norms_D: Sequence[Tensor | None],
    projections: Sequence[Any],
    attend: AttendHeads,
    *,
    groups: int,
) -> Tensor:
    """Return a layer's attention output, BTE; ``projections``: q, k, v, output, in this order."""
    pairs = [parts_of(projection) for projection in projections]
    scale = next((adapter.scale for _, adapter in pairs if adapter is not None), 1.0)
    flat = (
        (weight_of(linear), linear.bias, *((None, None) if adapter is None else adapter[:2]))
        for linear, adapter in pairs
    )
    plan, tensors = _Plan(groups, scale, attend), chain(norms_D, *flat)
    out_TE: Tensor = _Attention.apply(plan, hidden_BTE.squeeze(0), *tensors)
    return out_TE[None]


class _Plan(NamedTuple):
    groups: int
    scale: float
    """Scale of the adapters."""
    attend: AttendHeads

    def share(self, group: int, size: int) -> slice:
        """Return a group's slice of a dimension of ``size`` over all heads."""
        return slice(group * size // self.groups, (group + 1) * size // self.groups)


class _Projection(NamedTuple):
    weight_OI: Weight
    bias_O: Tensor | None
    adapter: Adapter | None

    def of_heads(self, x_TI: Tensor, plan: _Plan, group: int) -> Tensor:
        """Return the projection of ``x_TI`` to a group's heads, TO."""
        weight_OI, bias_O, adapter = whole(self.weight_OI), self.bias_O, self.adapter
        rows = plan.share(group, len(weight_OI))
        adapter = None if adapter is None else adapter._replace(b_OR=adapter.b_OR[rows])
        bias_O = None if bias_O is None else bias_O[rows]
        return adapted_product(x_TI, weight_OI[rows], bias_O, adapter)

    def gradient_of_heads(self, gradient_TO: Tensor, plan: _Plan, group: int) -> Tensor:
        """Return the gradient of this projection's input, of the group's heads alone, TI."""
        weight_OI, adapter = whole(self.weight_OI), self.adapter
        columns = plan.share(group, weight_OI.shape[1])
        found_TI = gradient_TO @ weight_OI[:, columns]
        if adapter is not None:
            of_inner_TR = (gradient_TO @ adapter.b_OR).mul_(adapter.scale)
            found_TI.addmm_(of_inner_TR, adapter.a_RI[:, columns])
        return found_TI


def _projections(plan: _Plan, flat: Sequence[Any]) -> Iterator[_Projection]:
    for first in range(0, len(flat), 4):
        weight_OI, bias_O, a_RI, b_OR = flat[first : first + 4]
        adapter = None if a_RI is None else Adapter(a_RI, b_OR, plan.scale)
        yield _Projection(weight_OI, bias_O, adapter)


class _Attention(torch.autograd.Function):
    """Autograd function of attention over all head groups."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, x_TE: Tensor, *tensors: Any) -> Tensor:
        *inner, output = _projections(plan, tensors[2:])
        outputs_TO: list[Tensor] = []
        results: list[Attended] = []
        with keeping(results.append):
            for group in range(plan.groups):
                heads = (each.of_heads(x_TE, plan, group) for each in inner)
                outputs_TO.append(plan.attend(*heads, *tensors[:2]))
        ctx.plan, ctx.sizes = plan, [len(each) for each in results]
        ctx.packed = [None if isinstance(each, Tensor) else each for each in tensors]
        kept = (*map(as_tensor, tensors), *outputs_TO, *chain.from_iterable(results))
        ctx.save_for_backward(x_TE, *kept)
        return adapted_product(torch.cat(outputs_TO, dim=1), *output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        plan, (gradient_TE,), (x_TE, *saved) = ctx.plan, gradients, ctx.saved_tensors
        pairs = zip(saved, ctx.packed, strict=False)
        tensors = [plain if packed is None else packed for plain, packed in pairs]
        *inner, output = _projections(plan, tensors[2:])
        kept = iter(saved[len(tensors) :])
        outputs_TO = list(islice(kept, plan.groups))
        # Detached: a function that returns such a tensor would attach its group's graph to it, and
        # so keep the group's heads for as long as the tensor.
        results = [tuple(t.detach() for t in islice(kept, size)) for size in ctx.sizes]
        _, of_x, *needed = ctx.needs_input_grad
        of_output: Sequence[Tensor | None] = (None,) * 4
        if any(needed[14:]):
            _, *of_output = product_backward(
                *(gradient_TE, torch.cat(outputs_TO, dim=1), output.weight_OI, output.adapter),
                needed=(False, *needed[14:16]),
            )
        parts_TO: list[list[Tensor]] = [[], [], []]
        of_norms: list[Tensor | None] = [None, None]
        with giving(lambda: results.pop(0)):
            for group in range(plan.groups):
                heads = (each.of_heads(x_TE, plan, group) for each in inner)
                _backward(
                    *(plan.attend, heads, tensors[:2]),
                    output.gradient_of_heads(gradient_TE, plan, group),
                    *(parts_TO, of_norms),
                )
        x_gradient_TE: Tensor | None = None
        of_inner: list[Tensor | None] = []
        for number, projection in enumerate(inner):
            of_heads_TO = torch.cat(parts_TO[number], dim=1)
            parts_TO[number].clear()
            x_gradient_TE, *others = product_backward(
                *(of_heads_TO, x_TE, projection.weight_OI, projection.adapter),
                needed=(of_x, *needed[2 + 4 * number : 4 + 4 * number]),
                before_TI=x_gradient_TE,
            )
            of_inner += others
        return None, x_gradient_TE, *of_norms, *of_inner, *of_output


def _backward(
    attend: AttendHeads,
    heads_TO: Iterator[Tensor],
    norms_D: Sequence[Tensor | None],
    gradient_TO: Tensor,
    parts_TO: Sequence[list[Tensor]],
    of_norms: list[Tensor | None],
) -> None:
    """Add the gradients of a group's queries, keys and values to ``parts_TO``, and those of the
    norms' weights to ``of_norms``, which autograd rounds to the weights' dtype.
    """
    wide = (
        each if each is None else each.to(torch.promote_types(each.dtype, torch.float32)).detach()
        for each in norms_D
    )
    leaves = [each if each is None else each.requires_grad_() for each in (*heads_TO, *wide)]
    present = [each for each in leaves if each is not None]
    with torch.enable_grad():
        out_TO = attend(*leaves)
    found = torch.autograd.grad(out_TO, present, gradient_TO)
    for parts, each in zip(parts_TO, found, strict=False):
        parts.append(each)
    for number, each in enumerate(found[3:]):
        before = of_norms[number]
        of_norms[number] = each if before is None else before.add_(each)

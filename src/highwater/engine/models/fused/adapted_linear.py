"""Adapted linear: a linear layer with a LoRA adapter, ``x W^T + scale * (x A^T) B^T``. The
adapter's share is added to the frozen layer's output in place, so no second tensor of that size is
made.

No gradient is computed for a weight and bias that need none. Such a weight may be packed (nf4.py).

A weight's gradient may be summed over parts of the tokens, as exactly as in a single product.

Shapes:  T tokens, all or one part of them  I inputs  O outputs  R rank
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from highwater.engine.models.fused.nf4 import Weight, as_tensor, weight_of, whole


class WeightGradient:
    """Gradient of a weight, summed over parts of the tokens in float32 or wider."""

    def __init__(self, weight_OI: Tensor) -> None:
        self.dtype = weight_OI.dtype
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.sum_OI = torch.zeros_like(weight_OI, dtype=self.wide)

    def add(self, gradient_TO: Tensor, input_TI: Tensor) -> None:
        """Add the product for one part of the tokens."""
        if self.dtype == self.wide:
            self.sum_OI.addmm_(gradient_TO.T, input_TI)
        elif gradient_TO.is_cuda:
            # The product is added in float32, and never rounded to the weight's dtype in between.
            torch.addmm(self.sum_OI, gradient_TO.T, input_TI, out_dtype=self.wide, out=self.sum_OI)
        else:
            self.sum_OI += gradient_TO.T @ input_TI

    def total(self) -> Tensor:
        """Return the gradient in the weight's dtype, and free the float32 sum."""
        total_OI = self.sum_OI.to(self.dtype)
        del self.sum_OI
        return total_OI


class Adapter(NamedTuple):
    """The matrices A and B of one LoRA adapter, and the factor of B A."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float


class AdaptedLinear(nn.Module):
    """A linear layer with LoRA, with peft's names: ``base_layer``, ``lora_A.default``, ..."""

    def __init__(self, theirs: nn.Module, *, scale: float) -> None:
        """Use the children of ``theirs``, peft's own layer, as those of this one."""
        super().__init__()
        for name in ("base_layer", "lora_A", "lora_B"):
            self.add_module(name, getattr(theirs, name))
        self.scale = scale
        self.is_on = True
        """True if the adapter is used; else only the frozen layer is."""

    @property
    def adapter(self) -> Adapter | None:
        """The adapter; None while it is turned off."""
        own: Any = self
        if not self.is_on:
            return None
        return Adapter(own.lora_A["default"].weight, own.lora_B["default"].weight, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for ``x``, of shape (..., I)."""
        base, adapter = cast(nn.Linear, self.base_layer), self.adapter
        if adapter is None:
            return base(x)
        weight = weight_of(base)
        out_TO: Tensor = _AdaptedLinear.apply(x.flatten(0, -2), weight, base.bias, *adapter)
        return out_TO.view(*x.shape[:-1], out_TO.shape[-1])


def parts_of(projection: Any) -> tuple[nn.Linear, Adapter | None]:
    """Split a projection into its linear layer and its adapter; None if it has no adapter."""
    if isinstance(projection, AdaptedLinear):
        return cast(nn.Linear, projection.base_layer), projection.adapter
    return projection, None


def adapted_product(
    x_TI: Tensor, weight_OI: Weight, bias_O: Tensor | None, adapter: Adapter | None
) -> Tensor:
    """Return the output of a linear layer, plus that of its adapter if it has one."""
    out_TO = F.linear(x_TI, whole(weight_OI), bias_O)
    if adapter is not None:
        out_TO.addmm_(x_TI @ adapter.a_RI.T, adapter.b_OR.T, alpha=adapter.scale)
    return out_TO


class _AdaptedLinear(torch.autograd.Function):
    """Autograd function that keeps only its input; ``x A^T`` is recomputed, which is cheap."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        weight_OI: Weight,
        bias_O: Tensor | None,
        a_RI: Tensor,
        b_OR: Tensor,
        scale: float,
    ) -> Tensor:
        ctx.scale, ctx.packed = scale, weight_OI
        if isinstance(weight_OI, Tensor):  # saved by save_for_backward instead
            ctx.packed = None
        ctx.save_for_backward(x_TI, as_tensor(weight_OI), a_RI, b_OR)
        return adapted_product(x_TI, weight_OI, bias_O, Adapter(a_RI, b_OR, scale))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight_OI, a_RI, b_OR = ctx.saved_tensors
        weight_OI = ctx.packed if weight_OI is None else weight_OI
        adapter = Adapter(a_RI, b_OR, ctx.scale)
        needed = ctx.needs_input_grad[:3]
        return *product_backward(gradients[0], x_TI, weight_OI, adapter, needed=needed), None


def product_backward(
    gradient_TO: Tensor,
    x_TI: Tensor,
    weight_OI: Weight,
    adapter: Adapter | None,
    *,
    needed: Sequence[bool],
    before_TI: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, weight and bias, each None unless ``needed``, and of A and B.
    The input's gradient is added to ``before_TI`` in place, if that is given.
    """
    of_input, of_weight, of_bias = needed
    of_product_TR = None if adapter is None else (gradient_TO @ adapter.b_OR).mul_(adapter.scale)
    x_gradient_TI = before_TI
    if of_input:
        whole_OI = whole(weight_OI)
        if before_TI is None:
            x_gradient_TI = gradient_TO @ whole_OI
        else:
            before_TI.addmm_(gradient_TO, whole_OI)
        if adapter is not None and x_gradient_TI is not None and of_product_TR is not None:
            x_gradient_TI.addmm_(of_product_TR, adapter.a_RI)
    return (
        x_gradient_TI,
        gradient_TO.T @ x_TI if of_weight else None,
        gradient_TO.sum(dim=0) if of_bias else None,
        None if of_product_TR is None else of_product_TR.T @ x_TI,
        None if adapter is None else (gradient_TO.T @ (x_TI @ adapter.a_RI.T)).mul_(adapter.scale),
    )


class AdapterGradient:
    """Gradients of an adapter, summed over parts of the tokens like a weight's."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._a, self._b = WeightGradient(adapter.a_RI), WeightGradient(adapter.b_OR)

    def add(self, gradient_TO: Tensor, x_TI: Tensor) -> Tensor:
        """Add the gradients of one part of the tokens; returns the gradient of ``x A^T``, (T, R),
        from which the caller computes the adapter's part of the input's gradient.
        """
        a_RI, b_OR, scale = self.adapter
        of_product_TR = (gradient_TO @ b_OR).mul_(scale)
        self._a.add(of_product_TR, x_TI)
        self._b.add(gradient_TO, (x_TI @ a_RI.T).mul_(scale))
        return of_product_TR

    def totals(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of A and B."""
        return self._a.total(), self._b.total()

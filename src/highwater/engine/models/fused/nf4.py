"""NF4: frozen weights of four bits an element, as bitsandbytes packs them (QLoRA, Dettmers et al.,
https://arxiv.org/abs/2305.14314). Each block of 64 elements has a scale, itself stored in 8 bits.

A weight is packed once, from its compute dtype, and unpacked for each product that uses it:
forward, in the recomputation and backward. The unpacked weight is not kept in between.

Shapes:  I inputs  O outputs
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from highwater.errors import MachineError
from highwater.nouns.objective import NF4_BLOCK, NF4_SCALE_BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Nf4Weight:
    """A weight of O x I elements in NF4, or some of its rows."""

    codes: Tensor
    """Packed numbers in row order, two in a byte."""
    scales: Tensor
    """A byte for each block: its scale minus the mean of all scales, as an index into the table."""
    scale_scales: Tensor
    """Largest scale of each group of blocks, by which the group's table entries are multiplied."""
    mean: Tensor
    """Mean of all scales."""
    table: Tensor
    """Value of each scale byte: 256 numbers, one table for all weights of a model."""
    shape: torch.Size
    dtype: torch.dtype
    """Dtype in which the weight is used in products."""
    rows: slice | None = None
    """Rows that this stands for, None: all; ``codes`` has all rows, and all are unpacked."""

    def whole(self) -> Tensor:
        """Return the unpacked elements, of shape O x I."""
        operators = torch.ops.bitsandbytes
        # bitsandbytes has no float64, which only tests use
        dtype = torch.float32 if self.dtype is torch.float64 else self.dtype
        scales = operators.dequantize_blockwise(
            self.scales, self.scale_scales, self.table, NF4_SCALE_BLOCK, torch.float32
        ).add_(self.mean)
        shape = list(self.shape)
        whole = operators.dequantize_4bit(self.codes, scales, NF4_BLOCK, "nf4", shape, dtype)
        whole = whole.to(self.dtype)
        return whole if self.rows is None else whole[self.rows]


Weight = Tensor | Nf4Weight
"""A weight as stored, plain or packed."""


def whole(weight: Weight) -> Tensor:
    """Return a weight as a tensor, unpacked if it is in NF4."""
    return weight if isinstance(weight, Tensor) else weight.whole()


def as_tensor(weight: Weight | None) -> Tensor | None:
    """Return a plain weight, for autograd to save; None if it is NF4, as that has no gradient."""
    return weight if isinstance(weight, Tensor) else None


def halves(weight: Weight) -> tuple[Weight, Weight]:
    """Return the first and the second half of a weight's rows."""
    if isinstance(weight, Tensor):
        first, second = weight.chunk(2)
        return first, second
    middle = weight.shape[0] // 2
    numbers, shared = middle * weight.shape[1], NF4_BLOCK * NF4_SCALE_BLOCK
    if numbers % shared:
        first, second = (slice(middle), slice(middle, None))
        return replace(weight, rows=first), replace(weight, rows=second)
    one, two = (
        replace(
            weight,
            codes=weight.codes[start // 2 : (start + numbers) // 2],
            scales=weight.scales[start // NF4_BLOCK : (start + numbers) // NF4_BLOCK],
            scale_scales=weight.scale_scales[start // shared : (start + numbers) // shared],
            shape=torch.Size((middle, weight.shape[1])),
        )
        for start in (0, numbers)
    )
    return one, two


def packed(weight: Tensor, table: Tensor) -> Nf4Weight:
    """Pack a weight in NF4. Raises MachineError if bitsandbytes cannot on the weight's device."""
    # quantised from the model's dtype, as transformers does
    narrow = weight.float() if weight.dtype is torch.float64 else weight
    operators = torch.ops.bitsandbytes
    try:
        codes, largest = operators.quantize_4bit(narrow, NF4_BLOCK, "nf4", torch.uint8)
        mean = largest.mean()
        scales, scale_scales = operators.quantize_blockwise(largest - mean, table, NF4_SCALE_BLOCK)
    except NotImplementedError as error:
        raise MachineError(
            f"bitsandbytes packs no weights on {weight.device.type} here: "
            f"{str(error).partition(chr(10))[0]}",
            hint="install a bitsandbytes for this GPU, or leave `--lora-base` out",
        ) from error
    return Nf4Weight(
        codes=codes,
        scales=scales,
        scale_scales=scale_scales,
        mean=mean,
        table=table,
        shape=weight.shape,
        dtype=weight.dtype,
    )


class Nf4Linear(nn.Linear):
    """A frozen linear layer, whose weight is in NF4 after ``pack``."""

    def __init__(self, theirs: nn.Linear) -> None:
        """Use the parameters of a linear layer as those of this one."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = theirs.in_features, theirs.out_features
        self.weight, self.bias = theirs.weight, theirs.bias
        self.nf4: Nf4Weight | None = None

    def pack(self, table: Tensor) -> None:
        """Pack the weight into NF4, and free the unpacked weight."""
        self.nf4 = packed(self.weight.detach(), table)
        del self.weight

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- as nn.Linear has it
        """Return the layer's output for ``input``, of shape (..., I)."""
        weight = weight_of(self)
        if isinstance(weight, Tensor):
            return F.linear(input, weight, self.bias)
        return _Nf4Product.apply(input, weight, self.bias)  # pyright: ignore[reportReturnType]


def weight_of(linear: nn.Linear) -> Weight:
    """Return the weight of a linear layer as stored: plain or NF4."""
    if isinstance(linear, Nf4Linear) and linear.nf4 is not None:
        return linear.nf4
    return linear.weight


class _Nf4Product(torch.autograd.Function):
    """Autograd function that keeps only a reference to the packed weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Nf4Weight, bias_O: Tensor | None) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.whole(), bias_O)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] @ ctx.weight.whole(), None, None


def prepare(causal_lm: nn.Module, head: nn.Module | None) -> None:
    """Replace every frozen linear layer except the head, in a model on meta, by a layer that can be
    packed; in place. Raises MachineError without bitsandbytes.
    """
    _bitsandbytes()
    for parent in list(causal_lm.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is nn.Linear and linear is not head and not linear.weight.requires_grad:
                setattr(parent, name, Nf4Linear(linear))


def pack(unit: nn.Module, table: Tensor) -> None:
    """Pack every Nf4Linear of a unit that is not packed yet."""
    for module in unit.modules():
        if isinstance(module, Nf4Linear) and module.nf4 is None:
            module.pack(table)


def scale_table(device: torch.device) -> Tensor:
    """Return bitsandbytes' table on ``device``: the values of the 256 scale bytes."""
    return cast(Tensor, _bitsandbytes().functional.create_dynamic_map()).to(device)


def _bitsandbytes() -> Any:
    other = "leave `--lora-base` out"
    try:
        import bitsandbytes
    except ImportError as error:
        raise MachineError(
            f"weights in NF4 are bitsandbytes', which cannot be imported: {error}",
            hint=f"`pip install 'bitsandbytes>=0.49'`, or {other}",
        ) from error
    return bitsandbytes

"""NF4: frozen weights of four bits an element, as bitsandbytes packs them (QLoRA, Dettmers et al.,
https://arxiv.org/abs/2305.14314). Each block of 64 elements has a scale, itself stored in 8 bits.

A weight is packed once, from its compute dtype, and unpacked for each product that uses it:
forward, in the recomputation and backward. The unpacked weight is not kept in between.

Shapes:  I inputs  O outputs
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from highwater.errors import MachineError
from highwater.nouns.objective import NF4_BLOCK, NF4_SCALE_BLOCK

_SHARED = NF4_BLOCK * NF4_SCALE_BLOCK
"""Numbers whose blocks share a scale of their scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nf4Weight:
    """A weight of O x I elements in NF4, or some of its rows."""

    data: Tensor
    """Bytes of the whole weight: two elements in each, in row order; a byte for each block, its
    scale minus the mean of all, as an index into the table; at the end, in float32, the factors of
    the groups of blocks that share one, and the mean. Bytes and no wider dtype: FSDP2 copies
    bfloat16 through float32 on GPUs, and does not keep what would be a NaN."""
    table: Tensor
    """Value of each scale byte: 256 numbers, one table for all weights of a model."""
    shape: torch.Size
    dtype: torch.dtype
    """Dtype in which the weight is used in products."""
    rows: slice | None = None
    """Rows that this stands for, None: all."""

    def whole(self) -> Tensor:
        """Return the unpacked elements. Of some rows alone if these begin and end with groups of
        blocks; else all are unpacked.
        """
        operators, (outputs, inputs) = torch.ops.bitsandbytes, self.shape
        total, rows = self.shape.numel(), self.rows or slice(0, outputs)
        start, stop = rows.start * inputs, rows.stop * inputs
        if start % _SHARED or (stop % _SHARED and stop != total):
            start, stop = 0, total
        blocks = slice(start // NF4_BLOCK, -(-stop // NF4_BLOCK))
        groups = slice(start // _SHARED, -(-stop // _SHARED))
        scales_at, every = -(-total // 2), -(-total // _SHARED)
        codes = self.data[start // 2 : -(-stop // 2)]
        scale_bytes = self.data[scales_at:][blocks]
        wide = self.data[-4 * (every + 1) :].view(torch.float32)
        scales = operators.dequantize_blockwise(
            scale_bytes, wide[groups], self.table, NF4_SCALE_BLOCK, torch.float32
        ).add_(wide[-1])
        # bitsandbytes has no float64, which only tests use
        dtype = torch.float32 if self.dtype is torch.float64 else self.dtype
        shape = [(stop - start) // inputs, inputs]
        whole = operators.dequantize_4bit(codes, scales, NF4_BLOCK, "nf4", shape, dtype)
        whole = whole.to(self.dtype)
        return whole if len(whole) == rows.stop - rows.start else whole[rows]


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
    outputs, _ = weight.shape
    first, second = slice(0, outputs // 2), slice(outputs // 2, outputs)
    return replace(weight, rows=first), replace(weight, rows=second)


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
    narrow = torch.cat((codes.flatten(), scales))
    wide = torch.cat((scale_scales, mean[None])).view(torch.uint8)
    # float32 numbers begin at a multiple of four bytes
    data = torch.cat((F.pad(narrow, (0, -len(narrow) % 4)), wide))
    return Nf4Weight(data=data, table=table, shape=weight.shape, dtype=weight.dtype)


class Nf4Linear(nn.Linear):
    """A frozen linear layer, whose weight is in NF4 after ``pack``: the parameter ``nf4``, which
    FSDP2 shards and gathers like any other.
    """

    def __init__(self, theirs: nn.Linear) -> None:
        """Use the parameters of a linear layer as those of this one."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = theirs.in_features, theirs.out_features
        self.weight, self.bias = theirs.weight, theirs.bias
        self.of_bytes: Callable[..., Nf4Weight] | None = None
        """Returns the weight whose ``data`` it is given; None until ``pack``."""

    def pack(self, table: Tensor) -> None:
        """Pack the weight into NF4, and free the unpacked weight."""
        own = packed(self.weight.detach(), table)
        del self.weight
        self.nf4 = nn.Parameter(own.data, requires_grad=False)
        self.of_bytes = partial(Nf4Weight, table=table, shape=own.shape, dtype=own.dtype)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- as nn.Linear has it
        """Return the layer's output for ``input``, of shape (..., I)."""
        weight = weight_of(self)
        if isinstance(weight, Tensor):
            return F.linear(input, weight, self.bias)
        return _Nf4Product.apply(input, weight, self.bias)  # pyright: ignore[reportReturnType]


def weight_of(linear: nn.Linear) -> Weight:
    """Return the weight of a linear layer as stored: plain or NF4."""
    if isinstance(linear, Nf4Linear) and linear.of_bytes is not None:
        # may be kept: FSDP2 frees a parameter's storage, and gathers it into the same one again
        return linear.of_bytes(data=linear.nf4)
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


def pack(unit: nn.Module, table: Tensor, *, fill: Callable[[nn.Module], None]) -> None:
    """Pack every Nf4Linear of a unit that is not packed yet, each as soon as ``fill`` has given it
    values: no more than one weight is there unpacked.
    """
    for module in unit.modules():
        if isinstance(module, Nf4Linear) and module.of_bytes is None:
            fill(module)
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

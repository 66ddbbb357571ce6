"""Kernel stubs: for the tracer, what allocates as a kernel does in the place of what does not run
on fake tensors of a CPU build.

For the tracer's own process only: nothing here is undone.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import transformers.masking_utils
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from highwater.engine.attention import kernel_proof as window_proof
from highwater.engine.attention import plain_block
from highwater.engine.kernels import gates as gate_kernels
from highwater.engine.kernels import rotary as rotary_kernels
from highwater.engine.kernels import rows as row_kernels
from highwater.engine.models import build as model
from highwater.engine.models import fill, weights
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.tracer import trinity_step
from highwater.nouns.hardware import Kernel

aten: Any = torch.ops.aten


def put(kernel: Kernel) -> None:
    """Put them all in place, with this attention."""
    norm = F.rms_norm

    def rms_norm(
        x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        is_gpu = x.device.type == "cuda"
        return _RmsNormStub.apply(x, weight) if is_gpu else norm(x, list(shape), weight, eps)

    def cudnn(
        q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float, **_: bool
    ) -> Tensor:
        return aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, is_causal, False, scale=scale
        )[0]

    def flash(
        q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float, **_: bool
    ) -> Tensor:
        return aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal, False, scale=scale
        )[0]

    def statistics(logits_NV: Tensor, *_: Any) -> tuple[Tensor, ...]:
        return torch.empty(3, len(logits_NV), dtype=torch.float32, device=logits_NV.device).unbind()

    def every_ranks(values: Sequence[float], _: torch.dtype, mesh: DeviceMesh) -> list[list[float]]:
        """This rank's own values in the place of the others', which nobody computes."""
        return [list(values)] * mesh.size()

    def in_place(*_: Any, **__: Any) -> None:
        """Write over what is there."""

    names: Any = F
    names.rms_norm = rms_norm
    names.scaled_dot_product_attention = {"cudnn": cudnn, "flash": flash}[kernel]
    loose: Any = (
        *(process_mesh, gate_kernels, rotary_kernels, row_kernels, model, fill),
        *(trinity_step, weights, transformers.masking_utils),
    )
    meshes, gates, rotary, rows, models, values, actors, saved, masks = loose
    meshes.every_ranks = every_ranks
    gates._triton = lambda: SimpleNamespace(product_=in_place, backward_=in_place)
    rotary._triton = lambda: SimpleNamespace(rotate=in_place, backward=in_place)
    rows._triton = lambda: SimpleNamespace(statistics=statistics, backward_=in_place)
    values.fill_random = in_place
    values.fill_adapter = in_place
    models.build_on_meta = _outside(models.build_on_meta)  # its proofs compare numbers
    models.prove_rows = in_place  # and so does this one
    models.tile_mlps = _outside(models.tile_mlps)
    models.add_adapters = _outside(models.add_adapters)
    actors.actor_on_meta = _outside(actors.actor_on_meta)
    divided = actors.divided
    actors.divided = lambda logits_TV: _Strided.apply(divided(logits_TV))
    saved.opened = lambda _: nullcontext(None)
    masks.is_tracing = lambda *_: False
    windows: Any = window_proof
    windows.computes_windows = lambda *_: True  # as on a Hopper card
    plain: Any = plain_block.PlainBlock
    rows = plain._rows
    plain._rows = lambda block: islice(rows(block), 1)  # no others take as much


def put_low_bit() -> None:
    """Put a stub in the place of the compiled update of moments of few bits; it makes what the
    program makes that is compiled for the CPU: of codes the numbers over their scales, in float32.

    What Triton's program makes on a GPU nobody recorded; pieces bound both.
    """
    from torchao.optim import subclass_8bit  # which only these optimizers need

    from highwater.engine.training import low_bit

    subclass_8bit.get_qmap_signed()  # kept from now on: from fakes no table is made
    subclass_8bit.get_qmap_unsigned()

    def compiled(parameter: Tensor, _gradient: Tensor, *moments: Any, **_: float) -> None:
        made: list[Tensor] = []
        for moment in moments[:2]:
            if is_traceable_wrapper_subclass(moment):
                made.append(torch.empty_like(parameter, dtype=torch.float32))

    stubbed: Any = low_bit
    stubbed.compiled = compiled
    stubbed.seeded = lambda *_: nullcontext()  # nothing is drawn


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on real tensors, whatever is fake around it."""

    def on_real_tensors(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return on_real_tensors


class _RmsNormStub(torch.autograd.Function):
    """The allocations of PyTorch's fused RMS norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        per_row = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, per_row)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    # nothing is computed
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:  # noqa: ARG004
        x, weight, _ = ctx.saved_tensors
        of_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        return of_x, None if weight is None else torch.empty_like(weight)


class _Strided(torch.autograd.Function):
    """The gradient for the whole tensor behind a view that was written to, by which autograd goes
    back; of fake tensors it goes back by the view's own operator, which allocates nothing.
    """

    @staticmethod
    def forward(ctx: Any, view: Tensor) -> Tensor:  # noqa: ARG004 -- nothing is saved
        return view.view_as(view)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004 -- nothing is computed
        return torch.zeros_like(gradients[0])

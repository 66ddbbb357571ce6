"""Kernel stubs: for the tracer, replace kernels that cannot run on fake tensors of a CPU build by
stubs that make the same allocations.

Only for the tracer's own process: nothing here is undone.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import transformers.masking_utils
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from highwater.engine.attention import gated_delta, plain_block
from highwater.engine.attention import kernel_proof as window_proof
from highwater.engine.attention import recurrence as chunk_kernels
from highwater.engine.kernels import gates as gate_kernels
from highwater.engine.kernels import norm as norm_kernels
from highwater.engine.kernels import rotary as rotary_kernels
from highwater.engine.kernels import rows as row_kernels
from highwater.engine.models import build as model
from highwater.engine.models import fill, weights
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.tracer import trinity_step
from highwater.engine.tracer.allocation_recorder import AllocationRecorder
from highwater.nouns.hardware import Kernel

aten: Any = torch.ops.aten


def put(kernel: Kernel) -> None:
    """Install all stubs, with a stub for this attention kernel."""
    norm = F.rms_norm

    def rms_norm(
        x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        is_gpu = x.device.type == "cuda"
        return _RmsNormStub.apply(x, weight) if is_gpu else norm(x, list(shape), weight, eps)

    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float, **_: bool
    ) -> Tensor:
        how = (0.0, is_causal, False)
        if kernel == "cudnn":
            return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, *how, scale=scale)[
                0
            ]
        return aten._scaled_dot_product_flash_attention(q, k, v, *how, scale=scale)[0]

    def statistics(logits_NV: Tensor, *_: Any) -> tuple[Tensor, ...]:
        return torch.empty(3, len(logits_NV), dtype=torch.float32, device=logits_NV.device).unbind()

    def every_ranks(values: Sequence[float], _: torch.dtype, mesh: DeviceMesh) -> list[list[float]]:
        """Return this rank's own values for every rank, as no other ranks run."""
        return [list(values)] * mesh.size()

    def in_place(*_: Any, **__: Any) -> None:
        """Do nothing: the stub of a kernel that only overwrites its inputs."""

    names: Any = F
    names.rms_norm = rms_norm
    names.scaled_dot_product_attention = attention
    loose: Any = (
        *(process_mesh, chunk_kernels, gate_kernels, norm_kernels, rotary_kernels, row_kernels),
        *(model, fill, trinity_step, weights, transformers.masking_utils),
    )
    meshes, chunks, gates, norms, rotary, rows, models, values, actors, saved, masks = loose
    meshes.every_ranks = every_ranks
    chunks._triton = lambda: SimpleNamespace(sweep=in_place)
    norms._triton = lambda: SimpleNamespace(normed=in_place, backward=in_place)
    gates._triton = lambda: SimpleNamespace(product_=in_place, backward_=in_place)
    rotary._triton = lambda: SimpleNamespace(rotate=in_place, backward=in_place)
    rows._triton = lambda: SimpleNamespace(statistics=statistics, backward_=in_place)
    values.fill_random = in_place
    values.fill_adapter = in_place
    models.build_on_meta = _outside(models.build_on_meta)  # its proofs compare numbers
    models.prove_rows = in_place  # this compares numbers too
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
    rows = plain._stretches
    plain._stretches = lambda block, *size: islice(
        rows(block, *size), 1
    )  # the first rows take the most memory


def put_one_group(recorder: AllocationRecorder) -> None:
    """Trace one full group of tokens of a gated delta rule, and the last group, for the whole row,
    and one layer's groups for all layers: each has thousands of operators with equal allocations.
    """
    plans: Any = gated_delta.DeltaPlan
    every = plans.groups

    def groups(plan: Any, of: str = "forward") -> Iterator[tuple[int, slice]]:
        found = list(every(plan, of))
        sizes = [place.stop - place.start for _, place in found]
        last = 0 if of.startswith("backward") else len(found) - 1
        full = max(range(len(found)), key=lambda n: (sizes[n], found[n][0]))
        some = sorted({full, last})
        key = (plan.heads, of, *(sizes[n] for n in some))
        yield from recorder.some_for_all(key, [found[n] for n in some], rounds=len(found))

    plans.groups = groups


def put_low_bit() -> None:
    """Replace the compiled update of low-bit moments by a stub that allocates what the program
    compiled for the CPU does: dequantised float32 copies of 8-bit moments.

    Allocations of Triton's program on a GPU are not recorded; the size of a piece limits both.
    """
    from torchao.optim import subclass_8bit  # only these optimizers need it

    from highwater.engine.training import low_bit

    subclass_8bit.get_qmap_signed()  # cached from now on: fakes could not make the table
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
    """Wrap a function to run on real tensors, outside any fake mode."""

    def on_real_tensors(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return on_real_tensors


def put_triton() -> None:
    """Replace Triton by a module that launches nothing: callers of its kernels, like Liger,
    allocate the kernels' outputs themselves. The GPU that such code sees is a Hopper.
    """
    for name in _TRITON:
        module = sys.modules[name] = _Nothing(name)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
        module.__path__ = []
    triton = sys.modules["triton"]
    language: Any = sys.modules["triton.language"]
    language.constexpr = _Constant
    answers = {
        "__version__": "3.6.0",
        "jit": lambda function=None, **_: _Launcher() if function else lambda _: _Launcher(),
        "heuristics": lambda *_, **__: lambda function: function,
        "autotune": lambda *_, **__: lambda function: function,
        "cdiv": lambda number, by: -(-number // by),
        "next_power_of_2": lambda number: 1 << (int(number) - 1).bit_length(),
    }
    for name, answer in answers.items():
        setattr(triton, name, answer)
    cuda: Any = torch.cuda
    cuda.device = lambda *_: nullcontext()
    cuda.get_device_properties = lambda *_: SimpleNamespace(
        multi_processor_count=132, name="NVIDIA H100", major=9, minor=0, total_memory=80 << 30
    )
    loose: Any = torch
    loose.equal = lambda *_: True  # Liger asks whether the loss is the last thing computed
    tensor = torch.tensor

    def on_fakes(data: Any, *rest: Any, device: Any = None, **how: Any) -> Tensor:
        if device is not None and torch.device(device).type == "cuda":
            return torch.full((), data, device=device, **how)
        return tensor(data, *rest, device=device, **how)

    loose.tensor = on_fakes


_TRITON = (
    *("triton", "triton.language", "triton.language.math", "triton.language.core"),
    *("triton.language.extra", "triton.language.extra.libdevice"),
    *("triton.language.extra.cuda", "triton.language.extra.cuda.libdevice"),
    *("triton.runtime", "triton.runtime.autotuner", "triton.runtime.jit"),
    *("triton.runtime.driver", "triton.compiler", "triton.tools", "triton.backends"),
)


class _Nothing(ModuleType):
    """A module in which every name is again such a module, callable, and usable in ``a | b``."""

    def __getattr__(self, name: str) -> "_Nothing":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name)

    def __call__(self, *_: Any, **__: Any) -> "_Nothing":
        return self

    def __or__(self, _: object) -> "_Nothing":
        return self


class _Constant:
    def __init__(self, value: object = None) -> None:
        self.value = value


class _Launcher:
    """A Triton kernel stub: does nothing on any grid."""

    def __getitem__(self, _: object) -> Callable[..., None]:
        return lambda *_, **__: None


class _RmsNormStub(torch.autograd.Function):
    """Autograd function with the allocations of PyTorch's fused RMS norm."""

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
    """Allocate the gradient of the whole tensor behind a view that was written to, as autograd does
    for real tensors. For fakes autograd uses the view's own operator, which allocates nothing.
    """

    @staticmethod
    def forward(ctx: Any, view: Tensor) -> Tensor:  # noqa: ARG004 -- nothing is saved
        return view.view_as(view)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004 -- nothing is computed
        return torch.zeros_like(gradients[0])

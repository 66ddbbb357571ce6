"""In-place accumulation: add gradients up as autograd does on plain tensors, in place if the first
gradient has no other holder; under a dispatch mode autograd itself always makes a copy.

If two gradients of one value meet, autograd's engine writes their sum over the first one, provided
that it is dense, is the only tensor of its storage, is held by nobody else, and the sum itself is
not differentiated. It does not while a dispatch mode is on, which could notice. So the tracing mode
itself decides, by the reference counts that the engine would have read. They are higher here, by
the mode's own references; the difference is learned from sums for which the right answer is known.
Source: ``accumulate`` in torch/csrc/autograd/input_buffer.cpp, ``is_tensor_stealable`` in
torch/csrc/autograd/variable.h.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import dropwhile, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from highwater.engine.activations.host import is_dense
from highwater.engine.tracer.fake_cuda import QuickFakeMode

aten: Any = torch.ops.aten
_ADD, _ADD_IN_PLACE = aten.add.Tensor, aten.add_.Tensor
_PUT, _PUT_IN_PLACE = aten.index_put.default, aten.index_put_.default
_MOST_CALLERS = 64
"""Native stack frames that are searched; a sum of gradients is about 30 below the engine."""
_ENGINES_SUM = b"_ZN5torch8autograd11InputBuffer3addE"
"""Mangled name of torch::autograd::InputBuffer::add in PyTorch's library."""
_LIBRARIES = b"/torch/lib/"
"""Part of the path of each of PyTorch's own libraries."""


class _Counts(NamedTuple):
    """Reference counts of a tensor and its storage."""

    by_cpp: int
    by_python: int
    to_storage: int


class InplaceAccumulation:
    """Chooses the operator that autograd would run on plain tensors; copies until ``learn`` ran."""

    def __init__(self) -> None:
        self._alone: _Counts | None = None
        self._heard: list[_Counts] | None = None

    def operator(self, func: Any, args: Sequence[Any]) -> Any:
        """Return the operator to call: an in-place one if autograd would add in place."""
        if func is _ADD:
            return _ADD_IN_PLACE if self._is_in_place(args) else func
        # The gradient of ``x[indices]``. Source: index_backward,
        # torch/csrc/autograd/FunctionsManual.cpp.
        is_gradient = func is _PUT and args[3:] == (True,) and not torch.is_grad_enabled()
        return _PUT_IN_PLACE if is_gradient else func

    def learn(self, mode: TorchDispatchMode) -> None:
        """Learn the reference counts from probe sums of fake CUDA tensors, under a mode like the
        tracing one. Raises RuntimeError if the counts do not distinguish the probes.
        """
        told: list[_Counts] = []
        with QuickFakeMode(), mode:
            for probe in (_alone, _shared, _held, _viewed):
                self._heard = []
                value = torch.ones(2, 2, device="cuda", requires_grad=True) * 1
                probe(value).sum().backward()
                if len(self._heard) != 1:
                    raise RuntimeError(
                        f"torch {torch.__version__} does not show where autograd adds gradients up"
                    )
                told += self._heard
        self._heard = None
        self._alone, *others = told
        if self._alone in others:
            raise RuntimeError(f"torch {torch.__version__} does not show who holds a gradient")

    def _is_in_place(self, args: Sequence[Any]) -> bool:
        if (
            torch.is_grad_enabled()
            or len(args) != 2
            or not all(type(each) is FakeTensor for each in args)
        ):
            return False
        counts = _counts(args)
        if self._heard is not None:
            if _is_the_engines():
                self._heard.append(counts)
            return False
        return counts == self._alone and is_dense(args[0]) and _is_the_engines()


def _counts(args: Sequence[Any]) -> _Counts:
    """Count references to the first argument; no local variable may hold it meanwhile."""
    storage = args[0].untyped_storage()._cdata
    to_storage: Callable[[int], int] = torch._C._storage_Use_Count  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    return _Counts(args[0]._use_count(), sys.getrefcount(args[0]), to_storage(storage))


def _alone(value: Tensor) -> Tensor:
    """Probe sum whose first gradient has no other holder."""
    return value * 2 + value * 3


def _shared(value: Tensor) -> Tensor:
    """Probe sum whose first gradient is shared with another pending gradient."""
    before = torch.ones_like(value, requires_grad=True) * 1
    value = value * 1
    return value * 2 + (before + value) * 3


def _held(value: Tensor) -> Tensor:
    """Probe sum whose first gradient is held by a Python object."""
    return value * 2 + _Kept.apply(value)


def _viewed(value: Tensor) -> Tensor:
    """Probe sum whose first gradient is a view of another tensor."""
    return value * 2 + value.T * 3


class _Kept(torch.autograd.Function):
    """Autograd function that doubles its input and keeps its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.kept = []
        return value * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        ctx.kept.append(gradients[0] * 2)
        return ctx.kept[0]


class _Caller(NamedTuple):
    """Properties of a native function on the stack."""

    is_torch: bool
    is_sum: bool


class _Symbol(ctypes.Structure):
    """``Dl_info`` of the C library."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _is_the_engines() -> bool:
    """True if autograd's engine made this sum; a backward formula may add tensors too.

    Python has no frame for the engine, so PyTorch's own frames on the native stack are searched.
    """
    addresses = (ctypes.c_void_p * _MOST_CALLERS)()
    count: int = ctypes.CDLL(None).backtrace(addresses, _MOST_CALLERS)
    callers = dropwhile(lambda caller: not caller.is_torch, map(_caller, addresses[:count]))
    return any(caller.is_sum for caller in takewhile(lambda caller: caller.is_torch, callers))


@cache
def _caller(address: int) -> _Caller:
    """Return the properties of the native function at an address."""
    symbol = _Symbol()
    find: Callable[..., int] = ctypes.CDLL(None).dladdr
    find(ctypes.c_void_p(address), ctypes.byref(symbol))
    return _Caller(
        is_torch=_LIBRARIES in (symbol.file or b""),
        is_sum=(symbol.name or b"").startswith(_ENGINES_SUM),
    )

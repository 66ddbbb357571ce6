"""Fake CUDA: the parts that a PyTorch without a GPU lacks to run a step on fake CUDA tensors: a
device guard, an accelerator and streams. Also a faster cache key, by which fake tensors cost a
third less.

Only for the tracer's own process: nothing here is undone. On a CPU build a guard and the
accelerator's hooks are put into PyTorch's C++ registries from outside; a CUDA build without a GPU
has both, and one of the hooks, which knows no device, is made to say that none was used. Both rely
on a binary interface that nobody guarantees: tried with torch 2.13 (CPU build) and 2.11 (CUDA 13.0)
on Linux. If it does not hold, ``install`` raises or the process dies; nothing wrong is traced.
"""

import ctypes
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    _DispatchCacheKey,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.fsdp import _runtime_utils
from torch.distributed.fsdp._flat_param import FlatParamHandle

_CUDA = 1
"""Value of c10::DeviceType::CUDA."""
_SPLIT_NODE = "SplitWithSizesBackward0"
"""Name of autograd's node that splits FSDP1's flat vector into parameters."""
_GUARDS = 64
_SLOTS = 120
"""Slots of a table of virtual functions, more than the hooks have."""
heard_record_stream: list[Callable[[torch.Tensor, "Stream"], object]] = []
"""Listeners called with a tensor and a stream that is declared to use it."""
heard_wait: list[Callable[["Stream"], object]] = []
"""Listeners called when the host waits until a stream is done."""
heard_gradient: list[Callable[[torch.Tensor, "Stream"], object]] = []
"""Listeners called with the gradient of a part of FSDP1's vectors, and autograd's next stream."""
_kept: list[Any] = []
"""Objects that C++ points to and that must not be garbage-collected."""


def install() -> None:
    """Make fake CUDA tensors work, streams included; RuntimeError for an unknown PyTorch."""
    _put_guard()
    _put_hooks(is_built=torch.backends.cuda.is_built())
    _put_streams()
    _move_with_data()
    _follow_streams()
    _put_kernels()
    with FakeTensorMode():
        probe = torch.ones(2, 2, device="cuda", requires_grad=True)
        (probe @ probe).sum().backward()
        if probe.grad is None or probe.grad.device.type != "cuda":
            problem = f"torch {torch.__version__} does not differentiate fake CUDA tensors"
            raise RuntimeError(problem)


class Stream:
    """A stream that runs nothing; it tracks which work of other streams precedes its next work."""

    current: ClassVar["Stream"]
    _count = 0
    _moment = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream_id = Stream._count
        Stream._count += 1
        self.device = torch.device("cuda", 0)
        self.device_index = 0
        self.before: dict[int, int] = {}
        """By id of other streams: the moment up to which their work precedes later work here."""

    @staticmethod
    def moment() -> int:
        """Return a new moment, later than all before."""
        Stream._moment += 1
        return Stream._moment

    def wait_stream(self, other: "Stream") -> None:
        """Make later work on this stream wait for all work launched on ``other`` so far."""
        self.wait_event(other.record_event())

    def wait_event(self, event: "Event") -> None:
        """Make later work on this stream wait for the work that the event covers."""
        for stream_id, moment in event.before.items():
            self.before[stream_id] = max(moment, self.before.get(stream_id, 0))

    def has_waited(self, stream_id: int, moment: int) -> bool:
        """True if another stream's work up to ``moment`` precedes the end of this stream's work."""
        return stream_id == self.stream_id or self.before.get(stream_id, 0) >= moment

    def synchronize(self) -> None:
        """Pretend that the host waits until all work on this stream is done: call the listeners."""
        for hear in heard_wait:
            hear(self)

    def query(self) -> bool:
        """Return True: all work counts as done."""
        return True

    def is_capturing(self) -> bool:
        """Return False: no graph is recorded."""
        return False

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Return an event that covers the work launched here so far."""
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> None:
        self._before, Stream.current = Stream.current, self

    def __exit__(self, *_: object) -> None:
        Stream.current = self._before


class Event:
    """Work launched on a stream so far. It counts as finished: the host never waits for it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.before: dict[int, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        """Cover all work launched on a stream so far."""
        stream = stream or Stream.current
        self.before = {**stream.before, stream.stream_id: Stream.moment()}

    def wait(self, stream: Stream | None = None) -> None:
        """Make later work on a stream wait for the event."""
        (stream or Stream.current).wait_event(self)

    def query(self) -> bool:
        """Return True: the event counts as done."""
        return True

    def synchronize(self) -> None:
        """Do nothing: the event counts as done."""


@contextmanager
def _on(stream: Stream | None) -> Generator[None]:
    if stream is None:
        yield
        return
    before, Stream.current = Stream.current, stream
    try:
        yield
    finally:
        Stream.current = before


def _put_streams() -> None:
    """Replace functions of ``torch.cuda`` by fakes that report an empty Hopper GPU."""
    cuda: Any = torch.cuda
    Stream.current = Stream()
    default = Stream.current
    answers: dict[str, Callable[..., Any]] = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *_: Stream.current,
        "default_stream": lambda *_: default,
        "stream": _on,
        "set_stream": lambda *_: None,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "synchronize": lambda *_: None,
        "is_current_stream_capturing": lambda: False,
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda *_, **__: True,
        "get_device_capability": lambda *_: (9, 0),
    }
    for name, answer in answers.items():
        setattr(cuda, name, answer)
    accelerator: Any = torch.accelerator  # FSDP2 asks it where a unit was gathered in vain
    accelerator.current_stream = answers["current_stream"]
    tensor: Any = torch.Tensor
    tensor.record_stream = _tell_of_use
    tensor.pin_memory = lambda self, *_: self  # host memory is not recorded
    tensor.is_pinned = lambda *_: True
    fake: Any = FakeTensorMode
    # there is no device to initialise, although is_available says so
    fake.avoid_device_init = property(lambda _: True)
    contexts: Any = fake_tensor
    contexts.init_gpu_context = lambda _: None  # a CUDA build without a GPU would fail here


def _move_with_data() -> None:
    """Make ``tensor.data = other`` also set the fake device of ``other``, as for real tensors."""
    data: Any = torch.Tensor.data
    fake: Any = FakeTensor

    def assign(tensor: Any, other: Any) -> None:
        data.__set__(tensor, other)
        if isinstance(other, FakeTensor):
            tensor.fake_device = other.fake_device

    fake.data = property(data.__get__, assign)


def _follow_streams() -> None:
    """Gather FSDP1's gradients, and free its units, on the stream on which their parameters were
    split, as autograd does for real tensors: on a CPU build nodes of fakes have no stream.
    """
    handle: Any = FlatParamHandle
    for name in ("_get_unflat_views_aligned", "_get_unflat_views_unaligned"):
        setattr(handle, name, _backward_as_forward(getattr(handle, name)))
    runtime: Any = _runtime_utils
    hook = runtime._post_backward_hook

    def where_taken_apart(state: Any, handle: Any, *rest: Any) -> None:
        with _on(handle.taken_apart_on):
            hook(state, handle, *rest)

    runtime._post_backward_hook = where_taken_apart


def _backward_as_forward(
    take_apart: Callable[..., Iterable[torch.Tensor]],
) -> Callable[..., list[torch.Tensor]]:
    """Wrap ``take_apart``: gradients of its views are joined on the stream that called it."""
    before: list[Stream] = []

    def taken_apart(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        views, stream = list(take_apart(*args, **kwargs)), Stream.current
        args[0].taken_apart_on = stream

        def begin(*_: object) -> None:
            before.append(Stream.current)
            Stream.current = stream

        def end(*_: object) -> None:
            Stream.current = before.pop()

        def arrive(gradients: Sequence[torch.Tensor | None]) -> None:
            for gradient in gradients:
                if gradient is not None:
                    for hear in heard_gradient:
                        hear(gradient, stream)

        nodes: list[Any] = [view.grad_fn for view in views if view.grad_fn is not None]
        for node in nodes:
            node.register_prehook(arrive)
        whole: Any = nodes[0] if nodes else None
        while whole is not None and whole.name() != _SPLIT_NODE:
            whole = whole.next_functions[0][0]
        if whole is not None:
            whole.register_prehook(begin)
            whole.register_hook(end)
        return views

    return taken_apart


def _put_kernels() -> None:
    """Register a CUDA kernel for ``silu_backward``: a CPU build would decompose it into six tensors
    instead of one. No other operator of our steps needs this.
    """
    name = "aten::silu_backward"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):  # pyright: ignore[reportPrivateUsage]
        library = torch.library.Library("aten", "IMPL", "CUDA")
        library.impl("silu_backward", _never_run)
        _kept.append(library)


def _never_run(*_: object) -> torch.Tensor:
    raise AssertionError("a fake tensor's operators end before a kernel")


def _tell_of_use(tensor: torch.Tensor, stream: Stream) -> None:
    for hear in heard_record_stream:
        hear(tensor, stream)


def _put_guard() -> None:
    """Register c10's own no-op device guard, unless a guard is registered already."""
    library = ctypes.CDLL(str(_library("libc10.so")))
    name = "_ZN3c104impl26device_guard_impl_registryE"
    registry = (ctypes.c_void_p * _GUARDS).in_dll(library, name)
    ensure: Any = torch._C._ensureCUDADeviceGuardSet  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    if not registry[_CUDA]:
        no_devices = ctypes.CFUNCTYPE(ctypes.c_long)(lambda: 0)
        address = ctypes.cast(no_devices, ctypes.c_void_p).value
        functions = (ctypes.c_void_p * _SLOTS)(*[address] * _SLOTS)
        placeholder = (ctypes.c_void_p * 8)(ctypes.addressof(functions) + 16)
        _kept.extend([no_devices, functions, placeholder, library])
        registry[_CUDA] = ctypes.addressof(placeholder)
        ensure()
        if registry[_CUDA] == ctypes.addressof(placeholder):
            registry[_CUDA] = None
            problem = f"torch {torch.__version__} has no device guard without effect to trace with"
            raise RuntimeError(problem)
    ensure()


def _put_hooks(*, is_built: bool) -> None:
    """Make PyTorch report that CUDA is built in and no device is in use, as autograd checks."""
    library = ctypes.CDLL(str(_library("libtorch_cpu.so")))
    get_hooks = library._ZN2at6detail12getCUDAHooksEv
    get_hooks.restype = ctypes.c_void_p
    hooks = get_hooks()
    functions = _virtual_functions("AcceleratorHooksInterface.h")
    table = ctypes.c_void_p.from_address(hooks).value
    assert table is not None
    old = (ctypes.c_void_p * (_SLOTS + 2)).from_address(table - 16)
    new = (ctypes.c_void_p * (_SLOTS + 2))(*old)
    yes = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda _: True)
    no = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(lambda *_: False)
    first = 2 + 2  # past the table's head, and two destructors
    new[first + functions.index("hasPrimaryContext")] = ctypes.cast(no, ctypes.c_void_p).value
    if not is_built:
        new[first + functions.index("isBuilt")] = ctypes.cast(yes, ctypes.c_void_p).value
    _kept.extend([new, yes, no, library])
    ctypes.c_void_p.from_address(hooks).value = ctypes.addressof(new) + 16


def _virtual_functions(header: str) -> list[str]:
    """Names of a class's virtual functions in order, parsed from this PyTorch's header."""
    path = Path(torch.__file__).parent / "include" / "ATen" / "detail" / header
    text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
    body = text[text.index("struct TORCH_API") :].partition("virtual ~")[2] or text
    return re.findall(r"virtual [^;{(]*?([\w~]+)\(", body)


def _library(name: str) -> Path:
    return Path(torch.__file__).parent / "lib" / name


aten: Any = torch.ops.aten
_WRITE_OVER = (aten.addmm.dtype_out, aten.mm.out)
"""Operators that return their ``out`` tensor, whose shape the engine gives right."""
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = frozenset((int, float, bool, str, type(None), *_OF_TORCH))


class QuickFakeMode(FakeTensorMode):
    """``FakeTensorMode`` with the same answers, faster."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, so that Dynamo need not be disabled at every call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WRITE_OVER and type(kwargs["out"]) is FakeTensor:
            return kwargs["out"]
        return self.dispatch(func, types, args, kwargs or {})

    def _cache_key(self, state: Any, func: Any, args: Any, kwargs: Any) -> _DispatchCacheKey:
        values: list[object] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        if _is_flattened(args, values) and _is_flattened(kwargs.items(), values):
            return _DispatchCacheKey(tuple(values))
        return super()._cache_key(state, func, args, kwargs)


def _is_flattened(arguments: Iterable[Any], values: list[object]) -> bool:
    """Append all that the result depends on to ``values``; False if it may depend on more."""
    for argument in arguments:
        kind = type(argument)
        if kind is FakeTensor:
            is_dense = argument.layout is torch.strided and not argument.dtype.is_complex
            if argument.constant is not None or not is_dense:
                return False
            shape = (argument.shape, argument.stride(), argument.storage_offset())
            values += (kind, argument.dtype, *shape, argument.fake_device, argument.requires_grad)
        elif kind in _PLAIN:
            values += (kind, argument)
        elif kind is list or kind is tuple:
            values += (kind, len(argument))
            if not _is_flattened(argument, values):
                return False
        else:
            return False
    return True

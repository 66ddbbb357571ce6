"""Allocation recorder: record as events, in order, when each storage that a step's operators return
on the device is allocated, resized and freed.

If a stream other than its own used an allocation, it is first given back, and freed only when the
GPU has finished on that stream; the host waits for that from time to time.

Kernel workspaces, which a kernel allocates for itself and frees before it returns, are added by
rules here: no fake tensor shows them.
"""

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from highwater.engine.models.weights import name_in_files
from highwater.engine.tracer import fake_cuda
from highwater.engine.tracer.inplace_accumulation import InplaceAccumulation
from highwater.nouns.events import (
    Allocate,
    Enter,
    Free,
    GiveBack,
    ReleaseCached,
    TraceEvent,
    column_sums,
)

aten: Any = torch.ops.aten
Round = TypeVar("Round")


def _in_flash_backward(args: Sequence[Any]) -> list[int]:
    """Workspace bytes: a float32 value per token and query head, and q's gradient in float32, with
    head sizes rounded up to 32; if query heads share keys, also k's and v's for every query head.
    Source: docs/results/layer; H200 recordings in docs/results/lab/trinity_trials.json; tests/gpu.
    """
    per_row, of_query, *every_head = _in_backward(args)
    head = args[1].shape[-1]
    return [per_row, of_query // head * (-(-head // 32) * 32), *every_head]


def _in_windowed_backward(args: Sequence[Any]) -> list[int]:
    """Workspace bytes of windowed flash attention, for tensors with tokens before heads."""
    assert args[1].ndim == 4, "trials have no rows of unlike documents"
    by_heads = [tensor.transpose(1, 2) for tensor in args[:3]]
    return _in_flash_backward(by_heads)


def _in_cudnn_backward(args: Sequence[Any]) -> list[int]:
    """Bytes of one workspace: the sum of flash attention's, with head sizes not rounded up, plus
    256. Source: docs/results/lab/histories.json.gz.
    """
    return [sum(_in_backward(args)) + 256]


def _in_backward(args: Sequence[Any]) -> list[int]:
    query, key = args[1], args[2]
    repeats = query.shape[1] // key.shape[1]
    every_head = [key.element_size() * repeats * key.numel()] * 2 if repeats > 1 else []
    return [4 * query.numel() // query.shape[-1], 4 * query.numel(), *every_head]


def _in_embedding_backward(args: Sequence[Any]) -> list[int]:
    """Bytes of float32 sums of ten sorted rows each, as in ATen's EmbeddingBackwardKernel.cu."""
    gradient, tokens, vocabulary = args[0], args[1].numel(), args[2]
    width = -(-gradient.shape[-1] // 32) * 32
    return [4 * width * (tokens // 10 + min(tokens, vocabulary))] if tokens > 3072 else []


def in_column_sums(args: Sequence[Any], *, resident_threads: int) -> list[int]:
    """Workspace bytes of a sum over all dimensions but the last, by nouns/events.py."""
    inputs = args[0]
    if inputs.ndim < 2 or not inputs.numel() or inputs.stride(-1) != 1:
        return []
    if {dim % inputs.ndim for dim in args[1] or range(inputs.ndim)} != set(range(inputs.ndim - 1)):
        return []
    rows, columns = prod(inputs.shape[:-1]), inputs.shape[-1]
    taken = column_sums(rows, columns, resident_threads=resident_threads)
    return list(taken) if taken.partial_bytes else []


WORKSPACES: dict[Any, Callable[[Sequence[Any]], list[int]]] = {
    aten.embedding_dense_backward.default: _in_embedding_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _in_cudnn_backward,
    aten._scaled_dot_product_flash_attention_backward.default: _in_flash_backward,
    aten._flash_attention_backward.default: _in_windowed_backward,
}
"""Bytes that an operator allocates for itself and frees before it returns, by operator."""

_DEVICE: Any = torch.ops.prim.device.default


@dataclass(slots=True)
class _GivenBack:
    """An allocation that was given back while a stream may still use it."""

    number: int
    launches: int
    """Number of kernels that were launched before."""
    stream_id: int
    """Stream that still uses it."""
    moment: int
    is_fsdps: bool
    """True if FSDP1 lent it to the stream."""
    was_waited: bool = False
    """True if the host has since waited for another stream."""


class AllocationRecorder(TorchDispatchMode):
    """Records each storage on the device that an operator returns: allocation, resizing, end."""

    def __init__(self, sums: InplaceAccumulation | None = None) -> None:
        """Start without events. ``sums`` decides which gradients are added in place; None: none."""
        super().__init__()
        self.events: list[TraceEvent] = []
        self.operators: dict[str, int] = {}
        self.modules: dict[str, int] = {"": 0}
        self.is_closed = False
        self.is_muted = False
        """True while nothing is recorded: DTensor makes tensors of the model's size for shapes."""
        self._count = 0
        self._ids: dict[int, list[int]] = {}
        """Record of each storage by its ``_key``: the id of its current allocation (0 for none),
        its bytes, and its stream."""
        self._within = [0]
        self._addends: dict[int, list[int]] = {}
        """Ids of the allocations that were added up, by the id of their sum's allocation."""
        self._lent: dict[int, tuple[int, bool]] = {}
        """Storages that a stream other than their own uses: that stream, and True if FSDP1 declared
        it; FSDP1 waits for what it lends."""
        self._awaited: deque[_GivenBack] = deque()
        """Allocations that were given back and are not free yet, the oldest first."""
        self._launches = 0
        self.most_awaited: int | None = None
        self.hidden = WORKSPACES
        self._loops: dict[Hashable, tuple[list[TraceEvent], int]] = {}
        """By key: events of the rounds that stand for a loop, and the kernels of one round."""
        self._sums = sums or InplaceAccumulation()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, so that Dynamo need not be disabled at every call

    def follow(self, decoder: nn.Module) -> None:
        """Register hooks that label allocations with the module whose forward pass makes them."""
        for name, module in decoder.named_modules():
            index = self.modules.setdefault(
                name_in_files(f"{name}.").rstrip("."), len(self.modules)
            )
            module.register_forward_pre_hook(
                lambda *_, index=index: self._within.append(index), prepend=True
            )
            # Called even if a recomputation ends in the middle of the module.
            module.register_forward_hook(self._leave, always_call=True)

    def _leave(self, *_: object) -> None:
        self._within.pop()

    def enter(self, phase: str) -> None:
        """Record that a phase of the step begins."""
        if phase == _FIRST_PHASE:
            self.wait()
        self.events.append(Enter(phase))

    def lend(self, tensor: Tensor, stream: fake_cuda.Stream) -> None:
        """Record that a stream uses a tensor (``record_stream``). If this is not the tensor's own
        stream, the tensor, once given back, is freed only when the GPU has finished on that stream.
        """
        key = _key(tensor.untyped_storage())
        if key in self._ids and self._ids[key][2] != stream.stream_id:
            self._lent[key] = (stream.stream_id, True)

    def pass_on(self, gradient: Tensor, stream: fake_cuda.Stream) -> None:
        """Record that autograd continues with a gradient on a stream. A sum of gradients was made
        there: its allocation is moved to it, and its addends are lent. Other gradients are lent.
        """
        record = self._ids.get(_key(gradient.untyped_storage()))
        if record is None or not record[0] or record[2] == stream.stream_id:
            return
        if self._is_sum(self._made(record[0])[1]):
            self._make_on(stream, record[0])
            record[2] = stream.stream_id
        else:
            self._lent.setdefault(_key(gradient.untyped_storage()), (stream.stream_id, False))

    def _make_on(self, stream: fake_cuda.Stream, number: int) -> None:
        """Move a sum of gradients to a stream, and lend its addends to that stream."""
        index, made = self._made(number)
        self.events[index] = msgspec.structs.replace(made, stream=stream.stream_id)
        for addend in self._addends.pop(number, ()):
            _, born = self._made(addend)
            if self._is_sum(born):
                self._make_on(stream, addend)
            elif born.stream != stream.stream_id:
                self._lend_freed(addend, stream)

    def _is_sum(self, made: Allocate) -> bool:
        return made.operator == self.operators.get(str(aten.add.Tensor))

    def _lend_freed(self, number: int, stream: fake_cuda.Stream) -> None:
        """Turn an allocation's recorded free into a lend, as the stream still uses it."""
        for index in range(len(self.events) - 1, -1, -1):
            event = self.events[index]
            if event == Free(number):
                self.events[index] = GiveBack(number)
                self._give_back(number, stream.stream_id, is_fsdps=False)
                return
            if isinstance(event, Allocate) and event.id == number:
                return

    def _made(self, number: int) -> tuple[int, Allocate]:
        """Find an allocation's index among the events, and its event; the newest is first."""
        return next(
            (index, event)
            for index, event in zip(
                range(len(self.events) - 1, -1, -1), reversed(self.events), strict=True
            )
            if isinstance(event, Allocate) and event.id == number
        )

    def __enter__(self) -> "AllocationRecorder":
        resize = torch.UntypedStorage.resize_

        def watched(
            storage: torch.UntypedStorage, size: int
        ) -> Any:  # FSDP2 frees and reallocates memory by resizing
            resized = resize(storage, size)
            self._resized(storage)
            return resized

        storages: Any = torch.UntypedStorage
        storages.resize_ = watched
        self._resize = resize
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        storages: Any = torch.UntypedStorage
        storages.resize_ = self._resize
        super().__exit__(*error)  # pyright: ignore[reportArgumentType]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:  # first, because it is half of all calls
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args, **kwargs)
        if any(
            is_traceable_wrapper_subclass_type(kind) for kind in types if kind is not FakeTensor
        ):
            return NotImplemented  # a DTensor's local operators come here by themselves
        if func is aten._local_scalar_dense.default:
            is_on_device = _device_of(args[0]).type == "cuda"
            if is_on_device:
                self.wait()
            # a number on the device, or a fake without a value, like an optimizer's step
            if is_on_device or (isinstance(args[0], FakeTensor) and args[0].constant is None):
                return True if args[0].dtype is torch.bool else 1  # no memory depends on it
        if func in _QUADRATIC and args[0].ndim > 2:  # a router's scores are tokens x experts
            raise RuntimeError(
                f"{func} would hold tokens x tokens numbers: a fused attention runs on the GPUs "
                f"that are meant"
            )
        results = self._sums.operator(func, args)(*args, **kwargs)
        if not self.is_muted and not func.is_view:
            self._launches += 1
            self._await(
                self._launches
                - (0 if _waits_for_gpu(func, args, kwargs, results) else _LAUNCHES_AHEAD)
            )
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and _device_of(tensor).type == "cuda":
                self._see(tensor, str(func))
        if func is aten.add.Tensor:
            self._note_addends(results, args)
        takes = None if self.is_muted else self.hidden.get(func)
        hidden = takes(args) if takes is not None and _device_of(args[0]).type == "cuda" else []
        ids = [self._allocate(size, f"inside {func}") for size in hidden]
        self.events.extend(Free(number) for number in reversed(ids))
        return results

    def _see(self, tensor: Tensor, operator: str) -> None:
        if self.is_muted or is_traceable_wrapper_subclass_type(type(tensor)):
            return
        storage = tensor.untyped_storage()
        key = _key(storage)
        if key in self._ids:
            return
        size = storage.nbytes()
        record = [self._allocate(size, operator), size, fake_cuda.Stream.current.stream_id]
        self._ids[key] = record
        weakref.finalize(storage, self._gone, key, record).atexit = False

    def _note_addends(self, total: Tensor, args: Sequence[Any]) -> None:
        records = [
            self._ids.get(_key(each.untyped_storage()))
            for each in (total, *args)
            if isinstance(each, Tensor)
        ]
        if records[0] is not None:
            self._addends[records[0][0]] = [
                record[0] for record in records[1:] if record is not None and record[0]
            ]

    def _resized(self, storage: torch.UntypedStorage) -> None:
        record = self._ids.get(_key(storage))
        size = storage.nbytes()
        if record is None or size == record[1]:
            return
        if record[0]:
            self._end(_key(storage), record[0])
        record[:] = [
            self._allocate(size, "resize_") if size else 0,
            size,
            fake_cuda.Stream.current.stream_id,
        ]

    def _gone(self, key: int, record: list[int]) -> None:
        self._ids.pop(key, None)
        if record[0] and not self.is_closed:
            self._end(key, record[0])
        self._lent.pop(key, None)  # another storage may get the same address

    def _end(self, key: int, number: int) -> None:
        lent = self._lent.pop(key, None)
        if lent is None:
            self.events.append(Free(number))
            return
        stream_id, is_fsdps = lent
        self.events.append(GiveBack(number))
        self._give_back(number, stream_id, is_fsdps=is_fsdps)
        if self.most_awaited is None:
            return
        of_fsdp = [each.launches for each in self._awaited if each.is_fsdps]
        if len(of_fsdp) > self.most_awaited:
            self._await(of_fsdp[-1 - self.most_awaited])

    def _give_back(self, number: int, stream_id: int, *, is_fsdps: bool) -> None:
        """Queue an allocation to be freed later, since a stream may still use it."""
        moment = fake_cuda.Stream.moment()
        self._awaited.append(
            _GivenBack(number, self._launches, stream_id, moment, is_fsdps=is_fsdps)
        )

    def some_for_all(self, key: Hashable, some: Sequence[Round], *, rounds: int) -> Iterator[Round]:
        """Yield a few of a loop's ``rounds``, which free all they allocate, to stand for all.

        If a loop with the same key ran before, none is yielded: its events are recorded again, and
        nothing is computed.
        """
        start, launches = len(self.events), self._launches
        if key not in self._loops:
            yield from some
            self._loops[key] = self.events[start:], (self._launches - launches) // len(some)
        else:
            self._record_again(self._loops[key][0])
        self._launches = launches + rounds * self._loops[key][1]
        self._await(self._launches - _LAUNCHES_AHEAD)

    def _record_again(self, events: Sequence[TraceEvent]) -> None:
        """Record the allocations and frees among ``events`` again, with new ids."""
        numbers = dict[int, int]()
        for event in events:
            if isinstance(event, Allocate):
                numbers[event.id] = self._allocated(event.bytes, event.operator)
            elif isinstance(event, Free) and event.id in numbers:
                self.events.append(Free(numbers.pop(event.id)))
        self.events.extend(map(Free, numbers.values()))

    def wait_for(self, stream: fake_cuda.Stream) -> None:
        """Record that the host waits until a stream is done, and free the memory that other streams
        used as far as this wait covers it; the rest is freed at the host's next wait.
        """
        awaited, self._awaited = self._awaited, deque()
        for each in awaited:
            if each.was_waited or stream.has_waited(each.stream_id, each.moment):
                self.events.append(Free(each.number))
            else:
                each.was_waited = True
                self._awaited.append(each)

    def wait(self) -> None:
        """Record that the host waits until the GPU has done all its work."""
        self._await(self._launches)

    def release(self) -> None:
        """Record that the allocator frees its cache, once the GPU is done with it."""
        self.wait()
        self.events.append(ReleaseCached())

    def _await(self, launches: int) -> None:
        """Free allocations given back before kernel ``launches``, which the GPU has passed."""
        while self._awaited and self._awaited[0].launches <= launches:
            self.events.append(Free(self._awaited.popleft().number))

    def _allocate(self, size: int, operator: str) -> int:
        return self._allocated(size, self.operators.setdefault(operator, len(self.operators)))

    def _allocated(self, size: int, index: int) -> int:
        self._count += 1
        self.events.append(
            Allocate(self._count, size, fake_cuda.Stream.current.stream_id, index, self._within[-1])
        )
        return self._count


def _key(storage: torch.UntypedStorage) -> int:
    """Return the storage's address in C++; Python may have several objects for one storage."""
    return storage._cdata  # pyright: ignore[reportPrivateUsage] -- nothing public tells


def _device_of(tensor: Tensor) -> torch.device:
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def _waits_for_gpu(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
    """True if the host waits for the GPU, as in a copy that is not declared non-blocking."""
    if func is aten.copy_.default:
        source, goes_on = args[1], kwargs.get("non_blocking", args[2:] == (True,))
    elif func is aten._to_copy.default:
        source, goes_on = args[0], kwargs.get("non_blocking", False)
    else:
        return False
    return not goes_on and _device_of(source).type != _device_of(result).type


_FIRST_PHASE = "experience"
"""First phase of a step. Before it the host reads the last loss, and so waits for the GPU."""
_LAUNCHES_AHEAD = 1024
"""Kernels that the host can launch before the GPU runs them: CUDA's queue. With this limit FSDP1's
trials on an H200 reserve at most 0.5 % more than their traces, else 7.6 % (docs/results/lab)."""
_QUADRATIC = (aten._softmax.default, aten._safe_softmax.default)

"""Activations in host memory: what a recomputed layer keeps, its input and perhaps its attention's
output, is copied to the host in the forward pass and back one layer before it is needed.

Copies run on a stream of their own. Device memory is freed after the compute stream has waited for
the copy, at the next layer: peaks depend on the order of layers, never on timing (``record_stream``
would make them depend on it). At most one layer's activations are on their way out, and one layer's
on their way in beside those in use. Copies change no value.

Host memory is mapped by this module, touched by several threads on the CPUs next to the GPU, and
registered with CUDA: PyTorch's pinned allocator rounds up to powers of two, and first touch by one
thread runs at 1.5 GB/s. It stays mapped from step to step.
"""

import ctypes
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from highwater.errors import ModelError
from highwater.nouns.settings import HOST_SHARE
from highwater.units import format_bytes

ContextFunction = Callable[["Kept"], tuple[Any, Any]]
"""Takes what a layer keeps; returns two contexts, for its forward pass and its recomputation."""
_PAGE = 2 << 20
_TOUCHED_AT_ONCE = 256 << 20
"""Bytes that one thread touches before it takes the next part."""
_TOUCHING_THREADS = 16
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Kept:
    """Groups of tensors that one layer keeps for its backward pass, taken in the order kept."""

    def __init__(self) -> None:
        self._groups: deque[Sequence[Any]] = deque()

    def keep(self, tensors: Sequence[Any]) -> None:
        """Keep one group of tensors; ints, floats and None are allowed among them."""
        self._groups.append(tensors)

    @property
    def is_empty(self) -> bool:
        """True if no group of tensors is left."""
        return not self._groups

    def take(self) -> Sequence[Any]:
        """Return the oldest group of tensors, and remove it."""
        return self._groups.popleft()


class HostActivations:
    """Host memory for the activations of one rank, and its layers that await their backward pass.

    All models of the rank share it: each runs forward and backward before the next.
    """

    def __init__(self, device: torch.device, *, layers_on_gpu: int, budget_bytes: int) -> None:
        """``layers_on_gpu``: number of last layers whose activations stay on the GPU, at least one:
        its backward pass hides the first copy back. ``budget_bytes``: limit of mapped host memory.
        """
        assert layers_on_gpu > 0, "nothing comes back ahead of the last layer"
        self._layers_on_gpu = layers_on_gpu
        self.memory = PinnedPlaces(device, budget_bytes=budget_bytes)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._waiting: list[_KeptOnHost] = []
        """Layers whose backward pass is to come, the first one's first."""
        self._leaving: list[Tensor] = []
        """Tensors of the device whose copies may still run."""

    def checkpoint(
        self,
        layer: Callable[..., Any],
        *arguments: Any,
        index: int,
        layers: int,
        keeping: ContextFunction | None,
        preserve_rng_state: bool,
        **keywords: Any,
    ) -> Any:
        """Call a layer for recomputation, as ``torch.utils.checkpoint.checkpoint`` does. The layer
        is number ``index`` of ``layers``, and its first argument the hidden states.

        Raises ModelError if a layer takes its hidden states by name, where no hook sees them.
        """
        if not arguments:
            raise ModelError(
                "this family hands hidden states to its layers by name, where they cannot be moved "
                "to host memory",
                hint="leave `--activations` out",
            )
        alike = arguments[0].shape, arguments[0].dtype  # hooks outlive the tensor
        kept = _KeptOnHost(None)
        if torch.is_grad_enabled():
            is_on_host = index < layers - self._layers_on_gpu
            kept = self._begin(is_first=index == 0, is_on_host=is_on_host)

        def pack(tensor: Tensor) -> Any:
            if not kept.is_empty or (tensor.shape, tensor.dtype) != alike:
                return tensor  # only the first argument moves, even if others look alike
            kept.keep((tensor,))
            return kept

        def unpack(packed: Any) -> Tensor:
            if packed is not kept:
                return packed
            self._bring(kept)
            return kept.take()[0]

        how: dict[str, Any] = {"preserve_rng_state": preserve_rng_state, "use_reentrant": False}
        if keeping is not None:
            how["context_fn"] = lambda: keeping(kept)
        with saved_tensors_hooks(pack, unpack):
            return checkpoint(layer, *arguments, **how, **keywords)

    def _begin(self, *, is_first: bool, is_on_host: bool) -> "_KeptOnHost":
        """Begin a layer's forward pass; the previous layer's copies have left the device by now."""
        self._release()
        while is_first and self._waiting:  # left by a pass whose backward pass never came
            self._waiting.pop().forget(self.memory)
        kept = _KeptOnHost(self) if is_on_host else _KeptOnHost(None)
        self._waiting.append(kept)
        return kept

    def _bring(self, kept: "_KeptOnHost") -> None:
        """Begin a layer's backward pass: wait for its activations, start copying the next ones."""
        self._release()
        assert self._waiting, "a layer goes backward once"
        assert self._waiting[-1] is kept, "layers go backward in the opposite order"
        self._waiting.pop().come()
        came = None if self._stream is None else self._stream.record_event()
        if self._waiting:
            self._waiting[-1].come()
        if came is not None:
            torch.cuda.current_stream().wait_event(came)

    def _release(self) -> None:
        """Free device tensors whose copies the compute stream waits for from now on."""
        if self._leaving and self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._leaving.clear()

    @torch.no_grad()
    def send(self, tensor: Tensor) -> "_OnHost":
        """Copy a tensor to host memory; it stays on the device until the next layer."""
        if not is_dense(tensor):
            tensor = tensor.contiguous()
        place = self.memory.take(tensor.numel() * tensor.element_size())
        with _after_computation(self._stream):
            place.of(tensor).copy_(_flat(tensor), non_blocking=True)
        self._leaving.append(tensor)
        return _OnHost(place, tensor.dtype, tensor.shape, tensor.stride(), tensor.device)

    @torch.no_grad()
    def fetch(self, sent: "_OnHost") -> Tensor:
        """Copy a tensor back to the device; the computation waits for it before it is used."""
        tensor = torch.empty_strided(sent.shape, sent.stride, dtype=sent.dtype, device=sent.device)
        with _after_computation(self._stream):
            _flat(tensor).copy_(sent.place.of(tensor), non_blocking=True)
        self.memory.give(sent.place)  # its next content is copied after this copy
        return tensor


class _KeptOnHost(Kept):
    """Tensors that one layer keeps: in host memory if it is given ``host``, else on the device."""

    def __init__(self, host: HostActivations | None) -> None:
        super().__init__()
        self._host = host

    def keep(self, tensors: Sequence[Any]) -> None:
        if self._host is not None:  # kernels return a few single numbers too, which stay
            tensors = [
                self._host.send(each) if isinstance(each, Tensor) and each.numel() > 1 else each
                for each in tensors
            ]
        self._groups.append(tensors)

    def come(self) -> None:
        """Start copying all that is in host memory back to the device."""
        host = self._host
        if host is not None:
            self._host = None
            self._groups = deque(
                [host.fetch(each) if isinstance(each, _OnHost) else each for each in group]
                for group in self._groups
            )

    def forget(self, memory: "PinnedPlaces") -> None:
        """Free the host memory of tensors that will never be fetched, without a backward pass."""
        for each in (each for group in self._groups for each in group):
            if isinstance(each, _OnHost):
                memory.give(each.place)
        self._groups.clear()


class _Pinned:
    """A block of pinned host memory."""

    def __init__(self, memory: Tensor, free: Callable[[], object]) -> None:
        self.memory = memory
        self.free = free

    @property
    def bytes(self) -> int:
        return len(self.memory)

    def of(self, tensor: Tensor) -> Tensor:
        """View the block as the flat elements of a tensor of this dtype and size."""
        return self.memory[: tensor.numel() * tensor.element_size()].view(tensor.dtype)


class _OnHost(NamedTuple):
    """A tensor copied to host memory, with its shape, strides, dtype and device."""

    place: _Pinned
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device


class PinnedPlaces:
    """Pool of pinned host memory blocks, mapped on first use and then reused."""

    def __init__(self, device: torch.device, *, budget_bytes: int) -> None:
        self._device = device
        self._budget_bytes = budget_bytes
        self._free: list[_Pinned] = []
        self.mapped_bytes = 0
        self.preparing_s = 0.0
        """Seconds spent on mapping so far; later steps do not spend them again."""
        self.mapped: Callable[[], object] = lambda: None
        """Called whenever more is mapped."""

    def take(self, size: int) -> _Pinned:
        """Return the smallest free block of at least ``size`` bytes, or a new one.

        Raises the errors of ``map_pinned``.
        """
        fitting = [place for place in self._free if place.bytes >= size]
        if fitting:
            place = min(fitting, key=lambda each: each.bytes)
            self._free.remove(place)
            return place
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # computing time must not count as preparing
        began = time.perf_counter()
        while self._free:  # every free piece is too small for what is needed now
            place = self._free.pop()
            self.mapped_bytes -= place.bytes
            place.free()
        memory, free = map_pinned(size, self._device, self._budget_bytes - self.mapped_bytes)
        self.mapped_bytes += len(memory)
        self.mapped()
        self.preparing_s += time.perf_counter() - began
        return _Pinned(memory, free)

    def give(self, place: _Pinned) -> None:
        """Return a block to the free ones."""
        self._free.append(place)


def map_pinned(
    size: int, device: torch.device, room_bytes: int
) -> tuple[Tensor, Callable[[], object]]:
    """Map host memory, touch it, and register it with CUDA if the device is a GPU. Returns its
    bytes as a tensor, and a function that unmaps it.

    Raises MemoryError for more than ``room_bytes``: touching missing memory would kill the process.
    """
    if size > room_bytes:
        raise MemoryError(
            f"activations need {format_bytes(size - room_bytes)} more of host memory than the "
            f"share of {HOST_SHARE:.0%} that they may take"
        )
    if device.type != "cuda":
        return torch.empty(size, dtype=torch.uint8), lambda: None
    rounded = -(-size // _PAGE) * _PAGE
    mapped = mmap.mmap(-1, rounded, flags=_PRIVATE)
    with suppress(OSError):  # a kernel without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    _touch(memory.data_ptr(), rounded, _cpus_beside(device))
    cuda: Any = torch.cuda.cudart()
    error = int(cuda.cudaHostRegister(memory.data_ptr(), rounded, 0))
    if error:
        raise MemoryError(f"CUDA registers no {rounded} bytes of host memory: error {error}")
    return memory, lambda: cuda.cudaHostUnregister(memory.data_ptr())


def _touch(address: int, size: int, cpus: set[int]) -> None:
    """Write zeros to all pages by threads on these CPUs, so that pages are allocated near them."""

    def touch(start: int) -> None:
        os.sched_setaffinity(0, cpus)  # of this thread alone
        ctypes.memset(address + start, 0, min(_TOUCHED_AT_ONCE, size - start))

    with ThreadPoolExecutor(min(_TOUCHING_THREADS, len(cpus))) as threads:
        list(threads.map(touch, range(0, size, _TOUCHED_AT_ONCE)))


def _cpus_beside(device: torch.device) -> set[int]:
    """Return this process's CPUs that are next to the GPU; all of its CPUs if that is unknown."""
    allowed = os.sched_getaffinity(0)
    found: Any = torch.cuda.get_device_properties(device)
    bus = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    try:
        text = Path(f"/sys/bus/pci/devices/{bus}/local_cpulist").read_text(encoding="ascii")
    except OSError:
        return allowed
    local: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        local.update(range(int(first), int(last or first) + 1))
    return allowed & local or allowed


def _after_computation(stream: torch.cuda.Stream | None) -> Any:
    """Return a context in which copies wait for all work that the current stream has launched."""
    if stream is None:
        return nullcontext()
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


def is_dense(tensor: Tensor) -> bool:
    """True if a tensor covers a contiguous range of memory, in any order of its dimensions."""
    places = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != places:
                return False
            places *= size
    return True


def _flat(tensor: Tensor) -> Tensor:
    """View all elements of a dense tensor in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))

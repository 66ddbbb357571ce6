"""Rank context: a rank's device, attention kernel and process groups, and the memory that setting
them up took. Also agreement: an error on one rank is raised on all, with the same message. Values
are exchanged as JSON, because unpickling could run code that another machine sends.
"""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from highwater.engine.attention.dense import Kernel, select_kernel
from highwater.engine.attention.kernel_proof import computes_windows
from highwater.engine.data.batches import Batch, share_of
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.parallel.mesh import SequenceGroups, every_ranks
from highwater.engine.training.memory_profiler import outside_allocator_bytes
from highwater.errors import HighwaterError, MachineError, ModelError, UsageError
from highwater.model.model import load_model
from highwater.nouns.codec import Record, from_json, to_json
from highwater.nouns.hardware import unfit_gpu
from highwater.nouns.trial import Device, TrialSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """What a rank works with: its device, its attention kernel, and its process groups."""

    device: torch.device
    kernel: Kernel
    mesh: DeviceMesh
    """Mesh of all ranks, over which parameters, gradients and optimizer states are sharded."""
    shared: SequenceGroups
    """Ranks that share this rank's sequences."""
    nccl_bytes: int
    """Device memory outside the allocator that joining the groups took; 0 on the CPU."""

    @property
    def data_rank(self) -> int:
        """Number of this rank's data-parallel group."""
        return dist.get_rank() // self.shared.degree

    def share_of(self, batch: Batch) -> Batch:
        """Return this rank's share of a micro-batch."""
        return share_of(batch, self.shared)


def take_context(spec: TrialSpec) -> RankContext:
    """Choose device and kernel and join the groups; MachineError for a GPU that cannot train."""
    device = device_of(spec.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        capability = torch.cuda.get_device_capability(device)
        unfit = unfit_gpu(torch.cuda.get_device_name(device), capability)
        if unfit is not None:
            raise unfit
    shape = load_model(spec.model_directory).shape
    if shape.window_tokens is not None and device.type == "cuda":
        # proven before anything else is allocated: the proof's memory is freed again
        if not computes_windows(device, compute_dtype(device), shape.head_dim):
            sys.stdout.write(
                f"flash attention computes no window for heads of {shape.head_dim} on this GPU: "
                "layers that have one take the plain path, which is slower\n"
            )
        torch.cuda.empty_cache()
    kernel = select_kernel(
        device,
        compute_dtype(device),
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
    )
    before_bytes = _settled_bytes(device)
    process_mesh.join(device)
    mesh = process_mesh.shard_mesh(spec.layout, device)
    shared = process_mesh.sequence_groups(spec.layout, mesh)
    process_mesh.warm_up(mesh, shared, has_states=shape.delta is not None)
    synchronize(device)
    after_bytes = outside_allocator_bytes(device) if device.type == "cuda" else 0
    return RankContext(
        device=device,
        kernel=kernel,
        mesh=mesh,
        shared=shared,
        nccl_bytes=max(0, after_bytes - before_bytes),
    )


def shared_window(spec: TrialSpec) -> int | None:
    """Most tokens of a document in a ring: the model's window; None: no window, or no ring."""
    has_ring = spec.layout.ring_degree > 1
    return load_model(spec.model_directory).shape.window_tokens if has_ring else None


def device_of(device: Device) -> torch.device:
    """Return the GPU of this process's LOCAL_RANK, the first if that is not set; or the CPU."""
    if device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def compute_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 for GPUs; float32 for the CPU, where bfloat16 products are slow."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _settled_bytes(device: torch.device) -> int:
    """Create the context and cuBLAS's handles; return the bytes then used outside the allocator."""
    if device.type != "cuda":
        return 0
    a = torch.ones(256, 256, device=device, dtype=compute_dtype(device), requires_grad=True)
    (a @ a).sum().backward()
    synchronize(device)
    return outside_allocator_bytes(device)


T = TypeVar("T")
_KINDS = {kind.__name__: kind for kind in (HighwaterError, UsageError, ModelError, MachineError)}
"""Errors that a rank may stop with, by name."""


class _Failure(Record, frozen=True, kw_only=True):
    """An error as sent to other ranks."""

    kind: str | None
    """Name of a HighwaterError's class; None for a bug."""
    problem: str
    hint: str = ""


@contextmanager
def agreed(mesh: DeviceMesh) -> Generator[None]:
    """Context manager: run a block without collectives on all ranks. A HighwaterError on one is
    raised on all (the lowest rank's, if several). Any other exception is a bug: it is raised on its
    own rank, and as RuntimeError on the others.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 -- raised again below, once all know
        failure = error
    told = gathered(_told(failure), mesh, kind=tuple[_Failure, ...])
    if failure is not None and not isinstance(failure, HighwaterError):
        raise failure
    first = next(((rank, each) for rank, own in enumerate(told) for each in own), None)
    if first is None:
        return
    rank, said = first
    if said.kind is None:
        raise RuntimeError(f"rank {rank}: {said.problem}")
    raise _KINDS.get(said.kind, HighwaterError)(said.problem, hint=said.hint) from failure


def gathered(own: T, mesh: DeviceMesh, *, kind: type[T]) -> list[T]:
    """Return every rank's value, in rank order.

    Raises MachineError if another rank sends something that is not JSON of this kind.
    """
    if mesh.size() == 1:
        return [own]
    every: list[T] = []
    for rank, sent in enumerate(every_ranks(list(to_json(own).encode()), torch.uint8, mesh)):
        try:
            every.append(from_json(bytes(sent), kind))
        except msgspec.MsgspecError as error:
            raise MachineError(
                f"rank {rank} sent what is not this program's: {error}",
                hint="start every machine with the same highwater: `highwater --version` says "
                "which",
            ) from error
    return every


def _told(failure: Exception | None) -> tuple[_Failure, ...]:
    if failure is None:
        return ()
    if isinstance(failure, HighwaterError):
        kind, problem, hint = type(failure).__name__, failure.problem, failure.hint
    else:
        kind, problem, hint = None, f"{type(failure).__name__}: {failure}", ""
    # A path with invalid UTF-8 would be invalid JSON, and the others would wait for this rank.
    problem, hint = (
        text.encode("utf-8", "backslashreplace").decode("utf-8") for text in (problem, hint)
    )
    return (_Failure(kind=kind, problem=problem, hint=hint),)

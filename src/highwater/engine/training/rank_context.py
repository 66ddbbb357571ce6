"""Rank contexts: a rank's device, its attention kernel, the groups it is in, and what joining them
took of the device; and agreement: what fails on one rank fails on all, with the same words. Values
cross as JSON: unpickling what another machine sends would run what it says.
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
from highwater.engine.training.statistics_log import outside_allocator_bytes
from highwater.errors import HighwaterError, MachineError, ModelError, UsageError
from highwater.model.model import load_model
from highwater.nouns.codec import Record, from_json, to_json
from highwater.nouns.hardware import refuse_unfit_gpu
from highwater.nouns.trial import Device, TrialSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """One rank's place in a trial."""

    device: torch.device
    kernel: Kernel
    mesh: DeviceMesh
    """All ranks: parameters, gradients and optimizer states are sharded over them."""
    shared: SequenceGroups | None
    """The ranks that share this rank's sequences; None when it has them to itself."""
    nccl_bytes: int
    """Device memory outside the allocator that joining the groups took; 0 on the CPU."""

    @property
    def sequence(self) -> dist.ProcessGroup | None:
        """The group of all ranks that share one sequence."""
        return None if self.shared is None else self.shared.every

    @property
    def sequence_degree(self) -> int:
        """Ranks that share one sequence."""
        return 1 if self.shared is None else self.shared.degree

    @property
    def data_rank(self) -> int:
        """Which of the data-parallel groups this rank is in."""
        return dist.get_rank() // self.sequence_degree

    def share_of(self, batch: Batch) -> Batch:
        """What this rank holds of a micro-batch that it may share."""
        return share_of(batch, self.shared)


def take_context(spec: TrialSpec) -> RankContext:
    """Choose device and kernel and join the groups; MachineError for a GPU that cannot train."""
    device = device_of(spec.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        refuse_unfit_gpu(
            torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        )
    shape = load_model(spec.model_directory).shape
    if shape.window_tokens is not None and device.type == "cuda":
        _prove_windows(device, shape.head_dim)
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
    process_mesh.warm_up(mesh, shared)
    synchronize(device)
    after_bytes = outside_allocator_bytes(device) if device.type == "cuda" else 0
    return RankContext(
        device=device,
        kernel=kernel,
        mesh=mesh,
        shared=shared,
        nccl_bytes=max(0, after_bytes - before_bytes),
    )


def device_of(device: Device) -> torch.device:
    """This rank's own GPU, the first where nobody numbered its process; or the CPU."""
    if device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _prove_windows(device: torch.device, head_dim: int) -> None:
    """Find out whether flash attention's window is one here, leaving no block behind."""
    if not computes_windows(device, compute_dtype(device), head_dim):
        sys.stdout.write(
            f"flash attention computes no window for heads of {head_dim} on this GPU: layers that "
            "have one take the plain path, which is slower\n"
        )
    torch.cuda.empty_cache()


def compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on GPUs; float32 on the CPU, where bfloat16 products are slow."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def synchronize(device: torch.device) -> None:
    """Wait for everything that was asked of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _settled_bytes(device: torch.device) -> int:
    """Create the context and cuBLAS's handles; bytes then in use outside the allocator."""
    if device.type != "cuda":
        return 0
    a = torch.ones(256, 256, device=device, dtype=compute_dtype(device), requires_grad=True)
    (a @ a).sum().backward()
    synchronize(device)
    return outside_allocator_bytes(device)


T = TypeVar("T")
_KINDS = {kind.__name__: kind for kind in (HighwaterError, UsageError, ModelError, MachineError)}
"""Errors that a rank stops with, by their names."""


class _Failure(Record, frozen=True, kw_only=True):
    """What the others are told of an error."""

    kind: str | None
    """Name of a HighwaterError; None: a bug."""
    problem: str
    hint: str = ""


@contextmanager
def agreed(mesh: DeviceMesh) -> Generator[None]:
    """Run a block without collectives on all ranks; what a HighwaterError stops on one is raised on
    all, of several the lowest rank's. Another exception, a bug, is raised where it came up, and
    told to the others.
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
    """Every rank's value, in the order of the ranks; a rank alone talks to nobody.

    Raises MachineError for what another rank sends and is not JSON of this kind.
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
    # Bytes of a path that are no text would be no JSON, and the others would wait for this rank.
    problem, hint = (
        text.encode("utf-8", "backslashreplace").decode("utf-8") for text in (problem, hint)
    )
    return (_Failure(kind=kind, problem=problem, hint=hint),)

"""Process groups and device mesh of a trial: create, warm up and destroy them; and the versions of
the libraries that do.
"""

import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.cuda.nccl import version as nccl_version
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from highwater.engine.parallel.collectives import gather_rows, pass_on
from highwater.engine.parallel.sequence_layout import SequenceLayout
from highwater.nouns.environment import STORE_VARIABLE
from highwater.nouns.layout import Layout
from highwater.version import __version__

_JOINED = count()
"""Counts how often this process has joined other ranks so far."""


def join(device: torch.device) -> None:
    """Join the group of all ranks: NCCL on GPUs, gloo on the CPU.

    NCCL's communicator is made here rather than at the first collective, so that its memory can be
    measured. A single rank makes none, which would take 0.5 GiB for nothing; a process without a
    rank number counts as a single rank.
    """
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        join_alone(device)
        return
    bound = device if device.type == "cuda" else None
    dist.init_process_group(
        _backend(device), device_id=bound, store=_store(rank, ranks), rank=rank, world_size=ranks
    )


def join_alone(device: torch.device) -> None:
    """Make a process group of this process alone, with an in-memory store."""
    # gloo listens even without peers, by default on an interface that others can reach.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1)


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _store(rank: int, ranks: int) -> dist.Store | None:
    """Return the store through which the ranks find each other; None: torch chooses it.

    A file needs no port. Without a file the ranks were started by torchrun, for example, and use
    its server, which listens on every interface. A process that joins again, after it has left,
    needs a new name in the store: ranks would read each other's old messages.
    """
    path, before = os.environ.get(STORE_VARIABLE), next(_JOINED)
    if path is not None:
        return dist.FileStore(f"{path}.{before}" if before else path, ranks)
    if not before:
        return None
    store, _, _ = next(dist.rendezvous("env://", rank, ranks))
    return dist.PrefixStore(f"joined {before} times before", store)


@contextmanager
def alone(device: torch.device) -> Generator[None]:
    """Context manager: a group of this process alone; another group may be made after it."""
    join_alone(device)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """Return the mesh over which parameters, gradients and optimizer states are sharded. It has one
    dimension, or two with copies of the shards: copies first, so neighbours form one copy.
    """
    if layout.replicate_degree == 1:
        return init_device_mesh(device.type, (layout.gpus,), mesh_dim_names=("shard",))
    return init_device_mesh(
        device.type,
        (layout.replicate_degree, layout.shard_degree),
        mesh_dim_names=("replicate", "shard"),
    )


def all_ranks(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of all ranks of a mesh, which are those of the trial."""
    if mesh.ndim == 1:
        return mesh.get_group()
    world = dist.group.WORLD
    assert world is not None
    return world


def copies(mesh: DeviceMesh) -> int:
    """Return the number of copies of each shard."""
    return 1 if mesh.ndim == 1 else mesh.size(0)


def sharing(sequence: dist.ProcessGroup | None) -> int:
    """Number of ranks that share a sequence; 1 for None."""
    return 1 if sequence is None else dist.get_world_size(sequence)


@dataclass(frozen=True, slots=True)
class SequenceGroups:
    """Groups of ranks that share this rank's sequences; all None if no other rank does.

    These ranks are neighbours, numbered ``ring rank * ulysses_degree + ulysses rank``.
    """

    every: dist.ProcessGroup | None = None
    """Group of all ranks that share the sequences; None if no other rank does."""
    ulysses: dist.ProcessGroup | None = None
    """Group that trades heads; None if the degree is 1."""
    ring: dist.ProcessGroup | None = None
    """Group around which keys and values pass; None if the degree is 1."""

    @property
    def rank(self) -> int:
        """This rank's number among all ranks that share its sequences."""
        return 0 if self.every is None else dist.get_rank(self.every)

    @property
    def degree(self) -> int:
        """Number of ranks that share this rank's sequences."""
        return sharing(self.every)

    def layout_of(self, document_lengths: Sequence[int]) -> SequenceLayout:
        """Return the layout of a packed row of these documents over the ranks."""
        return SequenceLayout(tuple(document_lengths), sharing(self.ulysses), sharing(self.ring))


ALONE = SequenceGroups()


def sequence_groups(layout: Layout, mesh: DeviceMesh) -> SequenceGroups:
    """Return the groups of ranks that share this rank's sequences.

    A group of all ranks is the mesh's own: a second one would take NCCL's buffers once more.
    """
    degree, ulysses = layout.context_degree, layout.ulysses_degree
    if degree == 1:
        return ALONE
    firsts = range(0, layout.gpus, degree)
    every = _own_group([range(first, first + degree) for first in firsts], mesh)
    if ulysses in (1, degree):
        return SequenceGroups(every, *((None, every) if ulysses == 1 else (every, None)))
    neighbours = [range(first, first + ulysses) for first in range(0, layout.gpus, ulysses)]
    rings = [
        range(first + rank, first + degree, ulysses) for first in firsts for rank in range(ulysses)
    ]
    return SequenceGroups(every, _own_group(neighbours, mesh), _own_group(rings, mesh))


def _own_group(every: Sequence[Sequence[int]], mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of ``every``, which together have all ranks, that has this rank."""
    if len(every) == 1:
        return all_ranks(mesh)
    # Every rank makes every group, in the same order: making one is a collective of all ranks.
    own, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in every])
    assert isinstance(own, dist.ProcessGroup), "every rank is in one of the groups"
    return own


def warm_up(mesh: DeviceMesh, shared: SequenceGroups, *, has_states: bool = False) -> None:
    """Run each collective of a step once, on tiny tensors; ``has_states``: of linear attention.

    NCCL's buffers then exist before memory is measured.
    """
    if mesh.size() == 1:
        return
    device = mesh.device_type
    part = torch.ones(1, device=device)
    for dimension in range(mesh.ndim):
        group = mesh.get_group(dimension)
        gather_and_reduce(torch.ones(mesh.size(dimension), device=device), part, group)
    dist.all_reduce(part, group=all_ranks(mesh))
    if shared.ulysses is not None:
        row = torch.ones(dist.get_world_size(shared.ulysses), device=device)
        dist.all_to_all_single(torch.empty_like(row), row, group=shared.ulysses)
    if shared.ring is not None:
        for passed in pass_on([part], shared.ring)[1]:
            passed.wait()
        if shared.ulysses is not None:
            dist.all_reduce(part, group=shared.every)
        if has_states:
            row = torch.ones(shared.degree, device=device)
            for each, group in ((row, shared.every), (gather_rows(part, shared.ring), shared.ring)):
                dist.all_to_all_single(torch.empty_like(each), each, group=group)


def gather_and_reduce(full: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    """Run the collectives of sharded models: all-gather, reduce-scatter, all-reduce."""
    # Deprecated names, because torch 2.11 has no others.
    dist.all_gather_into_tensor(full, part, group=group)  # pyright: ignore[reportDeprecated]
    dist.reduce_scatter_tensor(part, full, group=group)  # pyright: ignore[reportDeprecated]
    dist.all_reduce(part, group=group)


def total(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum a tensor of each rank's shares over the mesh, in place."""
    if mesh.size() > 1:
        dist.all_reduce(tensor, group=all_ranks(mesh))
    return tensor


def every_ranks(values: Sequence[float], dtype: torch.dtype, mesh: DeviceMesh) -> list[list[Any]]:
    """Return every rank's values, on the host, in rank order; numbers of values may differ."""
    if mesh.size() == 1:
        return [list(values)]
    own = torch.tensor(values, dtype=dtype)
    own_count = torch.tensor([len(own)], device=mesh.device_type)
    counts = gather_rows(own_count, all_ranks(mesh)).tolist()
    # A gather needs tensors of one shape: all are padded to the longest, and cut afterwards.
    rows = F.pad(own, (0, max(counts) - len(own)))[None].to(mesh.device_type)
    return [
        row[:count]
        for row, count in zip(gather_rows(rows, all_ranks(mesh)).tolist(), counts, strict=True)
    ]


def leave() -> NoReturn:
    """Wait for the others, leave the group, and exit the process with status 0.

    Tearing a group down while a peer still communicates kills the peer. And gloo's threads may
    release a tensor while the interpreter shuts down, which aborts the process after all its work
    is done. Hence ``os._exit``.
    """
    if dist.get_world_size() > 1:
        dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def versions() -> dict[str, str]:
    """Return the versions of the libraries that this process runs on."""
    found = {
        "highwater": __version__,
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(str(part) for part in nccl_version())
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found

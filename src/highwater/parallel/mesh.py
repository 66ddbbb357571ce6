"""The process group of a trial: joined, warmed up and left in one place."""

import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from highwater.parallel.collectives import gather_rows
from highwater.spec.layout import Layout
from highwater.spec.rank import STORE_VARIABLE


def join(device: torch.device) -> None:
    """Join the group of all ranks: NCCL on GPUs, gloo on the CPU.

    NCCL's communicator is made here rather than at the first collective, so that its memory can be
    told from the rest. A rank alone makes none: it has nobody to talk to, and would spend 0.5 GiB
    on it.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks == 1:
        join_alone(device)
        return
    bound = device if device.type == "cuda" else None
    dist.init_process_group(
        _backend(device), device_id=bound, store=_store(ranks), rank=rank, world_size=ranks
    )


def join_alone(device: torch.device) -> None:
    """Make a group of this process alone: its store is in this process's memory."""
    # gloo listens even for nobody, by default where others reach it.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1)


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _store(ranks: int) -> dist.Store | None:
    """The store through which the ranks find each other; None for torch's own way.

    A file opens no port. Where none is named, torchrun for example started the ranks: they meet
    through its server, which listens on every interface.
    """
    path = os.environ.get(STORE_VARIABLE)
    return None if path is None else dist.FileStore(path, ranks)


@contextmanager
def alone(device: torch.device) -> Generator[None]:
    """Run the block in a group of this process alone; another group may be made after it."""
    join_alone(device)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """The one-dimensional mesh that parameters, gradients and optimizer states are sharded over."""
    assert layout.replicate_degree == 1, "copies of the shards are not built yet"
    return init_device_mesh(device.type, (layout.gpus,), mesh_dim_names=("shard",))


def sequence_group(layout: Layout, mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The neighbouring ranks that share this rank's sequences; None where it shares them with none.

    Where they are all ranks it is the mesh's own group: a second one would cost NCCL's buffers once
    more.
    """
    degree = layout.context_degree
    if degree == 1:
        return None
    if degree == layout.gpus:
        return mesh.get_group()
    # Every rank makes every group, in one order: making one is itself a collective of all ranks.
    neighbours = [list(range(first, first + degree)) for first in range(0, layout.gpus, degree)]
    own, _ = dist.new_subgroups_by_enumeration(neighbours)
    assert isinstance(own, dist.ProcessGroup), "every rank is in one of the groups"
    return own


def warm_up(mesh: DeviceMesh, sequence: dist.ProcessGroup | None) -> None:
    """Run each collective of a step once, on a few numbers.

    Its buffers then exist before memory is measured.
    """
    if mesh.size() == 1:
        return
    group = mesh.get_group()
    full = torch.ones(mesh.size(), device=mesh.device_type)
    part = torch.ones(1, device=mesh.device_type)
    # Under the names that torch 2.11 knows too.
    dist.all_gather_into_tensor(full, part, group=group)  # pyright: ignore[reportDeprecated]
    dist.reduce_scatter_tensor(part, full, group=group)  # pyright: ignore[reportDeprecated]
    dist.all_reduce(part, group=group)
    if sequence is not None:
        row = torch.ones(dist.get_world_size(sequence), device=mesh.device_type)
        dist.all_to_all_single(torch.empty_like(row), row, group=sequence)


def total(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum a tensor over the mesh, in place; each rank had its share."""
    if mesh.size() > 1:
        dist.all_reduce(tensor, group=mesh.get_group())
    return tensor


def every_ranks(values: Sequence[float], dtype: torch.dtype, mesh: DeviceMesh) -> list[list[Any]]:
    """Every rank's values, on the host, in the order of the ranks; their counts may differ."""
    if mesh.size() == 1:
        return [list(values)]
    own = torch.tensor(values, dtype=dtype)
    own_count = torch.tensor([len(own)], device=mesh.device_type)
    counts = gather_rows(own_count, mesh.get_group()).tolist()
    # A gather takes tensors of one shape: all are padded to the longest, and cut afterwards.
    rows = F.pad(own, (0, max(counts) - len(own)))[None].to(mesh.device_type)
    return [
        row[:count]
        for row, count in zip(gather_rows(rows, mesh.get_group()).tolist(), counts, strict=True)
    ]


def leave() -> NoReturn:
    """Wait for the others, then leave the group, and the process with status 0.

    Tearing a group down while a peer still talks kills the peer. And gloo's threads may still let
    go of a tensor: one that does so while the interpreter shuts down aborts the process, after all
    its work is done. Hence ``os._exit``.
    """
    if dist.get_world_size() > 1:
        dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

"""The process group of a trial: joined, warmed up and left in one place."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from highwater.spec.layout import Layout


def join(device: torch.device) -> None:
    """Join the group that torchrun's environment describes: NCCL on GPUs, gloo on the CPU."""
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")


def shard_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """The one-dimensional mesh over which parameters, gradients and optimizer states are sharded."""
    assert layout.replicate_degree == 1, "copies of the shards are not built yet"
    return init_device_mesh(device.type, (layout.gpus,), mesh_dim_names=("shard",))


def warm_up(mesh: DeviceMesh) -> None:
    """Run each collective of a step once, small, so that its buffers exist before memory is measured."""
    if mesh.size() == 1:
        return
    group = mesh.get_group()
    full = torch.ones(mesh.size(), device=mesh.device_type)
    part = torch.ones(1, device=mesh.device_type)
    # The names that torch 2.11 knows too.
    dist.all_gather_into_tensor(full, part, group=group)  # pyright: ignore[reportDeprecated]
    dist.reduce_scatter_tensor(part, full, group=group)  # pyright: ignore[reportDeprecated]
    dist.all_reduce(part, group=group)


def leave() -> None:
    """Wait for the others, then leave: tearing a group down while a peer still talks kills the peer."""
    dist.barrier()
    dist.destroy_process_group()

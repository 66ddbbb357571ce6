"""Rank contexts: a rank's device, its attention kernel, the groups it is in, and what joining them
took of the device.
"""

import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from highwater.engine.attention.dense import Kernel, select_kernel
from highwater.engine.attention.window_proof import computes_windows
from highwater.engine.data.batches import Batch, share_of
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.parallel.mesh import SequenceGroups
from highwater.engine.training.memory_log import outside_allocator_bytes
from highwater.model.model import load_model
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
    """Find out whether flash attention's window is one here, and leave no block of the allocator
    behind; what takes its place where it is not is said in the trial's log.
    """
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

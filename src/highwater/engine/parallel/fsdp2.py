"""FSDP2 over a finished model: float32 shards, one layer at a time in the compute dtype, float32
reduction.

With offload the shards, their gradients and so the optimizer's states are in host memory. A layer's
shard is copied to the GPU when the layer is gathered, and its reduced gradient is copied back at
once: between two layers the GPU holds neither. ``offload.py`` adds up the gradients on the
host.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from highwater.engine.parallel.offload import add_up_on_host


def shard(
    model: nn.Module,
    layers: Sequence[nn.Module],
    *,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    offload: bool = False,
    prepare: Callable[[nn.Module], None] = lambda _: None,
) -> None:
    """Shard every layer by itself and the rest as one group, in place, each after ``prepare``,
    which may replace its parameters.

    Parameters may still be on meta. Gradients are summed over the ranks, not averaged: each rank's
    loss is already its share of the whole batch's. Frozen parameters may be narrower than trained
    ones, or bytes: they are gathered in their own dtype. If a rank has all of a frozen parameter on
    its device, as bytes or in the compute dtype, it gathers nothing.

    Shards in bfloat16 have gradients in bfloat16: the ranks' gradients are summed in float32, and
    the sum is rounded to the nearest, once. A single rank has no sum.
    """
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    master = dtypes.pop() if dtypes else next(model.parameters()).dtype
    narrow = compute_dtype if compute_dtype != master else None
    # Positions stay integers and statistics stay wide: only parameters decide the compute dtype.
    # A sum over ranks is in float32 or wider; a single rank has no sum, and needs no copy for it.
    reduced = torch.promote_types(master, torch.float32) if mesh.size() > 1 else master
    policy = MixedPrecisionPolicy(
        param_dtype=narrow, reduce_dtype=reduced, cast_forward_inputs=False
    )
    # Pinned, so that copies overlap with the computation; without a GPU pinning is useless.
    placement = (
        CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    )
    has_all = mesh.size(mesh.ndim - 1) == 1 and not offload
    how: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": placement}
    # Layers first: the root's group then holds the rest: embedding, head and last norm.
    for unit in (*layers, model):
        prepare(unit)
        frozen = (p for p in unit.parameters() if has_all and not p.requires_grad)
        left = {p for p in frozen if p.dtype in (compute_dtype, torch.uint8)}
        fully_shard(unit, ignored_params=left, **how)
    if offload:
        add_up_on_host(model, layers)
    # Gradients are summed; the average over one rank is its sum, without a pass to divide by 1.
    for module in model.modules() if mesh.size() > 1 else ():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # PREMUL_SUM, FSDP2's way to divide, exists in NCCL alone; plain sums exist everywhere.
            module.set_force_sum_reduction_for_comms(True)


def release(model: nn.Module) -> None:
    """Free parameters that a forward pass gathered, if no backward pass will free them.

    These are the root group's: embedding and head.
    """
    if isinstance(model, FSDPModule):
        model.reshard()


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: a local view for FSDP2, FSDP1's tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_rows(parameter: Tensor) -> tuple[int, int]:
    """First row of the whole parameter that this rank's shard holds, and the row after its last.

    FSDP2 cuts dimension 0 into chunks of equal size; the last ones may be shorter or empty.
    """
    total = parameter.shape[0]
    if not isinstance(parameter, DTensor):
        return 0, total
    mesh = parameter.device_mesh
    shards = mesh.ndim - 1  # where there are copies, they are the first dimension
    chunk = -(-total // mesh.size(shards))
    start = min(mesh.get_local_rank(shards) * chunk, total)
    return start, min(start + chunk, total)

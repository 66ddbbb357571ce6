"""FSDP1 over a model on meta: each layer, then the rest, given storage, flattened into one vector and cut over the ranks.

What it holds. While it is built, a rank's device holds the shards of the units so far and one unit whole, for a moment twice
(its tensors and the vector made of them): never the model. Every rank fills the whole unit, from the files or with the same
random numbers, and keeps its part. In a step it holds what FSDP2 does: float32 shards, one narrow unit at a time and the next.
A single rank has nothing to cut: FSDP1 then keeps the whole model, as FSDP2 does, and makes narrow copies of one unit at a time.

Offload, ``CPUOffload(offload_params=True)``. Parameters and optimizer states are in host memory, and the update runs there.
Gradients are not off the GPU as soon as FSDP2's: each unit's reduced shard is copied to the host at once but freed only when
the backward pass ends, so that 4 of the 16 bytes a parameter are on the GPUs then. And FSDP1 overwrites the host's copy in every
backward pass, so that micro-batches would not add up: ``add_up`` adds them, into 4 more bytes of host memory a parameter.
(The flags ``param_offload`` and ``optimizer_offload`` that verl has for FSDP1 are another thing: they move everything to the
host between phases and bring it back before the update, and gain nothing at the peak.)
On the CPU there is nowhere to offload to: FSDP1 runs as without, but for ``add_up``.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision

PREFIX = "_fsdp_wrapped_module."
"""What a wrapper adds to parameter names."""

Materialise = Callable[[nn.Module], None]
"""Gives a module storage and values on the device: whatever of it is still on meta."""


def shard_flat(
    model: nn.Module,
    layers: nn.ModuleList,
    *,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    materialise: Materialise,
    offload: bool = False,
    use_orig_params: bool = True,
) -> nn.Module:
    """The model, wrapped: ``materialise`` fills one unit at a time, which is then cut. Attributes are found through the wrapper.

    Gradients are summed over the ranks, not averaged: each rank's loss is already its share of the whole batch's.
    ``use_orig_params``: the model keeps its own parameters, views of the vectors; else the vectors are its parameters.
    """
    master = next(model.parameters()).dtype
    on_gpu = mesh.device_type == "cuda"
    options: dict[str, Any] = {
        "device_mesh": mesh,
        "device_id": torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"),
        "cpu_offload": CPUOffload(offload_params=offload and on_gpu),
        "mixed_precision": MixedPrecision(
            param_dtype=compute_dtype if compute_dtype != master else None,
            reduce_dtype=master,
            # Positions stay integers and statistics stay wide: only parameters decide the compute dtype.
            cast_forward_inputs=False,
            cast_root_forward_inputs=False,
        ),
        "use_orig_params": use_orig_params,
        "sync_module_states": False,
    }
    for index, layer in enumerate(layers):
        materialise(layer)
        layers[index] = FullyShardedDataParallel(layer, **options)
    materialise(model)
    wrapped = (OffloadedFsdp1 if offload else FullyShardedDataParallel)(model, **options)
    # In the place of its own reduction, which divides by the ranks.
    wrapped.register_comm_hook(mesh.get_group(), _sum_to_shard if mesh.size() > 1 else _keep)
    return wrapped


class OffloadedFsdp1(FullyShardedDataParallel):
    """A root whose gradients add up over micro-batches, though each backward pass overwrites the last one's."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self._totals: dict[nn.Parameter, Tensor] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Take away what the parameters have as gradients, so that nothing is added to it, or to its copy, behind our back."""
        if torch.is_grad_enabled():
            for parameter in self.parameters():
                if parameter.grad is not None:
                    self._totals[parameter], parameter.grad = parameter.grad, None
        return super().forward(*args, **kwargs)

    def add_up(self) -> None:
        """Leave the sum over all backward passes since gradients were last zeroed as every parameter's gradient."""
        for parameter in self.parameters():
            total, fresh = self._totals.pop(parameter, None), parameter.grad
            if fresh is not None:
                # Never FSDP1's own buffer, which the next backward pass writes to.
                total = fresh.clone() if total is None else total.add_(fresh)
            parameter.grad = total


def _sum_to_shard(group: dist.ProcessGroup, whole: Tensor, own: Tensor) -> None:
    """The sum over the ranks of one unit's gradient, of which each rank gets its part."""
    # The name that torch 2.11 knows too.
    dist.reduce_scatter_tensor(own, whole, group=group)  # pyright: ignore[reportDeprecated]


def _keep(_: dist.ProcessGroup, __: Tensor) -> None:
    """The sum over a single rank, without the communicator that asking the group for it would make."""

"""FSDP1 over a model on meta, layer by layer: fill a unit, flatten it, and shard it over the ranks.

While the model is built, a rank's device holds the shards of the units so far and one whole unit,
briefly twice, and never the model. In a step it holds as much as with FSDP2: float32 shards, the
current unit and the next in the compute dtype; a single rank keeps the whole model.

With ``CPUOffload(offload_params=True)`` parameters and optimizer states are in host memory, and the
update runs there. Gradients leave the GPU later than FSDP2's: each unit's reduced shard is copied
to the host at once but freed only when the backward pass ends, so that 4 of the 16 bytes a
parameter are on the GPUs then. FSDP1 also overwrites the host's copy in every backward pass, so
that micro-batches would not add up: ``add_up`` adds them, into 4 more bytes of host memory a
parameter. verl's ``param_offload`` and ``optimizer_offload`` are different, and gain nothing at the
peak (docs/decisions/005).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision

PREFIX = "_fsdp_wrapped_module."
"""Prefix that FSDP1's wrapper puts before parameter names."""

Materialise = Callable[[nn.Module], None]
"""Fills a module's tensors that are still on meta with storage and values."""


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
    """Wrap the model unit by unit: ``materialise`` fills a unit, FSDP1 shards it, then the next.

    The wrapper has all attributes of the model. Gradients are summed over the ranks, not averaged:
    a rank's loss is its share of the batch's. With ``use_orig_params`` the model keeps its own
    parameters, as views of FSDP1's flat vectors; otherwise the vectors are its parameters.
    """
    on_gpu = mesh.device_type == "cuda"
    own_gpu = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None
    master = next(model.parameters()).dtype
    precision = MixedPrecision(
        param_dtype=compute_dtype if compute_dtype != master else None,
        reduce_dtype=master,
        # Positions stay integers and statistics stay wide: the parameters alone decide the dtype
        # of the computation.
        cast_forward_inputs=False,
        cast_root_forward_inputs=False,
    )
    options: dict[str, Any] = {
        "device_mesh": mesh,
        "device_id": own_gpu or torch.device("cpu"),
        "cpu_offload": CPUOffload(offload_params=offload and on_gpu),
        "mixed_precision": precision,
        "use_orig_params": use_orig_params,
        "sync_module_states": False,
    }
    for index, layer in enumerate(layers):
        materialise(layer)
        layers[index] = FullyShardedDataParallel(layer, **options)
    materialise(model)
    wrapped = (OffloadedFsdp1 if offload else FullyShardedDataParallel)(model, **options)
    # Replaces FSDP1's own reduction, which divides by the number of ranks.
    wrapped.register_comm_hook(mesh.get_group(), _sum_to_shard if mesh.size() > 1 else _keep)
    return wrapped


class OffloadedFsdp1(FullyShardedDataParallel):
    """Wrapped root module whose gradients add up over micro-batches.

    With offload FSDP1 itself would overwrite the last backward pass's gradients.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self._totals: dict[nn.Parameter, Tensor] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Move the parameters' gradients to ``_totals``, then run the forward pass.

        Otherwise FSDP1 would silently add to these gradients, or to its copy of them.
        """
        if torch.is_grad_enabled():
            for parameter in self.parameters():
                if parameter.grad is not None:
                    self._totals[parameter], parameter.grad = parameter.grad, None
        return super().forward(*args, **kwargs)

    def add_up(self) -> None:
        """Set each parameter's gradient to the sum of its gradients since they were zeroed."""
        for parameter in self.parameters():
            total, fresh = self._totals.pop(parameter, None), parameter.grad
            if fresh is not None:
                # A copy, since the next backward pass writes to FSDP1's own buffer.
                total = fresh.clone() if total is None else total.add_(fresh)
            parameter.grad = total


def release_gradients(model: nn.Module) -> None:
    """Free the flat gradient vectors after the parameters' gradients, views of them, are gone.

    FSDP1 would keep them until the model's next forward pass, even when the cache is emptied and
    while another model runs. Their handle is private: read in torch 2.11 and 2.13.
    """
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        loose: Any = unit
        if loose._handle is not None:
            loose._handle.flat_param.grad = None


def _sum_to_shard(group: dist.ProcessGroup, whole: Tensor, own: Tensor) -> None:
    """Sum a unit's gradient over the ranks; each rank receives its shard of the sum in ``own``."""
    # A deprecated name, because torch 2.11 has no other.
    dist.reduce_scatter_tensor(own, whole, group=group)  # pyright: ignore[reportDeprecated]


def _keep(_: dist.ProcessGroup, __: Tensor) -> None:
    """Leave a single rank's gradient unchanged; a sum would create a useless communicator."""

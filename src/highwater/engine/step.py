"""One optimizer step, in reading order: forward and backward of every micro-batch, clip, update."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from highwater.engine.data import Batch
from highwater.engine.loss import TokenStatistics
from highwater.engine.objective import sft
from highwater.parallel.mesh import total

CLIP_NORM = 1.0
LEARNING_RATE = 1e-5

Enter = Callable[[str], None]
"""Told the name of each phase as it begins."""


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW on the float32 shards, its two moments and every gradient already allocated, as zeros.

    What lives as long as the training is allocated before the first activation. Left to the first step, gradients and moments
    would be cut out of the blocks that activations just left, and the caching allocator could never join those again: the
    largest block, the logits, would be needed twice. And what does not fit shows in the first micro-batch, not in the second step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    (group,) = optimizer.param_groups
    group["lr"] = 0.0
    optimizer.step()  # zero gradients at rate zero: allocates the moments, changes nothing
    group["lr"] = LEARNING_RATE
    for state in optimizer.state.values():
        state["step"].zero_()
    return optimizer


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Batch],
    *,
    mesh: DeviceMesh,
    enter: Enter = lambda _: None,
) -> tuple[Tensor, Tensor]:
    """One step on this rank's micro-batches; returns the loss over all ranks' trained tokens and the gradient's norm.

    Gradients are reduced to their shards after every micro-batch: unsharded ones never accumulate.
    """
    loss = backward_of(micro_batches, model, mesh=mesh, enter=enter)
    enter("optimizer")
    norm = clip(model)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return total(loss, mesh), norm


def backward_of(micro_batches: Sequence[Batch], model: nn.Module, *, mesh: DeviceMesh, enter: Enter = lambda _: None) -> Tensor:
    """Add the gradients of all micro-batches to the shards; returns this rank's share of the loss."""
    device = torch.device(mesh.device_type)
    trained_tokens = count_trained(micro_batches, mesh=mesh)
    loss = torch.zeros((), device=device)
    for batch in micro_batches:
        on_device = batch.to(device)
        enter("forward")
        statistics: TokenStatistics = model(
            on_device.input_ids_T,
            on_device.position_ids_T,
            on_device.trained_positions_N,
            on_device.labels_N,
            on_device.document_lengths,
        )
        share = sft(statistics.logprobs_N, trained_tokens=trained_tokens)
        enter("backward")
        share.backward()
        loss = loss + share.detach()
    return loss


def clip(model: nn.Module) -> Tensor:
    """Clip the whole gradient to ``CLIP_NORM``, in place; returns its norm before."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def count_trained(micro_batches: Sequence[Batch], *, mesh: DeviceMesh) -> int:
    """Trained tokens of this step over all ranks."""
    own = sum(len(batch.labels_N) for batch in micro_batches)
    return own if mesh.size() == 1 else int(total(torch.tensor(own, device=mesh.device_type), mesh))

"""One optimizer step, in reading order: what it must know first, forward and backward of every micro-batch, clip, update."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from highwater.engine import objective
from highwater.engine.data import Batch
from highwater.engine.experience import Experience, group_experience, token_experience
from highwater.engine.model import Decoder, MicroBatchStatistics
from highwater.errors import UsageError
from highwater.parallel.collectives import sum_over
from highwater.parallel.fsdp import local_shard
from highwater.parallel.mesh import total
from highwater.parallel.offload import adding_up
from highwater.spec.settings import Objective

CLIP_NORM = 1.0
CLIP_EPSILON = 1e-6
"""Added to the norm that gradients are divided by, as in PyTorch."""
LEARNING_RATE = 1e-5

Enter = Callable[[str], None]
"""Told the name of each phase as it begins."""


def _nobody(phase: str) -> None:
    """Listen to no phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """What a step trains, what judges it, and where."""

    policy: Decoder
    """What is trained; a ScalarModel for the objective ``rw``."""
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh
    """All ranks, over which every model is sharded."""
    sequence: dist.ProcessGroup | None = None
    """The ranks that share this rank's sequences."""
    objective: Objective = "sft"
    entropy: bool = False
    """Whether the policy's entropy is part of the loss."""
    critic: Decoder | None = None
    critic_optimizer: torch.optim.Optimizer | None = None
    reference: Decoder | None = None
    """``grpo``: frozen, what the policy is held to."""

    @property
    def trained(self) -> Sequence[tuple[Decoder, torch.optim.Optimizer]]:
        """Every model that a step updates, the policy first."""
        policy = (self.policy, self.optimizer)
        if self.critic is None:
            return (policy,)
        assert self.critic_optimizer is not None, "a critic comes with its optimizer"
        return (policy, (self.critic, self.critic_optimizer))

    @property
    def device(self) -> torch.device:
        """Where activations live."""
        return torch.device(self.mesh.device_type)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW on the float32 shards, its two moments and every gradient already allocated, as zeros.

    It runs where the shards are: on the host when they are offloaded.

    What lives as long as the training is allocated before the first activation. Left to the first step, gradients and moments
    would be cut out of the blocks that activations just left, and the caching allocator could never join those again: the
    largest block, the logits, would be needed twice. And what does not fit shows in the first micro-batch, not in the second step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    for parameter in model.parameters():
        if parameter.numel():  # FSDP1 leaves an empty tensor of what other ranks hold
            parameter.grad = torch.zeros_like(parameter)
    (group,) = optimizer.param_groups
    group["lr"] = 0.0
    optimizer.step()  # zero gradients at rate zero: allocates the moments, changes nothing
    group["lr"] = LEARNING_RATE
    for state in optimizer.state.values():
        state["step"].zero_()
    return optimizer


def train_step(trainer: Trainer, micro_batches: Sequence[Batch], *, enter: Enter = _nobody) -> tuple[Tensor, Tensor]:
    """One step on this rank's micro-batches; returns the policy's loss over the whole batch and its gradient's norm.

    Gradients are reduced to their shards after every micro-batch: unsharded ones never accumulate.
    """
    loss = backward_of(trainer, micro_batches, enter=enter)
    enter("optimizer")
    norm, *_ = [_update(model, optimizer, trainer.mesh) for model, optimizer in trainer.trained]
    return total(loss, trainer.mesh), norm


def backward_of(trainer: Trainer, micro_batches: Sequence[Batch], *, enter: Enter = _nobody) -> Tensor:
    """Add the gradients of all micro-batches to the shards; returns this rank's share of the policy's loss."""
    enter("experience")
    experiences = _experiences(trainer, micro_batches)
    counted = count(trainer, micro_batches)
    if trainer.critic is not None:
        for batch, experience in zip(micro_batches, experiences, strict=True):
            enter("forward")
            _backward(_critic_loss(trainer.critic, batch.to(trainer.device), experience, counted), trainer.critic, enter)
    loss = torch.zeros((), device=trainer.device)
    for batch, experience in zip(micro_batches, experiences, strict=True):
        enter("forward")
        share = _policy_loss(trainer, batch.to(trainer.device), experience, counted, micro_batches=len(micro_batches))
        loss = loss + _backward(share, trainer.policy, enter)
    return loss


def clip(model: nn.Module, *, mesh: DeviceMesh) -> Tensor:
    """Clip the whole gradient to ``CLIP_NORM``, in place; returns its norm before, on the mesh's device.

    Shards are measured where they are, on the host when offloaded, and one number is summed over the ranks: no collective runs
    on the host, for which NCCL's group would need gloo beside it. In the shards' dtype, as FSDP1's own ``clip_grad_norm_`` is not.
    """
    gradients = [local_shard(p.grad) for p in model.parameters() if p.grad is not None]
    own = nn.utils.get_total_norm(gradients).to(mesh.device_type)
    # In float64 a norm's square cannot overflow.
    norm = total(own.double().square(), mesh).sqrt().to(own.dtype)
    factor = (CLIP_NORM / (norm + CLIP_EPSILON)).clamp(max=1.0)
    if all(gradient.device.type == "cpu" for gradient in gradients) and float(factor) == 1:
        return norm  # a pass over all of them in host memory for nothing; a GPU would be waited for to know
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device))
    return norm


def count(trainer: Trainer, micro_batches: Sequence[Batch]) -> int:
    """What the loss of this step is a mean over, on all ranks: trained tokens, or pairs of documents.

    Raises UsageError where there is none: such a step would prove any length, and train nothing.
    """
    if trainer.objective == "rw":
        shares = 1 if trainer.sequence is None else dist.get_world_size(trainer.sequence)
        own = sum(len(batch.rewards) // 2 for batch in micro_batches)
    else:
        shares, own = 1, sum(len(batch.labels_N) for batch in micro_batches)
    mesh = trainer.mesh
    counted = own if mesh.size() == 1 else int(total(torch.tensor(own, device=mesh.device_type), mesh)) // shares
    if not counted:
        raise UsageError(
            "a step of this data trains no token, on any rank: its loss would be 0 whatever the model says",
            hint="label tokens after a document's first one with their ids: nothing precedes the first, and -100 is not trained on",
        )
    return counted


def _experiences(trainer: Trainer, micro_batches: Sequence[Batch]) -> Sequence[Experience | None]:
    """What the objective has to know beforehand."""
    match trainer.objective:
        case "grpo":
            assert trainer.reference is not None
            return group_experience(trainer.reference, micro_batches, device=trainer.device)
        case "ppo":
            return token_experience(trainer.critic, micro_batches, mesh=trainer.mesh, sequence=trainer.sequence)
        case "sft" | "rw":
            return [None] * len(micro_batches)


def _policy_loss(trainer: Trainer, batch: Batch, experience: Experience | None, counted: int, *, micro_batches: int) -> Tensor:
    """This micro-batch's share, that of the routers included."""
    if trainer.policy.gives_scalars:
        return _reward_loss(trainer.policy, batch, trainer.sequence, pairs=counted)
    statistics: MicroBatchStatistics = trainer.policy(
        batch.input_ids_T,
        batch.position_ids_T,
        batch.trained_positions_N,
        batch.labels_N,
        batch.document_lengths,
        batch.padding_tokens,
        objective.sft_slope(trained_tokens=counted) if trainer.objective == "sft" else None,
    )
    loss = _objective_loss(trainer, statistics, batch, experience, counted)
    if statistics.router_loss is not None:
        loss = loss + statistics.router_loss / (micro_batches * trainer.mesh.size())
    return loss


def _objective_loss(
    trainer: Trainer, statistics: MicroBatchStatistics, batch: Batch, experience: Experience | None, counted: int
) -> Tensor:
    """What the settings' objective makes of the statistics."""
    logprobs_N = statistics.logprobs_N
    if experience is None:
        return objective.sft(logprobs_N, trained_tokens=counted)
    old_N = logprobs_N.detach() if batch.old_logprobs_N is None else batch.old_logprobs_N.to(logprobs_N.dtype)
    loss = objective.clip_loss(logprobs_N, old_N, experience.advantages_N.to(logprobs_N.dtype), trained_tokens=counted)
    if trainer.entropy:
        loss = loss - objective.entropy_bonus(statistics.entropies_N, trained_tokens=counted)
    if experience.reference_logprobs_N is not None:
        loss = loss + objective.k2_penalty(logprobs_N, experience.reference_logprobs_N, trained_tokens=counted)
    return loss


def _reward_loss(model: Decoder, batch: Batch, sequence: dist.ProcessGroup | None, *, pairs: int) -> Tensor:
    """The reward of a document is its last token's number, on whichever rank that is; every rank has an equal share of the loss."""
    numbers_P = model(batch.input_ids_T, batch.position_ids_T, batch.ends_P, batch.document_lengths)
    rewards_D = sum_over(numbers_P.new_zeros(len(batch.rewards)).index_copy(0, batch.ended_P, numbers_P), sequence)
    return objective.pairwise(rewards_D, pairs=pairs) / (1 if sequence is None else dist.get_world_size(sequence))


def _critic_loss(critic: Decoder, batch: Batch, experience: Experience | None, counted: int) -> Tensor:
    assert experience is not None
    assert experience.values_N is not None
    assert experience.returns_N is not None
    values_N = critic(batch.input_ids_T, batch.position_ids_T, batch.trained_positions_N, batch.document_lengths)
    return objective.value_loss(values_N, experience.values_N, experience.returns_N, trained_tokens=counted)


def _backward(share: Tensor, model: nn.Module, enter: Enter) -> Tensor:
    enter("backward")
    with adding_up(model):
        share.backward()
    return share.detach()


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> Tensor:
    norm = clip(model, mesh=mesh)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return norm

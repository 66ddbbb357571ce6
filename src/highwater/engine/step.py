"""One optimizer step, in reading order: what it must know first, forward and backward of every micro-batch, clip, update."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from highwater.engine import objective
from highwater.engine.data import Batch
from highwater.engine.experience import Experience, group_experience, token_experience
from highwater.engine.model import Decoder, MicroBatchStatistics, name_in_files
from highwater.errors import UsageError
from highwater.parallel.collectives import sum_over
from highwater.parallel.fsdp import local_shard
from highwater.parallel.mesh import total
from highwater.parallel.offload import adding_up
from highwater.spec.hyperparameters import Hyperparameters
from highwater.spec.settings import Objective

CLIP_EPSILON = 1e-6
"""Added to the norm that gradients are divided by, as in PyTorch."""
_NEVER_DECAYS = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""In the names of norms and biases. Source: ``Trainer.get_decay_parameter_names``, transformers 5.23."""

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
    hyperparameters: Hyperparameters = field(default_factory=Hyperparameters)

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


def make_optimizer(model: nn.Module, hyperparameters: Hyperparameters) -> torch.optim.Optimizer:
    """Fused AdamW on the float32 shards, its two moments and every gradient already allocated, as zeros.

    It runs where the shards are: on the host when they are offloaded. A frozen parameter is none of its own: without a gradient,
    without states, without decay.

    What lives as long as the training is allocated before the first activation. Left to the first step, gradients and moments
    would be cut out of the blocks that activations just left, and the caching allocator could never join those again: the
    largest block, the logits, would be needed twice. And what does not fit shows in the first micro-batch, not in the second step.
    """
    optimizer = torch.optim.AdamW(
        _groups(model, weight_decay=hyperparameters.weight_decay),
        lr=0.0,
        betas=(hyperparameters.adam_beta1, hyperparameters.adam_beta2),
        eps=hyperparameters.adam_epsilon,
        fused=True,
    )
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.numel():  # FSDP1 leaves an empty tensor of what other ranks hold
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # zero gradients at rate zero: allocates the moments, changes nothing
    for group in optimizer.param_groups:
        group["lr"] = hyperparameters.learning_rate
    for state in optimizer.state.values():
        state["step"].zero_()
    return optimizer


def _groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters: those that decay, then norms and biases, as transformers' Trainer tells them apart."""
    norms = {parameter for module in model.modules() if isinstance(module, nn.LayerNorm) for parameter in module.parameters()}
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            does_not = parameter in norms or _NEVER_DECAYS.search(name_in_files(name).lower())
            (others if does_not else decaying).append(parameter)
    groups = ({"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def train_step(trainer: Trainer, micro_batches: Sequence[Batch], *, enter: Enter = _nobody) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One step on this rank's micro-batches; returns the policy's loss over the whole batch, and the gradients' norms.

    The first norm is the policy's, the second the critic's where there is one.

    Gradients are reduced to their shards after every micro-batch: unsharded ones never accumulate.
    """
    loss = backward_of(trainer, micro_batches, enter=enter)
    enter("optimizer")
    max_norm = trainer.hyperparameters.max_grad_norm
    norms = tuple(_update(model, optimizer, trainer.mesh, max_norm=max_norm) for model, optimizer in trainer.trained)
    return total(loss, trainer.mesh), norms


def backward_of(trainer: Trainer, micro_batches: Sequence[Batch], *, enter: Enter = _nobody) -> Tensor:
    """Add the gradients of all micro-batches to the shards; returns this rank's share of the policy's loss."""
    enter("experience")
    experiences = _experiences(trainer, micro_batches)
    counted = count(trainer, micro_batches)
    if trainer.critic is not None:
        for batch, experience in zip(micro_batches, experiences, strict=True):
            enter("forward")
            share = _critic_loss(trainer.critic, batch.to(trainer.device), experience, counted.trained, trainer.hyperparameters)
            _backward(share, trainer.critic, enter)
    loss = torch.zeros((), device=trainer.device)
    for batch, experience in zip(micro_batches, experiences, strict=True):
        enter("forward")
        share = _policy_loss(trainer, batch.to(trainer.device), experience, counted)
        loss = loss + _backward(share, trainer.policy, enter)
    return loss


def clip(model: nn.Module, *, mesh: DeviceMesh, max_norm: float) -> Tensor:
    """Clip the whole gradient to ``max_norm`` (0: leave it), in place; returns its norm before, on the mesh's device.

    Shards are measured where they are, on the host when offloaded, and one number is summed over the ranks: no collective runs
    on the host, for which NCCL's group would need gloo beside it. In the shards' dtype, as FSDP1's own ``clip_grad_norm_`` is not.
    """
    gradients = [local_shard(p.grad) for p in model.parameters() if p.grad is not None]
    own = nn.utils.get_total_norm(gradients).to(mesh.device_type)
    # In float64 a norm's square cannot overflow.
    norm = total(own.double().square(), mesh).sqrt().to(own.dtype)
    if not max_norm:
        return norm
    factor = (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)
    if all(gradient.device.type == "cpu" for gradient in gradients) and float(factor) == 1:
        return norm  # a pass over all of them in host memory for nothing; a GPU would be waited for to know
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device))
    return norm


class Counts(NamedTuple):
    """What means of this step are taken over, on all ranks."""

    trained: int
    """Trained tokens, or pairs of documents: of the objective."""
    tokens: int
    """All tokens, padding apart: of the routers' auxiliary loss."""


def count(trainer: Trainer, micro_batches: Sequence[Batch]) -> Counts:
    """Count over all micro-batches of all ranks.

    Raises UsageError where nothing is trained: such a step would prove any length.
    """
    tokens = sum(len(batch.input_ids_T) - batch.padding_tokens for batch in micro_batches)
    if trainer.objective == "rw":
        shares = 1 if trainer.sequence is None else dist.get_world_size(trainer.sequence)
        own = sum(len(batch.rewards) // 2 for batch in micro_batches)
    else:
        shares, own = 1, sum(len(batch.labels_N) for batch in micro_batches)
    mesh = trainer.mesh
    if mesh.size() > 1:
        own, tokens = map(int, total(torch.tensor([own, tokens], device=mesh.device_type), mesh))
    if not own:
        raise UsageError(
            "a step of this data trains no token, on any rank: its loss would be 0 whatever the model says",
            hint="label tokens after a document's first one with their ids: nothing precedes the first, and -100 is not trained on",
        )
    return Counts(trained=own // shares, tokens=tokens)


def _experiences(trainer: Trainer, micro_batches: Sequence[Batch]) -> Sequence[Experience | None]:
    """What the objective has to know beforehand."""
    match trainer.objective:
        case "grpo":
            assert trainer.reference is not None
            return group_experience(trainer.reference, micro_batches, mesh=trainer.mesh, sequence=trainer.sequence)
        case "ppo":
            return token_experience(
                trainer.critic,
                micro_batches,
                mesh=trainer.mesh,
                sequence=trainer.sequence,
                hyperparameters=trainer.hyperparameters,
            )
        case "sft" | "rw":
            return [None] * len(micro_batches)


def _policy_loss(trainer: Trainer, batch: Batch, experience: Experience | None, counted: Counts) -> Tensor:
    """This micro-batch's share, that of the routers included."""
    if trainer.policy.gives_scalars:
        return _reward_loss(trainer.policy, batch, trainer.sequence, pairs=counted.trained)
    statistics: MicroBatchStatistics = trainer.policy(
        batch.input_ids_T,
        batch.position_ids_T,
        batch.trained_positions_N,
        batch.labels_N,
        batch.document_lengths,
        batch.padding_tokens,
        objective.sft_slope(trained_tokens=counted.trained) if trainer.objective == "sft" else None,
    )
    loss = _objective_loss(trainer, statistics, batch, experience, counted.trained)
    if statistics.router_loss is not None:
        loss = loss + statistics.router_loss / counted.tokens
    return loss


def _objective_loss(
    trainer: Trainer, statistics: MicroBatchStatistics, batch: Batch, experience: Experience | None, counted: int
) -> Tensor:
    """What the settings' objective makes of the statistics."""
    logprobs_N, numbers = statistics.logprobs_N, trainer.hyperparameters
    if experience is None:
        return objective.sft(logprobs_N, trained_tokens=counted)
    loss = objective.clip_loss(
        logprobs_N,
        _old_logprobs(batch, logprobs_N.detach()),
        experience.advantages_N.to(logprobs_N.dtype),
        low=numbers.clip_ratio_low,
        high=numbers.clip_ratio_high,
        dual=numbers.dual_clip,
        trained_tokens=counted,
    )
    if trainer.entropy:
        coefficient = numbers.entropy_coefficient
        loss = loss - objective.entropy_bonus(statistics.entropies_N, coefficient=coefficient, trained_tokens=counted)
    if experience.reference_logprobs_N is not None:
        loss = loss + objective.divergence(
            logprobs_N,
            experience.reference_logprobs_N,
            estimator=numbers.kl_estimator,
            coefficient=numbers.kl_coefficient,
            trained_tokens=counted,
        )
    return loss


def _old_logprobs(batch: Batch, before_N: Tensor) -> Tensor:
    """Of the policy that sampled the tokens; of a document of which nobody knows it, of the policy before the step."""
    if batch.old_logprobs_N is None:
        return before_N
    old_N = batch.old_logprobs_N.to(before_N.dtype)
    return torch.where(old_N.isnan(), before_N, old_N)


def _reward_loss(model: Decoder, batch: Batch, sequence: dist.ProcessGroup | None, *, pairs: int) -> Tensor:
    """The reward of a document is its last token's number, on whichever rank that is; every rank has an equal share of the loss."""
    numbers_P = model(batch.input_ids_T, batch.position_ids_T, batch.ends_P, batch.document_lengths)
    rewards_D = sum_over(numbers_P.new_zeros(len(batch.rewards)).index_copy(0, batch.ended_P, numbers_P), sequence)
    return objective.pairwise(rewards_D, pairs=pairs) / (1 if sequence is None else dist.get_world_size(sequence))


def _critic_loss(critic: Decoder, batch: Batch, experience: Experience | None, counted: int, numbers: Hyperparameters) -> Tensor:
    assert experience is not None
    assert experience.values_N is not None
    assert experience.returns_N is not None
    values_N = critic(batch.input_ids_T, batch.position_ids_T, batch.trained_positions_N, batch.document_lengths)
    return objective.value_loss(
        values_N,
        experience.values_N,
        experience.returns_N,
        clip=numbers.value_clip,
        coefficient=numbers.value_coefficient,
        trained_tokens=counted,
    )


def _backward(share: Tensor, model: nn.Module, enter: Enter) -> Tensor:
    enter("backward")
    with adding_up(model):
        share.backward()
    return share.detach()


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, *, max_norm: float) -> Tensor:
    norm = clip(model, mesh=mesh, max_norm=max_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return norm

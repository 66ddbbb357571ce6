"""One optimizer step: experience, forward and backward pass of every micro-batch, clip, update."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from highwater.engine.data.batches import Batch
from highwater.engine.models.decoder import Decoder, MicroBatchStatistics
from highwater.engine.parallel.collectives import sum_over
from highwater.engine.parallel.fsdp1 import release_gradients
from highwater.engine.parallel.fsdp2 import local_shard
from highwater.engine.parallel.mesh import copies, sharing, total
from highwater.engine.parallel.offload import adding_up
from highwater.engine.training import objectives
from highwater.engine.training.experience import (
    Experience,
    group_experience,
    reference_experience,
    token_experience,
)
from highwater.engine.training.optimizers import fill_missing_gradients
from highwater.engine.training.step_record import Training
from highwater.errors import UsageError
from highwater.nouns.trial import OnPhase, unheard

CLIP_EPSILON = 1e-6
"""Added to the norm that gradients are divided by, as in PyTorch."""
UseGradients = Callable[[nn.Module, torch.optim.Optimizer], None]
"""Callback for a model and its optimizer, called once its gradients are complete."""


def train_step(
    training: Training, micro_batches: Sequence[Batch], *, enter: OnPhase = unheard
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Train one step on this rank's micro-batches; returns the whole batch's loss, and the norms of
    the gradients before clipping: the policy's, then the critic's if there is one.

    Gradients are reduced to their shards after every micro-batch: unsharded ones never accumulate.
    """
    norms: list[Tensor] = []

    def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        enter("optimizer")
        norms.append(clip_trained(training, model, optimizer))
        optimizer.step()
        clear_gradients(training, model, optimizer)

    loss = backward_of(training, micro_batches, enter=enter, then=update)
    return total(loss, training.mesh), tuple(reversed(norms))


def backward_of(
    training: Training,
    micro_batches: Sequence[Batch],
    *,
    enter: OnPhase = unheard,
    then: UseGradients = lambda _, __: None,
) -> Tensor:
    """Add all micro-batches' gradients to the shards; returns this rank's share of the loss.

    ``then`` is called for each model once its gradients are complete: for the critic before the
    policy's forward pass, so that the gradients of both never exist together. The policy's loss
    uses the critic's values from before the step.
    """
    enter("experience")
    experiences = _experiences(training, micro_batches)
    counted = count(training, micro_batches)
    training.record.begin(micro_batches, most_documents=counted.most_documents)
    if training.critic is not None:
        for batch, experience in zip(micro_batches, experiences, strict=True):
            enter("forward")
            share = _critic_loss(
                training,
                batch.to(training.device),  # unnamed, so that it is freed with its loss
                experience,
                counted.trained,
            )
            _backward(share, training.critic, enter)
        then(*training.trained[1])
    loss = torch.zeros((), device=training.device)
    for batch, experience in zip(micro_batches, experiences, strict=True):
        enter("forward")
        share = _policy_loss(training, batch.to(training.device), experience, counted)
        loss = loss + _backward(share, training.policy, enter)
    then(training.policy, training.optimizer)
    return loss


def clip_trained(training: Training, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """Clip a trained model's gradients by the hyperparameters; returns their norm before."""
    if not training.keeps_gradients:
        fill_missing_gradients(optimizer)
    return clip(model, mesh=training.mesh, max_norm=training.hyperparameters.max_grad_norm)


def clear_gradients(training: Training, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Zero the gradients after an update, or free them if they are not kept."""
    optimizer.zero_grad(set_to_none=not training.keeps_gradients)
    if not training.keeps_gradients:
        release_gradients(model)


def clip(model: nn.Module, *, mesh: DeviceMesh, max_norm: float) -> Tensor:
    """Clip the whole gradient in place to ``max_norm`` (0: no clipping); returns its norm before.

    Shards are measured where they are, on the host if offloaded, and one number is summed over the
    ranks on the mesh's device: a collective on the host would need gloo beside NCCL. Norms are in
    the shards' dtype (unlike FSDP1's ``clip_grad_norm_``), for bfloat16 in float32. Clipping rounds
    a bfloat16 gradient once more.
    """
    gradients = [local_shard(p.grad) for p in model.parameters() if p.grad is not None]
    own = _total_norm(gradients).to(mesh.device_type)
    # The square of a float32 norm may overflow float32, but not float64.
    norm = (total(own.double().square(), mesh) / copies(mesh)).sqrt().to(own.dtype)
    if not max_norm:
        return norm
    factor = (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)
    if all(gradient.device.type == "cpu" for gradient in gradients) and float(factor) == 1:
        # saves a useless pass over host memory; on a GPU reading the factor would wait for it
        return norm
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device))
    return norm


def _total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Norm of all gradients; for bfloat16 ones computed in float32."""
    if not any(gradient.dtype is torch.bfloat16 for gradient in gradients):
        return nn.utils.get_total_norm(gradients)
    norms = [torch.linalg.vector_norm(each, dtype=torch.float32) for each in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))


class Counts(NamedTuple):
    """Counts over all ranks, the denominators of this step's means."""

    trained: int
    """Trained tokens, or pairs of documents if the objective takes pairs."""
    tokens: int
    """All tokens except padding, for the routers' auxiliary loss."""
    most_documents: int
    """Largest number of documents of any rank."""


def count(training: Training, micro_batches: Sequence[Batch]) -> Counts:
    """Count tokens and documents over all micro-batches of all ranks.

    Raises UsageError if nothing is trained: such a step would prove any length.
    """
    mesh, traits = training.mesh, training.traits
    tokens = sum(len(batch.input_ids_T) - batch.padding_tokens for batch in micro_batches)
    trained = sum(len(batch.labels_N) for batch in micro_batches)
    of_ranks = [sum(len(batch.rewards) for batch in micro_batches)]
    if mesh.size() > 1:
        of_ranks = [of_ranks[0] if rank == mesh.get_rank() else 0 for rank in range(mesh.size())]
        own = torch.tensor([tokens, trained, *of_ranks], device=mesh.device_type)
        tokens, trained, *of_ranks = total(own, mesh).tolist()
    documents = sum(of_ranks)
    if not (documents if traits.gives_scalars else trained):
        raise UsageError(
            "a step of this data trains no token, on any rank: its loss would be the same whatever "
            "the model says",
            hint="label tokens after a document's first one with their ids: nothing precedes the "
            "first, and -100 is not trained on",
        )
    # Ranks that share sequences have a part of their tokens, and all of their documents.
    pairs = documents // (2 * sharing(training.sequence))
    return Counts(
        trained=pairs if traits.pairs else trained, tokens=tokens, most_documents=max(of_ranks)
    )


def _experiences(training: Training, micro_batches: Sequence[Batch]) -> Sequence[Experience | None]:
    """Return the experience of each micro-batch that the objective needs beforehand."""
    match training.traits.advantages:
        case "groups":
            return group_experience(training, micro_batches)
        case "tokens":
            return token_experience(training, micro_batches)
        case "none" if training.reference is not None:
            return reference_experience(training, micro_batches)
        case "none":
            return [None] * len(micro_batches)


def _policy_loss(
    training: Training, batch: Batch, experience: Experience | None, counted: Counts
) -> Tensor:
    """Return this micro-batch's share of the policy's loss; objectives differ only here."""
    match training.objective:
        case "sft":
            gradient = objectives.sft_logprob_gradient(trained_tokens=counted.trained)
            statistics = _statistics(training.policy, batch, gradient)
            loss = objectives.sft(statistics.logprobs_N, trained_tokens=counted.trained)
        case "grpo" | "ppo":
            assert experience is not None
            statistics = _statistics(training.policy, batch)
            loss = _clipped_loss(training, statistics, batch, experience, counted.trained)
        case "rw":
            return reward_loss(training, batch, pairs=counted.trained)
        case "dpo":
            assert experience is not None
            statistics = _statistics(training.policy, batch)
            logprobs_N = statistics.logprobs_N
            loss = preference_loss(training, logprobs_N, batch, experience, pairs=counted.trained)
    of_tokens = (experience.advantages_N, experience.reference_logprobs_N) if experience else ()
    training.record.keep(statistics.logprobs_N, statistics.entropies_N, *of_tokens)
    if statistics.router_loss is not None:
        loss = loss + statistics.router_loss / counted.tokens
    return loss


def _statistics(
    policy: Decoder, batch: Batch, logprob_gradient: float | None = None
) -> MicroBatchStatistics:
    """Run the policy's forward pass; ``logprob_gradient`` as in ``token_statistics``."""
    return policy(
        batch.input_ids_T,
        batch.position_ids_T,
        batch.trained_positions_N,
        batch.labels_N,
        batch.document_lengths,
        logprob_gradient,
    )


def _clipped_loss(
    training: Training,
    statistics: MicroBatchStatistics,
    batch: Batch,
    experience: Experience,
    counted: int,
) -> Tensor:
    """Return the clipped policy loss, plus entropy and divergence terms if they are set."""
    assert experience.advantages_N is not None
    logprobs_N, numbers = statistics.logprobs_N, training.hyperparameters
    loss = objectives.clip_loss(
        logprobs_N,
        objectives.old_logprobs(batch.old_logprobs_N, logprobs_N.detach()),
        experience.advantages_N.to(logprobs_N.dtype),
        low=numbers.clip_ratio_low,
        high=numbers.clip_ratio_high,
        dual=numbers.dual_clip,
        trained_tokens=counted,
    )
    if training.entropy:  # the mean entropy, to keep the policy from collapsing
        loss = loss - numbers.entropy_coefficient * statistics.entropies_N.sum() / max(1, counted)
    if experience.reference_logprobs_N is not None:
        loss = loss + objectives.divergence(
            logprobs_N,
            experience.reference_logprobs_N,
            estimator=numbers.kl_estimator,
            coefficient=numbers.kl_coefficient,
            trained_tokens=counted,
        )
    return loss


def reward_loss(training: Training, batch: Batch, *, pairs: int) -> Tensor:
    """Return the pairwise reward loss. A document's reward is the model's output at its last token,
    which may be on another rank; each rank of the sequence returns an equal share.
    """
    numbers_P = training.policy(
        batch.input_ids_T, batch.position_ids_T, batch.ends_P, batch.document_lengths
    )
    rewards_D = sum_over(
        numbers_P.new_zeros(len(batch.rewards)).index_copy(0, batch.ended_P, numbers_P),
        training.sequence,
    )
    return objectives.pairwise(rewards_D, pairs=pairs) / sharing(training.sequence)


def preference_loss(
    training: Training, logprobs_N: Tensor, batch: Batch, experience: Experience, *, pairs: int
) -> Tensor:
    """Return this rank's share of DPO's loss; log-ratios are summed over a document's ranks."""
    assert experience.reference_logprobs_N is not None
    log_ratios_D = objectives.document_sums(
        logprobs_N - experience.reference_logprobs_N,
        batch.documents_N,
        documents=len(batch.rewards),
    )
    loss = objectives.preference(
        sum_over(log_ratios_D, training.sequence),
        beta=training.hyperparameters.dpo_beta,
        pairs=pairs,
    )
    return (loss / sharing(training.sequence)).to(logprobs_N.dtype)


def _critic_loss(
    training: Training, batch: Batch, experience: Experience | None, counted: int
) -> Tensor:
    critic, numbers = training.critic, training.hyperparameters
    assert critic is not None
    assert experience is not None
    assert experience.values_N is not None
    assert experience.returns_N is not None
    values_N = critic(
        batch.input_ids_T, batch.position_ids_T, batch.trained_positions_N, batch.document_lengths
    )
    return objectives.value_loss(
        *(values_N, experience.values_N, experience.returns_N),
        clip=numbers.value_clip,
        coefficient=numbers.value_coefficient,
        trained_tokens=counted,
    )


def _backward(share: Tensor, model: nn.Module, enter: OnPhase) -> Tensor:
    enter("backward")
    with adding_up(model):
        share.backward()
    return share.detach()

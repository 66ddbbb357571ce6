"""Evaluation: the loss that a step would minimise, over batches that are not trained on.

Sums of losses and of their counts are added up over all ranks, including those that share a
sequence, and divided once: the result is the same for any layout and any way to cut batches.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from highwater.engine.activations.recompute import without_dropout
from highwater.engine.data.batches import Batch
from highwater.engine.parallel.fsdp2 import release
from highwater.engine.parallel.mesh import total
from highwater.engine.training.experience import forward_batch, reference_experience
from highwater.engine.training.step import Training, preference_loss, reward_loss, sharing
from highwater.errors import UsageError


class Evaluation(NamedTuple):
    """Result of an evaluation, the same on every rank."""

    loss: float | None
    """Mean loss over the counted tokens or pairs; None if there are none."""
    counted: int
    """Number of trained tokens, or of pairs if the objective takes pairs."""


@torch.no_grad()
def evaluate(training: Training, micro_batches: Sequence[Batch]) -> Evaluation:
    """Return the mean loss of micro-batches. Each rank brings its shares, as many as every other
    rank, since shards are gathered for each.

    The loss is the objective's for pairs (``rw``, ``dpo``), else the negative log-likelihood of the
    trained tokens. Dropout is off, no gradient is recorded, and logits are computed in chunks
    whatever loss the training uses. The routers' auxiliary loss is not included. Raises UsageError
    without a micro-batch.
    """
    if not micro_batches:
        raise UsageError(
            "an evaluation of no micro-batches has no mean",
            hint="give one or more, as many on every rank: `evaluate(training, [batch])`",
        )
    if training.traits.pairs:
        losses = _of_pairs(training, micro_batches)
        # Ranks that share pairs each have all of them, and an equal share of their losses.
        pairs = sum(len(batch.rewards) for batch in micro_batches) / 2
        return _over_all_ranks(training, losses, pairs / sharing(training.sequence))
    logprobs = forward_batch(training.policy, micro_batches, device=training.device)
    losses = [-of_tokens_N.double().sum() for of_tokens_N in logprobs]
    return _over_all_ranks(training, losses, sum(len(of_tokens_N) for of_tokens_N in logprobs))


def _of_pairs(training: Training, micro_batches: Sequence[Batch]) -> list[Tensor]:
    """Return this rank's share of each micro-batch's loss, summed over its pairs."""
    policy, device = training.policy, training.device
    if policy.gives_scalars:
        with without_dropout(policy):
            losses = [
                reward_loss(policy, batch.to(device), training.sequence, pairs=1)
                for batch in micro_batches
            ]
        release(policy)
        return losses
    assert training.reference is not None, "pairs are compared by rewards or with a reference"
    logprobs = forward_batch(policy, micro_batches, device=device)
    experiences = reference_experience(training.reference, micro_batches, device=device)
    return [
        preference_loss(training, of_tokens_N, batch.to(device), experience, pairs=1)
        for of_tokens_N, batch, experience in zip(logprobs, micro_batches, experiences, strict=True)
    ]


def _over_all_ranks(training: Training, losses: Sequence[Tensor], count: float) -> Evaluation:
    own = torch.zeros(2, dtype=torch.float64, device=training.device)
    own[0], own[1] = torch.stack([loss.double() for loss in losses]).sum(), count
    loss, counted = total(own, training.mesh).tolist()
    return Evaluation(loss / counted if counted else None, round(counted))

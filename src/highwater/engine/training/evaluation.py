"""Evaluation: what a step would minimise, of batches that nothing is trained on.

Sums of losses and of what they are over are added up over all ranks, those that share a sequence
among them, and divided once: the same for any layout, and any way to cut batches.
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
    """The result, the same on every rank."""

    loss: float | None
    """Mean over them; None where there are none."""
    counted: int
    """Trained tokens, or pairs of an objective that takes pairs."""


@torch.no_grad()
def evaluate(training: Training, micro_batches: Sequence[Batch]) -> Evaluation:
    """The mean loss of micro-batches, of which each rank brings its shares; as many on every rank,
    since shards are gathered for each.

    Of pairs it is the objective's loss (``rw``, ``dpo``); of any other objective the negative
    log-likelihood of the trained tokens. Dropout is off, no gradient is recorded, and logits go in
    chunks whatever the training's loss is. The routers' auxiliary loss is no part of it. Raises
    UsageError without a micro-batch.
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
    """This rank's share of the sum over each micro-batch's pairs."""
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

"""Training rows: one rank's rows of each step of a training run, and the evaluation over held-out
data. An evaluation's sums of losses and of their counts are added up over all ranks, including
those that share a sequence, and divided once: the same for any layout and any way to cut batches.
"""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import NamedTuple

import torch
from torch import Tensor

from highwater.engine.activations.recompute import without_dropout
from highwater.engine.data.batches import Batch, pack
from highwater.engine.data.step_plan import StepPlan, evaluation_rows
from highwater.engine.data.store import OpenCorpus, open_corpus
from highwater.engine.parallel.fsdp2 import release
from highwater.engine.parallel.mesh import total
from highwater.engine.training.experience import forward_batch, reference_experience
from highwater.engine.training.rank_context import RankContext
from highwater.engine.training.step import Training, preference_loss, reward_loss, sharing
from highwater.errors import UsageError
from highwater.model.model import load_model
from highwater.nouns.training import TrainingSpec


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


_EVALUATED = 16
"""Rows evaluated at a time, which bounds rows in memory and log-probabilities on the device."""


class OwnRow(NamedTuple):
    """A rank's share of one micro-batch, and the names of all its documents."""

    batch: Batch
    names: tuple[str, ...]
    """Names of the micro-batch's documents for messages, like ``data.jsonl:17``."""


class TrainingRows:
    """Micro-batches of this rank, for any step."""

    def __init__(self, spec: TrainingSpec, context: RankContext) -> None:
        """Open the training and evaluation corpora. Raises UsageError for a corpus that is damaged,
        or that cannot be made into rows for this layout.
        """
        self._context = context
        self._ranks = spec.trial.layout.data_parallel_degree
        self._row_tokens = spec.trial.length_tokens * spec.trial.sequences
        self._corpus = _opened(spec, spec.corpus.directory)
        traits = spec.trial.settings.traits
        self._pairs = traits.pairs
        self._plan = StepPlan(
            self._corpus.lengths,
            self._corpus.units,
            row_tokens=self._row_tokens,
            micro_batches=spec.micro_batches,
            seed=spec.trial.seed,
            spread_units=traits.advantages == "groups",
        )
        self._evaluation = (
            None if spec.evaluation is None else _opened(spec, spec.evaluation.directory)
        )

    def of_step(self, step: int) -> list[OwnRow]:
        """Return this rank's rows of a step; data ranks take turns in the step's rows."""
        return [
            self._row(self._corpus, documents)
            for documents in self._plan.step(step)[self._context.data_rank :: self._ranks]
        ]

    def evaluate(self, training: Training) -> float | None:
        """Return the mean loss over the evaluation corpus, each document once; None if there is no
        corpus.

        Data ranks take turns in its rows. The last rows, fewer than the ranks, are evaluated by
        every rank: all must evaluate equally many, as shards are gathered for each.
        """
        if self._evaluation is None:
            return None
        rows = evaluation_rows(
            self._evaluation.lengths,
            self._evaluation.units if self._pairs else None,
            row_tokens=self._row_tokens,
        )
        even = len(rows) - len(rows) % self._ranks
        own, left = rows[:even][self._context.data_rank :: self._ranks], rows[even:]
        total_loss, counted = 0.0, 0.0
        for part, copies in ((own, 1), (left, self._ranks)):
            for start in range(0, len(part), _EVALUATED):
                some = part[start : start + _EVALUATED]
                batches = [self._row(self._evaluation, documents).batch for documents in some]
                found = evaluate(training, batches)
                if found.loss is not None:
                    total_loss += found.loss * found.counted / copies
                    counted += found.counted / copies
        return total_loss / counted if counted else None

    def _row(self, corpus: OpenCorpus, documents: Sequence[int]) -> OwnRow:
        whole = pack([corpus.document(number) for number in documents])
        names = tuple(corpus.name_of(number) for number in documents)
        return OwnRow(self._context.share_of(whole), names)


def _opened(spec: TrainingSpec, directory: str) -> OpenCorpus:
    """Open a corpus; UsageError for ids past the vocabulary, or documents a ring cannot share."""
    corpus = open_corpus(Path(directory))
    shape = load_model(spec.trial.model_directory).shape
    if corpus.largest_id >= shape.vocab_size:
        raise UsageError(
            f"the corpus in {directory} has the token id {corpus.largest_id}, and the model knows "
            f"0 to {shape.vocab_size - 1}",
            hint=f"remove it, and it is made anew: `rm -r {quote(directory)}`",
        )
    window_tokens = shape.window_tokens
    longest = corpus.summary.longest_tokens
    if window_tokens is None or spec.trial.layout.ring_degree == 1 or longest <= window_tokens:
        return corpus
    raise UsageError(
        f"a document of {longest:,} tokens is past the sliding window of {window_tokens:,} in "
        f"which {spec.trial.model_name} attends, and a ring shares only what all layers attend to "
        "whole",
        hint="use `--ulysses` in the place of `--ring`",
    )

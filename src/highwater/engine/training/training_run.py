"""Training run on one rank: repeat the trial's step over a corpus, from the last checkpoint to the
last step, with evaluations, checkpoints and an export. On SIGTERM it saves a checkpoint and stops.

An evaluation's sums of losses and of their counts are added up over all ranks, including those that
share a sequence, and divided once: the same for any layout and any way to cut batches.
"""

import math
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from highwater.engine.activations.recompute import without_dropout
from highwater.engine.data.batches import Batch, pack
from highwater.engine.data.step_plan import StepPlan, evaluation_rows
from highwater.engine.data.store import OpenCorpus, open_corpus
from highwater.engine.parallel.fsdp2 import local_shard, release
from highwater.engine.parallel.mesh import sharing, total
from highwater.engine.training.experience import forward_batch, reference_experience
from highwater.engine.training.export import export
from highwater.engine.training.rank_context import RankContext, gathered, shared_window
from highwater.engine.training.rank_run import RankRun
from highwater.engine.training.run_checkpoints import RunCheckpoints
from highwater.engine.training.step import Training, preference_loss, reward_loss
from highwater.errors import UsageError
from highwater.model.model import load_model
from highwater.nouns.codec import open_regular, to_json, write_whole
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.training import RunState, TrainingProgress, TrainingSpec, run_digest


class Evaluation(NamedTuple):
    """Result of an evaluation, the same on every rank."""

    loss: float | None
    """Mean loss over the counted tokens or pairs; None if there are none."""
    counted: int
    """Number of trained tokens, or of pairs if the objective takes pairs."""


@torch.no_grad()
def evaluate(training: Training, micro_batches: Sequence[Batch]) -> Evaluation:
    """Return the mean loss of micro-batches. Every rank must pass the same number of shares, since
    parameters are gathered for each.

    The loss is the objective's for pairs (``rw``, ``dpo``), else the negative log-likelihood of the
    trained tokens. Dropout is off, no gradient is recorded, and logits are computed in chunks
    whatever loss the training uses. No router's loss is in it. UsageError without a micro-batch.
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
    """Return this rank's share of the loss of each micro-batch, summed over pairs."""
    policy, device = training.policy, training.device
    if policy.gives_scalars:
        with without_dropout(policy):
            losses = [reward_loss(training, batch.to(device), pairs=1) for batch in micro_batches]
        release(policy)
        return losses
    logprobs = forward_batch(policy, micro_batches, device=device)
    experiences = reference_experience(training, micro_batches)
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
"""Rows evaluated at a time: a bound of the rows in memory and log-probabilities on the device."""


class OwnRow(NamedTuple):
    """A rank's share of one row (micro-batch), and the names of the row's documents."""

    batch: Batch
    names: tuple[str, ...]
    """Names of the micro-batch's documents for messages, like ``data.jsonl:17``."""


class TrainingRows:
    """This rank's micro-batches of any training step, and of evaluations."""

    def __init__(self, spec: TrainingSpec, context: RankContext) -> None:
        """Open the corpora; UsageError if one is damaged, or has no rows for this layout."""
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
        """Return this rank's rows of a step; a step's rows are dealt out to data ranks in turn."""
        return [
            self._row(self._corpus, documents)
            for documents in self._plan.step(step)[self._context.data_rank :: self._ranks]
        ]

    def evaluate(self, training: Training) -> float | None:
        """Return the mean loss over the evaluation corpus, each document once; None without one.

        Rows are dealt out to data ranks in turn. The last rows, fewer than the ranks, are evaluated
        by every rank: all must evaluate equally many, as parameters are gathered for each.
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
    window_tokens, longest = shared_window(spec.trial), corpus.summary.longest_tokens
    if window_tokens is None or longest <= window_tokens:
        return corpus
    raise UsageError(
        f"a document of {longest:,} tokens is past the sliding window of {window_tokens:,} in "
        f"which {spec.trial.model_name} attends, and a ring shares only what all layers attend to "
        "whole",
        hint="use `--ulysses` in the place of `--ring`",
    )


_MOST_NAMED = 4
"""Number of documents that a message names at most."""


class TrainingRun(RankRun):
    """One rank of a training run."""

    def __init__(self, spec: TrainingSpec, *, on_phase: Callable[[str], None]) -> None:
        """``on_phase`` is called with a ``TrainingProgress`` as JSON."""
        super().__init__(spec.trial, on_phase=self._say_phase)
        self.training_spec = spec
        self._on_progress = on_phase
        self._progress = TrainingProgress(phase="starting", steps=spec.steps)
        self._state = RunState(
            step=0, corpus_digest=spec.corpus.digest, run_digest=run_digest(spec)
        )
        self._saved_step: int | None = None
        self._is_told_to_stop = False
        self._checkpoints = RunCheckpoints(Path(spec.output_directory))

    def run(self) -> None:
        """Train the remaining steps, or until SIGTERM; save, and export after the last step."""
        signal.signal(signal.SIGTERM, self._stop)
        spec = self.training_spec
        training, context = self.assembled()
        self._resume(training)
        if self._state.step == 0 and _has_broken_weights(training, frozen=True):
            raise UsageError(
                f"{self.spec.model_directory} has weights that are no finite numbers",
                hint="copy or download its weights again, or name another checkpoint of it",
            )
        self.divide_budget(training, context)
        rows = TrainingRows(spec, context)
        if self._state.step == 0 and not self._state.evaluations:
            self._evaluate_if_due(training, rows, is_first=True)
        # all ranks stop after the same step
        while self._state.step < spec.steps and not training.on_any_rank(self._is_told_to_stop):
            step = self._state.step + 1
            self._train(training, rows.of_step(step), step)
            self._evaluate_if_due(training, rows)
            if step == spec.steps or (spec.save_every and step % spec.save_every == 0):
                self._save(training)
        if self._saved_step != self._state.step:
            self._save(training)
        if self._state.step == spec.steps:
            self.where.enter("save")
            self._say(phase="writing the model")
            source, target = Path(self.spec.model_directory), Path(spec.model_directory)
            export(training, target, source=source, merged=self.spec.settings.lora_merged)
        self.where.enter("report")
        if self.statistics_log is not None:
            self.statistics_log.close()
        self._say(phase="done" if self._state.step == spec.steps else "stopped")

    def _resume(self, training: Training) -> None:
        self._say_phase("looking for a checkpoint")
        state = self._checkpoints.resume(training, checkpoint=self.training_spec.resume_from)
        if state is None:
            self._keep_lines_up_to(-1)  # an earlier run without a checkpoint may have left some
            return
        self._saved_step = state.step
        if state.run_digest != self._state.run_digest:
            raise UsageError(
                f"{self.training_spec.output_directory} has checkpoints of another training",
                hint=f"use `{self._elsewhere}`",
            )
        self._state, evaluation = state, self.training_spec.evaluation
        if evaluation and state.evaluation_digest not in (None, evaluation.digest):
            self._state = state.replace(best_step=None, best_loss=None)
        self._keep_lines_up_to(state.step)
        sys.stdout.write(f"goes on after step {state.step}\n")

    def _keep_lines_up_to(self, step: int) -> None:
        """Drop the statistics of steps that will be trained again; on the first rank."""
        if self.report.rank == 0 and self.spec.statistics is not None:
            keep_lines_up_to(Path(self.spec.statistics.path), step=step)

    def _train(self, training: Training, batches: Sequence[OwnRow], step: int) -> None:
        self.where.enter("data")
        self._say(phase="training")
        rate = self.spec.hyperparameters.learning_rate * self.training_spec.schedule.factor(step)
        training.set_rate(rate)
        own = [row.batch for row in batches]
        try:
            with self.profiler.step(step - 1) if self.profiler else nullcontext():
                self.step(training, own, number=step)
        except FloatingPointError as error:  # raised on all ranks, as they share losses and norms
            raise self._refusal_of(str(error), *_broken_in(training, batches), step) from error
        loss = self.report.losses[-1]
        self._state = self._state.replace(
            step=step, losses=(*self._state.losses, loss), evaluation_loss=None
        )
        # Counted without another collective: data ranks have about as many tokens each.
        tokens = sum(sum(row.batch.document_lengths) for row in batches)
        self._say(
            phase="training",
            step=step,
            loss=loss,
            tokens=self._progress.tokens + tokens * self.spec.layout.data_parallel_degree,
            seconds=self._progress.seconds + self.report.step_times_s[-1],
        )

    def _refusal_of(
        self, what: str, broken: Sequence[str], every: Sequence[str], step: int
    ) -> UsageError:
        """Return the error for a step whose loss is not finite, with a hint to type."""
        kept = self._what_is_kept()
        if broken and set(broken) != set(every):
            return UsageError(
                f"{what}: it broke in {_some_of(broken)}; {kept}",
                hint="look at what is there, leave it out of the data, and use "
                f"`{self._elsewhere}`",
            )
        problem = f"{what}: the step had {_some_of(every)}; {kept}"
        if step == 1:
            return UsageError(
                problem,
                hint=f"the weights in {self.spec.model_directory} are broken, or all of these "
                f"documents are: mend them, and use `{self._elsewhere}`",
            )
        return self._too_fast(problem)

    def _too_fast(self, problem: str) -> UsageError:
        rate = self.spec.hyperparameters.learning_rate
        lower = min(rate / 10, Hyperparameters().learning_rate)
        return UsageError(
            problem, hint=f"train more slowly: `--learning-rate {lower:g} {self._elsewhere}`"
        )

    @property
    def _elsewhere(self) -> str:
        return f"--output {self.training_spec.output_directory}-2"

    def _what_is_kept(self) -> str:
        latest = self._checkpoints.latest()
        return f"the last checkpoint is {latest.name}" if latest else "there is no checkpoint yet"

    def _evaluate_if_due(
        self, training: Training, rows: TrainingRows, *, is_first: bool = False
    ) -> None:
        """Evaluate at the start, at a due step and at the last step; record the best loss."""
        spec, step = self.training_spec, self._state.step
        is_due = is_first or step == spec.steps
        is_due = is_due or bool(spec.evaluate_every and step % spec.evaluate_every == 0)
        if spec.evaluation is None or not is_due:
            return
        self.where.enter("evaluation")
        self._say(phase="evaluating")
        loss = rows.evaluate(training)
        if loss is None or not math.isfinite(loss):
            raise UsageError(
                f"the held-out loss after step {step} is {loss}",
                hint="look at the held-out data, or leave `--eval-data` and `--eval-every` out",
            )
        if self.statistics_log is not None:  # before a checkpoint says that it was evaluated
            self.statistics_log.write_evaluation(step, loss)
        evaluations = (*self._state.evaluations, (step, loss))
        self._state = self._state.replace(
            evaluations=evaluations,
            evaluation_loss=loss,
            evaluation_digest=spec.evaluation.digest,
        )
        best = self._state.best_loss
        if not is_first and (best is None or loss < best):
            self._state = self._state.replace(best_step=step, best_loss=loss)
            if step != spec.steps and not (spec.save_every and step % spec.save_every == 0):
                self._save(training)
        self._say(phase="training", evaluation_loss=loss, evaluation_step=step)

    def _save(self, training: Training) -> None:
        self.where.enter("save")
        self._say(phase="saving")
        if _has_broken_weights(training, frozen=False):
            step = self._state.step
            what = f"the update of step {step} left weights that are no finite numbers"
            raise self._too_fast(f"{what}; {self._what_is_kept()}")
        self._checkpoints.save(training, self._state)
        self._saved_step = self._state.step

    def _stop(self, *_: object) -> None:
        self._is_told_to_stop = True

    def _say_phase(self, phase: str) -> None:
        self._say(phase=phase)

    def _say(self, **changes: object) -> None:
        self._progress = self._progress.replace(**changes)
        self._on_progress(to_json(self._progress))


def _broken_in(training: Training, rows: Sequence[OwnRow]) -> tuple[Sequence[str], Sequence[str]]:
    """Names of documents with a non-finite log-probability, and of all documents, on all ranks."""
    broken: list[str] = []
    for row, tokens in zip(rows, training.record.tokens, strict=False):
        is_broken_N = ~tokens.logprobs_N.isfinite().cpu()
        broken += [row.names[each] for each in row.batch.documents_N[is_broken_N].unique().tolist()]
    every = [name for row in rows for name in row.names]
    of_all = gathered((broken, every), training.mesh, kind=tuple[list[str], list[str]])
    all_broken, all_names = zip(*of_all, strict=True)
    return list(dict.fromkeys(chain(*all_broken))), list(dict.fromkeys(chain(*all_names)))


def _some_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{more}"


def keep_lines_up_to(path: Path, *, step: int) -> None:
    """Remove lines of later steps from statistics, if any: an interrupted run repeats them."""
    try:
        with open_regular(path) as file:
            lines = file.readlines()
    except FileNotFoundError:
        return
    kept = [line for line in lines if _step_of(line) <= step]
    write_whole(path, b"".join(kept))


def _step_of(line: bytes) -> float:
    """Return the step of a line; infinity for a line that was cut off."""
    try:
        return float(msgspec.json.decode(line)["step"])
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
        return math.inf


def _has_broken_weights(training: Training, *, frozen: bool) -> bool:
    """True if a weight on any rank is not finite: a trained weight, or with ``frozen`` any."""
    shards = (
        local_shard(parameter.detach())
        for model, _ in training.trained
        for parameter in model.parameters()
        if frozen or parameter.requires_grad
    )
    return training.on_any_rank(any(not bool(shard.isfinite().all()) for shard in shards))

"""Trainings: what crosses the door for a whole run of training, and what its first rank says.

The step is a trial's: ``TrainingSpec.trial`` is what a search would have tried, and models, memory
and the step are made from it. Beside it stands what a trial has not: a corpus, a schedule,
evaluation, checkpoints.
"""

import math
from typing import Literal

from highwater.errors import UsageError
from highwater.spec.codec import Record
from highwater.spec.corpus import Corpus
from highwater.spec.trial import TrialSpec
from highwater.units import counted

ScheduleName = Literal["constant", "linear", "cosine"]


class Schedule(Record, frozen=True, kw_only=True):
    """The learning rate's course over a run, as a factor of the hyperparameters' own."""

    name: ScheduleName = "constant"
    warmup_steps: int = 0
    """Steps over which the rate rises to the whole, in equal steps; the first has 0, as in
    transformers' schedules."""
    steps: int
    """Steps of the whole run."""

    def factor(self, step: int) -> float:
        """The factor of an optimizer step; the first is 1.

        Source: ``get_scheduler`` of transformers 5, whose step 0 is ours 1.
        """
        done = step - 1
        if done < self.warmup_steps:
            return done / max(1, self.warmup_steps)
        if self.name == "constant":
            return 1.0
        left = max(1, self.steps - self.warmup_steps)
        progress = (done - self.warmup_steps) / left
        if self.name == "linear":
            return max(0.0, 1.0 - progress)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


class TrainingSpec(Record, frozen=True, kw_only=True):
    """One run of training: everything that its weights may depend on, and where it writes."""

    trial: TrialSpec
    """The step: model, layout, settings, hyperparameters, length and memory. ``steps``, ``data``
    and ``micro_batches`` in it say nothing here."""
    corpus: Corpus
    evaluation: Corpus | None = None
    """What is evaluated and never trained; None: nothing is."""
    steps: int
    """Optimizer steps of the whole run."""
    micro_batches: int
    """Micro-batches of the whole step, over all data-parallel ranks, which take turns in them."""
    schedule: Schedule
    evaluate_every: int = 0
    """Steps between evaluations; 0: only after the last one. There is one before the first step."""
    save_every: int = 0
    """Steps between checkpoints; 0: only after the last one."""
    output_directory: str
    """Absolute path of the run's folder."""

    def __post_init__(self) -> None:
        """Raise UsageError for what cannot be divided."""
        ranks = self.trial.layout.data_parallel_degree
        if self.micro_batches < 1 or self.micro_batches % ranks:
            raise UsageError(
                f"{counted(self.micro_batches, 'row')} a step, and {ranks} GPUs or groups of GPUs "
                "that have as many each",
                hint=f"use `--rows {max(ranks, self.micro_batches - self.micro_batches % ranks)}`",
            )

    @property
    def own_micro_batches(self) -> int:
        """Micro-batches of one data-parallel rank in a step."""
        return self.micro_batches // self.trial.layout.data_parallel_degree


class RunState(Record, frozen=True, kw_only=True):
    """Where a run is; in each of its checkpoints."""

    step: int
    """Optimizer steps that are done."""
    losses: tuple[float, ...] = ()
    """The loss of each step so far."""
    best_step: int | None = None
    """The step whose evaluation was the best; None: there was none."""
    best_loss: float | None = None
    evaluation_loss: float | None = None
    """The loss of the evaluation after this very step; None: there was none."""
    evaluation_digest: str | None = None
    """Digest of the corpus that is evaluated: losses over another one do not compare."""
    corpus_digest: str
    run_digest: str
    """Digest of what has to be the same to go on exactly: ``run_digest`` of the spec."""


class BestCheckpoint(Record, frozen=True, kw_only=True):
    """Which of a run's checkpoints has the best evaluation; beside them."""

    checkpoint: str
    """Name of its folder."""
    step: int
    loss: float


class TrainingProgress(Record, frozen=True, kw_only=True):
    """A word of the first rank about where it is, for whoever draws a bar."""

    phase: str
    """In words: "building the model", "training", "evaluating", "saving"."""
    step: int = 0
    steps: int = 0
    loss: float | None = None
    evaluation_loss: float | None = None
    tokens: int = 0
    """Tokens trained since this process began."""
    seconds: float = 0.0
    """Seconds of those steps."""

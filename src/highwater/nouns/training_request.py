"""Training requests: what a user asks of ``highwater train`` beside a trial's settings; and the
result of the run.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from highwater.errors import UsageError
from highwater.nouns.bounds import MOST_STEPS
from highwater.nouns.codec import Record
from highwater.nouns.corpus import LongDocuments, TrainedTokens
from highwater.nouns.training import ScheduleName
from highwater.units import parse_tokens

RECOMMENDED = "recommended"
MOST_TRAINING_STEPS = 1_000_000
MOST_SEED = 2**63 - 1


class TrainingRequest(Record, frozen=True, kw_only=True):
    """A run of training, in the user's words: the flags of ``train`` that no trial has, and the
    keywords of ``highwater.train``.
    """

    data: tuple[str, ...]
    """Files or folders to train on."""
    length: str | int
    """Tokens of the longest sequence, as "32k"."""
    steps: int
    """Optimizer steps of the whole run."""
    output: str
    """The run's folder: checkpoints, statistics, log, and the model at the end."""
    settings: str | None = None
    """``recommended``, or the file of a study whose answer is taken; None: those that are named,
    and what is recommended where none is."""
    eval_data: tuple[str, ...] = ()
    """Files or folders that are evaluated and never trained."""
    rows: int | None = None
    """Micro-batches of the whole step, over all GPUs; None: 2 for each GPU, or group of GPUs that
    share a sequence."""
    schedule: ScheduleName = "constant"
    warmup_steps: int = 0
    eval_every: int = 0
    """Steps between evaluations; 0: only after the last step."""
    save_every: int = 0
    """Steps between checkpoints; 0: only after the last step, and when it is told to stop."""
    long_documents: LongDocuments = "truncate"
    train_on: TrainedTokens = "responses"
    reward: str | None = None
    """``module:function`` that gives rewards; None: the data has them."""
    resume_from: str | None = None
    """Name of the checkpoint to go on from, ``step-000100``; None: the latest."""
    seed: int = 0
    """Of the order of documents, of dropout, and of weights that a model does not have."""

    def __post_init__(self) -> None:
        """Raise UsageError for what cannot be."""
        if not self.data:
            raise UsageError(
                "there is nothing to train on", hint="name a file: `--data data.jsonl`"
            )
        if not self.output:
            raise UsageError(
                "no folder for the run is named", hint="add it, for example `--output ./run`"
            )
        if not 1 <= self.steps <= MOST_TRAINING_STEPS:
            raise UsageError(
                f"{self.steps} steps of training",
                hint=f"use `--steps 1` or more, up to {MOST_TRAINING_STEPS}",
            )
        for name, least in (("warmup_steps", 0), ("eval_every", 0), ("save_every", 0)):
            value = getattr(self, name)
            if value < least:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} {value}", hint=f"use `{flag} {least}` or more")
        if self.warmup_steps > self.steps:
            raise UsageError(
                f"{self.warmup_steps} steps to warm up, of {self.steps}",
                hint=f"use `--warmup-steps {self.steps}` or less",
            )
        if self.rows is not None and not 1 <= self.rows <= MOST_STEPS:
            raise UsageError(
                f"{self.rows} rows a step", hint=f"use `--rows 1` or more, up to {MOST_STEPS}"
            )
        if not 0 <= self.seed <= MOST_SEED:
            raise UsageError(
                f"--seed {self.seed}", hint=f"use `--seed 0` or more, up to {MOST_SEED}"
            )
        if self.eval_every and not self.eval_data:
            raise UsageError(
                "there is nothing to evaluate",
                hint="name it, `--eval-data held_out.jsonl`, or leave `--eval-every` out",
            )

    @property
    def length_tokens(self) -> int:
        """The length, as a number."""
        return parse_tokens(str(self.length))


def training_request_from(values: Mapping[str, Any]) -> TrainingRequest:
    """The request of these fields, as they were typed or given in Python.

    Raises UsageError for a value that a field cannot have.
    """
    try:
        return msgspec.convert(values, TrainingRequest, strict=True)
    except msgspec.ValidationError as error:
        field = str(error).rpartition("$.")[2].rstrip("`")
        name = field.partition("[")[0]
        problem = str(error).partition(" - at")[0]
        if name in values:
            raise UsageError(
                f"{name} {values[name]!r}: {problem[:1].lower()}{problem[1:]}",
                hint=f"leave it out, or see `highwater train --help`: `--{name.replace('_', '-')}`",
            ) from error
        raise UsageError(
            f"a training needs data, length, steps and output: {problem[:1].lower()}{problem[1:]}",
            hint="for example `highwater train Qwen3-0.6B --data data.jsonl --length 8k --steps "
            "100 --output ./run`",
        ) from error


class TrainingResult(Record, frozen=True, kw_only=True):
    """What a run of training came to."""

    schema_version: int = 1
    status: Literal["done", "stopped"]
    """``stopped``: it was told to, and left a checkpoint."""
    step: int
    """Optimizer steps that are done."""
    steps: int
    losses: tuple[float, ...]
    """The loss of each step."""
    evaluations: tuple[tuple[int, float], ...] = ()
    """Step and loss of each evaluation."""
    best_step: int | None = None
    output_directory: str
    model_directory: str | None = None
    """The exported model or adapter; None where the run was stopped."""
    tokens_per_s: float | None = None
    """Tokens trained a second, by the steps since the run last started."""
    peak_bytes: int | None = None
    """The most that a GPU had in use, or a process's data segment on the CPU; of this start."""
    notes: tuple[str, ...] = ()

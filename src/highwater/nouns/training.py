"""Trainings: the specification of a whole training run, and the messages of its first rank.

``TrainingSpec.trial`` is the trial that a search would have run; models, memory and the step are
made from it. A training adds a corpus, a schedule, evaluation and checkpoints.

``TrainingRequest`` has the flags of ``highwater train`` that a trial does not have.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from highwater.errors import UsageError
from highwater.nouns.codec import Record, digest
from highwater.nouns.corpus import Corpus, LongDocuments, TrainedTokens
from highwater.nouns.declaration import (
    COUNT,
    DIRECTORY,
    FUNCTION,
    MOST_STEPS,
    REQUIRED,
    DeclaredRecord,
    flag_of,
    setting,
)
from highwater.nouns.hyperparameters import DEFAULTS
from highwater.nouns.settings import RUNG_ROWS, Settings
from highwater.nouns.trial import ReporterName, TrialSpec
from highwater.units import counted, parse_tokens

ScheduleName = Literal["constant", "linear", "cosine"]


class Schedule(Record, frozen=True, kw_only=True):
    """How the learning rate rises and falls over a run: a factor for each step."""

    name: ScheduleName = "constant"
    warmup_steps: int = 0
    """Steps over which the rate rises evenly to the whole; the first has 0, as in transformers."""
    steps: int
    """Steps of the whole run."""

    def factor(self, step: int) -> float:
        """Factor of the learning rate in step ``step``, from 1. Source: transformers 5 (from 0)."""
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
    """The step: model, layout, settings, hyperparameters, length and memory. Its ``steps``,
    ``data`` and ``micro_batches`` are not read."""
    corpus: Corpus
    evaluation: Corpus | None = None
    """Corpus that is evaluated and never trained; None: nothing is."""
    steps: int
    """Optimizer steps of the whole run."""
    micro_batches: int
    """Micro-batches of the whole step, over all data-parallel ranks, which take turns in them."""
    schedule: Schedule
    evaluate_every: int = 0
    """Steps between evaluations; 0: only after the last. One comes before the first step, too."""
    save_every: int = 0
    """Steps between checkpoints; 0: only after the last one."""
    output_directory: str
    """Absolute path of the run's folder."""
    model_directory: str
    """Absolute path of the model's folder, which is made when the run ends: not there before."""
    resume_from: str | None = None
    """Name of the checkpoint to go on from, ``step-000100``; None: the latest."""

    def __post_init__(self) -> None:
        """Raise UsageError for micro-batches that cannot be divided evenly among ranks."""
        refuse_uneven(self.micro_batches, self.trial.layout.data_parallel_degree)


def refuse_uneven(rows: int, ranks: int) -> None:
    """Raise UsageError if the rows of a step cannot be divided evenly among data-parallel ranks."""
    if rows < 1 or rows % ranks:
        raise UsageError(
            f"{counted(rows, 'row')} a step, and {ranks} GPUs or groups of GPUs that have as many "
            "each",
            hint=f"use `--rows {max(ranks, rows - rows % ranks)}`",
        )


def run_digest(spec: TrainingSpec) -> str:
    """Digest of the settings that determine a run's loss curve: runs with equal digests have equal
    curves, up to the order of sums. It leaves out how the model is spread over GPUs, recompute and
    offload, and when checkpoints and evaluations happen; and every default, so that a setting added
    later changes no digest.
    """
    decisive = _decisive(spec)
    return digest({name: it for name, it in decisive.items() if it != _USUAL.get(name, ...)})


def differences(before: TrainingSpec, now: TrainingSpec) -> tuple[str, ...]:
    """Settings of two runs that differ and change the losses, in words; the weightiest first."""
    was, is_ = _decisive(before), _decisive(now)
    changed = [name for name in dict.fromkeys((*was, *is_)) if was.get(name) != is_.get(name)]
    return tuple(
        _difference(name, was.get(name), is_.get(name))
        for name in changed
        if _FOLLOWS.get(name) not in changed
    )


_ANOTHER = {
    "config_digest": "the model is another: its config.json differs",
    "corpus_digest": "the data is another: its files, its tokenizer or how it is cut differ",
}
"""Sentences on values that nobody can read: digests."""
_WORDS = {
    "length_tokens": "--length",
    "micro_batches": "--rows",
    "sequences": "--sequences-per-micro-batch",
    "steps": "--steps, on which the schedule depends",
}
"""Users' names of values that are called otherwise than their flags."""
_FOLLOWS = {
    **dict.fromkeys(("lora_alpha", "lora_targets", "lora_base"), "lora"),
    "steps": "schedule",
}
"""Values that are not named as changed if this other one changed, too."""
_OF_SETTINGS = tuple(name for name, row in RUNG_ROWS.items() if row.moves_loss)
_USUAL: Mapping[str, Any] = {
    **DEFAULTS,
    **{name: getattr(Settings(), name) for name in _OF_SETTINGS},
    "entropy": False,
    "sequences": 1,
    "schedule": "constant",
    "warmup_steps": 0,
    **dict.fromkeys(("lora", "lora_alpha", "lora_targets", "lora_base", "steps")),
}


def _decisive(spec: TrainingSpec) -> dict[str, Any]:
    """Values by name that the losses depend on; the schedule's steps only where they matter."""
    trial, settings, adapters = spec.trial, spec.trial.settings, spec.trial.settings.adapters
    return {
        "config_digest": trial.config_digest,
        "corpus_digest": spec.corpus.digest,
        **{name: getattr(settings, name) for name in _OF_SETTINGS},
        "entropy": settings.entropy != "none",
        "lora": adapters and adapters.rank,
        "lora_alpha": adapters and float(adapters.alpha),
        "lora_targets": adapters and adapters.targets,
        "lora_base": adapters and adapters.base,
        "length_tokens": trial.length_tokens,
        "micro_batches": spec.micro_batches,
        "sequences": trial.sequences,
        "seed": trial.seed,
        "schedule": spec.schedule.name,
        "warmup_steps": spec.schedule.warmup_steps,
        "steps": None if spec.schedule.name == "constant" else spec.schedule.steps,
        **{name: getattr(trial.hyperparameters, name) for name in DEFAULTS},
        "device": trial.device,
    }


def _difference(name: str, was: Any, is_: Any) -> str:
    if name in _ANOTHER:
        return _ANOTHER[name]
    words = _WORDS.get(name, flag_of(name))
    began, goes_on = ("none" if it is None else str(it).lower() for it in (was, is_))
    return f"{words}: {began} when the run began, {goes_on} now"


CHECKPOINTS = "checkpoints"
"""Name of the folder of checkpoints in a run's own."""
STATE_FILE = "state.json"
"""Name of the file of a ``RunState`` in a checkpoint."""
_CHECKPOINT = re.compile(r"step-([0-9]{6,})")


def checkpoint_name(step: int) -> str:
    """The name of a checkpoint's folder: ``step-000100``."""
    return f"step-{step:06}"


def checkpoint_step(name: str) -> int | None:
    """The step of a checkpoint, by its folder's name; None if the name is no checkpoint's."""
    found = _CHECKPOINT.fullmatch(name)
    return None if found is None else int(found[1])


class RunState(Record, frozen=True, kw_only=True):
    """How far a run has come: its step, losses and evaluations; saved in each checkpoint."""

    step: int
    """Optimizer steps that are done."""
    losses: tuple[float, ...] = ()
    """The loss of each step so far."""
    evaluations: tuple[tuple[int, float], ...] = ()
    """Step and loss of each evaluation so far; step 0 is before the first."""
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
    """The run's checkpoint with the best evaluation loss, in a file beside the checkpoints."""

    checkpoint: str
    """Name of the checkpoint's folder."""
    step: int
    loss: float


class TrainingProgress(Record, frozen=True, kw_only=True):
    """What the first rank says of a running training: phase, step, loss, tokens and seconds."""

    phase: str
    """In words: "building the model", "training", "evaluating", "saving"."""
    step: int = 0
    steps: int = 0
    loss: float | None = None
    evaluation_loss: float | None = None
    """Loss of the latest evaluation; None: there was none since this process began."""
    evaluation_step: int | None = None
    """Steps that were done before that evaluation."""
    tokens: int = 0
    """Tokens trained since this process began."""
    seconds: float = 0.0
    """Seconds of the steps since this process began."""


RECOMMENDED = "recommended"
MOST_TRAINING_STEPS = 1_000_000
MOST_SEED = 2**63 - 1


_DATA: dict[str, Any] = {"topic": "the data"}
_RUN: dict[str, Any] = {"topic": "the run"}


class TrainingRequest(DeclaredRecord, frozen=True, kw_only=True):
    """A training run as the user asks for it: flags of ``train``, or keywords from Python."""

    data: tuple[str, ...] = setting(
        REQUIRED,
        "files to train on (.jsonl, .parquet, .txt, .md), folders of them, or what `datasets` "
        "saved",
        **_DATA,
        metavar="PATH",
        example="--data data.jsonl",
    )
    eval_data: tuple[str, ...] = setting(
        (), "evaluated, and never trained on", metavar="PATH", **_DATA
    )
    length: str | int = setting(
        REQUIRED,
        "tokens of the longest sequence, for example 32k",
        **_DATA,
        metavar="TOKENS",
        example="--length 8k",
    )
    long_documents: LongDocuments = setting(
        "truncate",
        "what becomes of a longer document: its beginning is trained, or all of it in pieces, "
        "or nothing is",
        **_DATA,
    )
    train_on: TrainedTokens = setting(
        "responses",
        "tokens that are trained on: responses, where documents have prompts, or all",
        **_DATA,
    )
    reward: str | None = FUNCTION(
        None,
        "--objective grpo, ppo: gives the reward of a response; default: the data has it",
        **_DATA,
    )
    steps: int = COUNT(REQUIRED, "optimizer steps in all", **_RUN, example="--steps 100")
    output: str = DIRECTORY(
        REQUIRED,
        "the run's folder: checkpoints, statistics, log, and the model; the same command goes "
        "on after the last checkpoint in it",
        **_RUN,
        short="-o",
        example="--output ./run",
    )
    settings: str | None = setting(
        None,
        "whose settings: those recommended for the length, or those that a study of `highwater "
        "find` measured; default: those that are named, and recommended ones where none is",
        **_RUN,
        metavar="{recommended,STUDY}",
    )
    rows: int | None = COUNT(
        None,
        "rows of up to --length tokens in a step, over all GPUs (the global batch; default: 2 "
        "for each GPU, or group of GPUs that share a sequence)",
        **_RUN,
    )
    """Micro-batches of a whole step."""
    resume_from: str | None = setting(
        None,
        "go on from this one, for example step-000100; default: the latest",
        **_RUN,
        metavar="CHECKPOINT",
    )
    schedule: ScheduleName = setting("constant", "course of the learning rate", **_RUN)
    warmup_steps: int = COUNT(0, "steps over which the learning rate rises (default: none)", **_RUN)
    eval_every: int = COUNT(
        0, "steps between evaluations (default: before the first and after the last)", **_RUN
    )
    save_every: int = COUNT(0, "steps between checkpoints (default: after the last)", **_RUN)
    """One is also saved when the run is told to stop."""
    report_to: tuple[ReporterName, ...] = setting(
        (),
        "also report the statistics of each step to these, each by its own package; without an "
        "account they stay on this machine",
        **_RUN,
    )
    seed: int = COUNT(
        0, "seed of the data's order, of dropout and of weights that are not there", **_RUN
    )

    def __post_init__(self) -> None:
        """Raise UsageError for missing data or output, or counts out of range."""
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
        for name in ("warmup_steps", "eval_every", "save_every"):
            value, flag = getattr(self, name), flag_of(name)
            if value < 0:
                raise UsageError(f"{flag} {value}", hint=f"use `{flag} 0` or more")
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
        """The length in tokens."""
        return parse_tokens(str(self.length))


def training_request_from(values: Mapping[str, Any]) -> TrainingRequest:
    """Make a request of fields by name; UsageError for an unknown field or invalid value."""
    try:
        return msgspec.convert(values, TrainingRequest, strict=True)
    except msgspec.ValidationError as error:
        field = str(error).rpartition("$.")[2].rstrip("`")
        name = field.partition("[")[0]
        problem = str(error).partition(" - at")[0]
        if name in values:
            raise UsageError(
                f"{name} {values[name]!r}: {problem[:1].lower()}{problem[1:]}",
                hint=f"leave it out, or see `highwater train --help`: `{flag_of(name)}`",
            ) from error
        raise UsageError(
            f"a training needs data, length, steps and output: {problem[:1].lower()}{problem[1:]}",
            hint="for example `highwater train Qwen3-0.6B --data data.jsonl --length 8k --steps "
            "100 --output ./run`",
        ) from error


class TrainingResult(Record, frozen=True, kw_only=True):
    """How a training ended: its losses, its folder, its speed and its peak of memory."""

    schema_version: int = 1
    status: Literal["done", "stopped"]
    """``stopped``: the run was told to stop, and left a checkpoint."""
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
    """Tokens trained a second, over the steps since the run was last started."""
    peak_bytes: int | None = None
    """Most bytes in use of a GPU, or of a process's data segment on the CPU, since that start."""
    notes: tuple[str, ...] = ()

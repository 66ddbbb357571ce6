"""A trial as the YAML of a trainer for supervised fine-tuning: the emitted words for its settings,
the user's own fields beside them, and what one trial needs of data, steps and output.

A user's field stays unless it says the length, the batch, how processes share the work, the data,
the steps or the output: those are the trial's. What the user's file does not say is the trainer's
default; without a file it is what ``highwater emit`` says. What would make a trial prove something
else is refused by name (docs/decisions/059). What differs by trainer is its ``Finetuner``.

Supervised fine-tuning as a trainer's configuration needs it, whoever asks for it: a
recommendation that is emitted, or a trial.

Adapter words: what the configurations of trainers with LoRA have in common.
"""

import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from highwater.errors import UsageError
from highwater.model.model import ModelShape
from highwater.model.rope import Yarn
from highwater.nouns.declaration import words_of
from highwater.nouns.foreign_trainer import FOREIGN, ForeignName
from highwater.nouns.lora import ALL_LINEAR, Lora
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell
from highwater.nouns.trial import TrialSpec
from highwater.trainers.accelerate import refuse_unlaunched
from highwater.trainers.emitted import Value, nested, shape_here
from highwater.units import format_tokens


class FineTuning(NamedTuple):
    """What a trainer is to train."""

    cell: Cell
    length_tokens: int
    model_path: str | None = None
    """The model's directory, or its id on the Hub; None: the command names it."""
    yarn: Yarn | None = None
    """The scaling of the positions that the length needs."""
    shape: ModelShape | None = None
    """The model's layers, which tell whose loss can be fused; None: it is not here."""

    @classmethod
    def of(cls, found: Recommendation, chosen: Candidate, model_path: str | None) -> Self:
        """The training that a recommendation is of."""
        shape = shape_here(found, model_path)
        return cls(chosen.cell, found.length_tokens, model_path, found.yarn, shape)


def whole_alpha(lora: Lora, *, name: str) -> int:
    """Alpha as a whole number; raises UsageError for another."""
    if lora.alpha != int(lora.alpha):
        raise UsageError(
            f"{name}'s lora_alpha is a whole number, and {lora.alpha} is not",
            hint=f"use `--lora-alpha {max(1, round(lora.alpha))}`",
        )
    return int(lora.alpha)


def lora_words(lora: Lora) -> str:
    """The flags that ask for these adapters."""
    words: dict[str, object] = {"lora": lora.rank}
    words |= {} if lora.alpha == 2 * lora.rank else {"lora_alpha": lora.alpha}
    words |= {} if lora.targets == ALL_LINEAR else {"lora_targets": lora.targets}
    return shlex.join(words_of(words))


def one_dtype(*, name: str, field: str) -> str:
    """That a frozen model has its adapters' dtype: a line of a comment."""
    return (
        f"{name} has one dtype for adapters and the frozen model, {field}: float32, which counts "
        "4 bytes for each of its parameters; bf16 would train adapters in bf16"
    )


DOCUMENTS = "documents.jsonl"
"""The trial's data: a text in each line, as long as the trial at least."""
COUNTED = "num_input_tokens_seen"
"""What transformers' trainer counts where it is asked to: tokens of every batch, padding too."""


class TrialPlace(NamedTuple):
    """Where the processes of a trial find and leave what."""

    model_directory: Path
    folder: Path
    """The trial's own: configuration and data."""
    output: Path


class FinetunerTrial(NamedTuple):
    """What a trial's processes are given."""

    spec: TrialSpec
    shape: ModelShape
    place: TrialPlace
    yarn: Yarn | None = None
    """The scaling of the positions that the length needs."""
    has_flash: bool = False
    """Whether the trainer's Python has the package flash-attn."""

    @property
    def cell(self) -> Cell:
        """Settings and layout of the trial."""
        return Cell(settings=self.spec.settings, layout=self.spec.layout)

    @property
    def is_on_cpu(self) -> bool:
        """Whether it runs on the CPU, where nothing is sharded."""
        return self.spec.device == "cpu"

    @property
    def step_sequences(self) -> int:
        """Sequences of one step, over all GPUs."""
        spec = self.spec
        rows = spec.settings.sequences_per_micro_batch * spec.micro_batches
        return rows * spec.layout.data_parallel_degree

    @property
    def has_named_recomputation(self) -> bool:
        """Whether somebody named how to recompute, as far as that shows: it is not the default."""
        return self.spec.settings.recompute != Settings().recompute


class OwnFile(NamedTuple):
    """The user's own configuration."""

    config: Mapping[str, Any] = MappingProxyType({})
    """Its fields; empty: there is none."""
    source: str = "the configuration"
    """What it is called, for readers."""


class FinetunerFiles(NamedTuple):
    """The files of a trial, and what a reader should know of them."""

    config: dict[str, Any]
    beside: Mapping[str, Any] = MappingProxyType({})
    """Files that it names, by name: JSON, or YAML by their names' ends."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finetuner:
    """One trainer whose trials are a file of YAML."""

    name: ForeignName
    program: str
    """What starts it, as pip installs it."""
    package: str
    """The package that has it."""
    subcommand: str
    file: str
    """The name of its configuration."""
    values: Callable[[FineTuning], dict[str, Value]]
    """Its emitted settings by name."""
    refuse: Callable[[FinetunerTrial], None]
    """Raises UsageError for settings that it does not have."""
    own: Callable[[FinetunerTrial, Mapping[str, Any]], dict[str, Any]]
    """The fields that are a trial's, by the trial and what is emitted for it; None: left out."""
    settled: Callable[[FinetunerTrial, dict[str, Any], OwnFile], FinetunerFiles]
    """The files from all fields together, where some exclude each other."""
    start: Callable[[FinetunerTrial, tuple[str, ...]], tuple[str, ...]]
    """The command, by the words of its program."""
    environment: Callable[[FinetunerTrial], Mapping[str, str]]
    """Variables beside those of every trial."""
    left_out: Collection[str]
    """The user's fields about data, reports and checkpoints, of which a trial has its own or none;
    ``*`` stands for any end."""
    ends: Mapping[str, Any]
    """What every trial ends with: no evaluation, no checkpoint, each step in the log."""
    refused: Mapping[str, str]
    """Fields that a trial cannot take over, and what to do instead."""
    trains: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields that say what is trained, with the one value that a trial has."""
    by_setting: Mapping[str, Collection[str]]
    """Emitted fields, with ``*`` for any end, that a setting of ours is said by."""
    attention: str
    """The field that names the attention."""
    without_flash: Mapping[str, Any]
    """What is emitted otherwise where flash-attn is not there; None: nothing."""
    multiple: int = 1
    """Tokens of which it pads each batch to a multiple."""
    more_tokens: int = 0
    """Tokens of each document past the length: the trainer cuts what its template leaves over."""

    @property
    def title(self) -> str:
        """Its name, for readers."""
        return FOREIGN[self.name].title

    @property
    def hint(self) -> str:
        """What to do about a file that is none of its."""
        return f"name the file that `{self.program} {self.subcommand}` takes"


def trial_files(trainer: Finetuner, launched: FinetunerTrial, base: OwnFile) -> FinetunerFiles:
    """The files of one trial, over the user's own fields.

    Raises UsageError for what the trainer is not tried with, by name, and what is instead.
    """
    _refuse_untried(trainer, launched)
    _refuse_base(trainer, base)
    emitted = _emitted(trainer, launched)
    left = [name for name in base.config if _is_one(name, trainer.left_out)]
    kept = {name: value for name, value in base.config.items() if name not in left}
    filled = _picked(emitted, trainer.by_setting["recompute"]) if base.config else emitted
    own = _picked(emitted, _named(trainer, launched))
    own |= {**trainer.own(launched, emitted), **trainer.ends}
    found = trainer.settled(launched, {**filled, **kept, **own}, base)
    config = {name: value for name, value in found.config.items() if value not in ({}, None)}
    notes = [*found.notes, *_notes(base, kept, config, left)]
    said = config.get(trainer.attention, f"what {trainer.title} takes by itself")
    return found._replace(config=config, notes=(*notes, f"attention is {said}"))


def of_recomputation(launched: FinetunerTrial, base: OwnFile) -> bool:
    """Whether the trainer's own switch recomputes: the user's where it is there and nobody named
    another. On GPUs FSDP recomputes where it does not; both at once are refused by transformers.
    """
    name = "gradient_checkpointing"
    if name in base.config and not launched.has_named_recomputation:
        return bool(base.config[name])
    return launched.is_on_cpu and launched.spec.settings.recompute != "none"


def _refuse_untried(trainer: Finetuner, launched: FinetunerTrial) -> None:
    """Raise UsageError for settings and lengths that trials of the trainer cannot have."""
    length_tokens, multiple = launched.spec.length_tokens, trainer.multiple
    refuse_unlaunched(launched.spec, name=trainer.title)
    trainer.refuse(launched)
    if length_tokens % multiple:
        near_tokens = length_tokens + -length_tokens % multiple
        raise UsageError(
            f"{trainer.title} pads each batch to a multiple of {multiple} tokens, and "
            f"{format_tokens(length_tokens)} are none",
            hint=f"use `--length {near_tokens}`; of a search `--start-length {near_tokens} "
            f"--resolution {multiple}` or multiples of them",
        )


def _refuse_base(trainer: Finetuner, base: OwnFile) -> None:
    """Raise UsageError for a field of the user's that a trial cannot take over."""
    for name, hint in trainer.refused.items():
        value = base.config.get(name)
        if value and (value is True or value != 1):  # a degree of 1 shares nothing
            raise UsageError(f"{base.source} has {name}, which a trial cannot take over", hint=hint)
    for name, meant in trainer.trains.items():
        value = base.config.get(name, meant)
        if value != meant:
            raise UsageError(
                f"{base.source} has {name}: {value}, and trials are of {name}: {meant}",
                hint=f"leave `{name}` out, or start it by `--trainer command`",
            )


def _emitted(trainer: Finetuner, launched: FinetunerTrial) -> dict[str, Any]:
    """What is emitted for the trial's settings, without flash attention where it is not there."""
    training = FineTuning(
        launched.cell,
        launched.spec.length_tokens,
        str(launched.place.model_directory),
        launched.yarn,
    )
    values: dict[str, Any] = nested(trainer.values(training))
    return values if launched.has_flash else {**values, **trainer.without_flash}


def _named(trainer: Finetuner, launched: FinetunerTrial) -> list[str]:
    """The fields of settings that somebody named, as far as that shows: not the default."""
    usual, settings = Settings(), launched.spec.settings
    named = (n for n in trainer.by_setting if getattr(settings, n) != getattr(usual, n))
    return [each for name in named for each in trainer.by_setting[name]]


def _picked(values: Mapping[str, Any], patterns: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if _is_one(name, patterns)}


def _is_one(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _notes(
    base: OwnFile, kept: Mapping[str, Any], config: Mapping[str, Any], left: Collection[str]
) -> tuple[str, ...]:
    """Which of the user's fields say something else in the trial, or nothing."""
    changed = sorted(name for name, value in kept.items() if config.get(name) != value)
    said = [f"the trial's own in {base.source}: {', '.join(changed)}"] if changed else []
    if left:
        said.append(
            f"left out of {base.source}, the data and the reports being the trial's: "
            f"{', '.join(sorted(left))}"
        )
    return tuple(said)

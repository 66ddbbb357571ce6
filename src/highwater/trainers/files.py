"""Trainers for supervised fine-tuning whose configuration is one file of YAML: what is emitted of
a recommendation, and the file of a trial.

A trial's file has the emitted words for its settings and the user's own fields beside them. A field
of the user's stays unless it says the length, the batch, how processes share the work, the data,
the steps or the output: those are the trial's. What the user's file does not say is the trainer's
default; without a file it is what ``highwater emit`` says. What would make a trial prove something
else is refused by name (docs/decisions/059).
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from highwater.errors import UsageError
from highwater.model.model import ModelShape, load_model
from highwater.model.rope import Yarn, yarn
from highwater.nouns.corpus import DocumentOrder, missing_files
from highwater.nouns.layout import Layout
from highwater.nouns.objective import Objective, Rollout
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell
from highwater.nouns.trainer import ForeignName, ForeignTrainer
from highwater.nouns.trial import TrialSpec
from highwater.trainers.accelerate import SequenceSharing, refuse_unlaunched, sharing_of
from highwater.trainers.emitted import (
    WHOLE_SHARDS,
    Dialect,
    Emitted,
    Value,
    environment,
    fused_attention,
    nested,
    refuse_obstacle,
    shape_here,
    unfused,
    whole_logits_bytes,
)
from highwater.trainers.foreign import (
    OUTPUT,
    QUIET,
    ForeignCommand,
    HasFlash,
    OwnFile,
    TrialFiles,
    TrialHome,
    TrialStart,
    own_file,
    path_of,
    refuse_no_program,
    told_of,
    write_files,
)
from highwater.trainers.logs import steps_of
from highwater.units import format_tokens


class FineTuning(NamedTuple):
    """A training that a trainer is told of."""

    cell: Cell
    length_tokens: int
    model_path: str | None = None
    """The model's directory, or its id on the Hub; None: the command names it."""
    yarn: Yarn | None = None
    """The scaling of the positions that the length needs."""
    shape: ModelShape | None = None
    """The model's layers, which tell whose loss can be fused; None: it is not here."""
    rollout_gpus: int = 0
    """GPUs set aside for a server that generates."""
    rollout: Rollout | None = None
    """vLLM beside the training, on its GPUs."""

    @property
    def sharing(self) -> SequenceSharing:
        """How accelerate shares its sequences among GPUs."""
        return sharing_of(self.cell.layout, self.shape)


DOCUMENTS = "documents.jsonl"
"""The trial's data: a text in each line, as long as the trial at least."""
_MORE_STEPS = 1
"""Steps of documents beyond those of a trial: a trainer that packs or shuffles may leave some."""
COUNTED = "num_input_tokens_seen"
"""A count of transformers' trainer, where it is asked to: tokens of every batch, padding too."""


class TrialPlace(NamedTuple):
    """Paths that the processes of a trial read and write."""

    model_directory: Path
    folder: Path
    """The trial's own: configuration and data."""
    output: Path


class FinetunerTrial(NamedTuple):
    """A trial, as its processes are told of it."""

    spec: TrialSpec
    shape: ModelShape
    place: TrialPlace
    yarn: Yarn | None = None
    """The scaling of the positions that the length needs."""
    has_flash: bool = False
    """True if the trainer's Python has the package flash-attn."""

    @property
    def cell(self) -> Cell:
        """Settings and layout of the trial."""
        return Cell(settings=self.spec.settings, layout=self.spec.layout)

    @property
    def is_on_cpu(self) -> bool:
        """True on the CPU, where nothing is sharded."""
        return self.spec.device == "cpu"

    @property
    def step_sequences(self) -> int:
        """Sequences of one step, over all GPUs."""
        spec = self.spec
        rows = spec.settings.sequences_per_micro_batch * spec.micro_batches
        return rows * spec.layout.data_parallel_degree


class Finetuner(ABC):
    """A trainer: how its configuration is emitted, how a trial of it is written and started."""

    name: ClassVar[ForeignName]
    words: ClassVar[Dialect]
    program: ClassVar[str]
    """The command that starts it, as pip installs it."""
    package: ClassVar[str]
    """The package that has it."""
    subcommand: ClassVar[str]
    file: ClassVar[str]
    """The name of its configuration."""
    yarn: ClassVar[str | None] = None
    """Why the block of YaRN stands in the model's config.json; None: it is among the values."""
    unknown: ClassVar[str]
    """What a family is to it whose loss it does not fuse."""
    left_out: ClassVar[Collection[str]]
    """The user's fields on data, reports and checkpoints, left out; ``*`` stands for any end."""
    ends: ClassVar[Mapping[str, Any]]
    """The last fields of every trial: no evaluation, no checkpoint, each step in the log."""
    refused: ClassVar[Mapping[str, str]]
    """Fields that a trial cannot take over, and what to do instead."""
    trains: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Fields that say what is trained, with the one value that a trial has."""
    by_setting: ClassVar[Mapping[str, Collection[str]]]
    """Emitted fields, with ``*`` for any end, that a setting of ours is said by."""
    attention: ClassVar[str]
    """The field that names the attention."""
    without_flash: ClassVar[Mapping[str, Any]]
    """Fields that are emitted otherwise where flash-attn is not there; None: left out."""
    multiple: ClassVar[int] = 1
    """Tokens of which it pads each batch to a multiple."""
    more_tokens: ClassVar[int] = 0
    """Tokens of each document past the length: the trainer cuts what its template leaves over."""
    has_copies: ClassVar[bool] = False
    """True if copies of shards are written; False: those of DDP alone, see ``is_ddp``."""

    def emit(
        self, found: Recommendation, chosen: Candidate, *, model_path: str | None = None
    ) -> Emitted:
        """A whole file, but for the data; UsageError for what the trainer does not have."""
        cell = chosen.cell
        self.refuse_untrainable(cell)
        shape = shape_here(found, model_path)
        training = FineTuning(cell, found.length_tokens, model_path, found.yarn, shape)
        values: dict[str, Any] = {**self.values(training)}
        if fused_attention(shape) == "sdpa":
            values |= self.without_flash
        return self.words.emitted(
            found,
            chosen,
            self.said(training),
            {name: value for name, value in values.items() if value is not None},
            command=self.command(training),
            environment=self.variables(cell.settings),
            cannot=(
                *self.cannot(training),
                *(() if self.fuses(training) else unfused(cell, self.why_unfused(cell.layout))),
                *((WHOLE_SHARDS,) if cell.settings.optimizer_traits.is_quantized else ()),
                *self.words.engine_alone(cell.settings),
            ),
            yarn=self.yarn,
            logits_bytes=None if self.fuses(training) else whole_logits_bytes(chosen, shape),
            beside=self.beside(training),
        )

    def refuse_untrainable(self, cell: Cell) -> None:
        """Raise UsageError for an objective, a layout or an optimizer that it does not have."""
        words, has_copies = self.words, self.has_copies or is_ddp(cell)

        def obstacle(objective: Objective, layout: Layout) -> str | None:
            other = words.other_objective(objective, is_written=True) or self.obstacle(layout)
            if other is None and layout.replicate_degree > 1 and not has_copies:
                return f"{words.name}'s states are sharded among all GPUs, without copies"
            return other

        refuse_obstacle(cell, obstacle)
        words.refuse_optimizer(cell.settings)

    def variables(self, settings: Settings) -> dict[str, str]:
        """Variables to set before the emitted command."""
        return environment(settings)

    def beside(self, training: FineTuning) -> Mapping[str, str]:  # noqa: ARG002
        """Other files that the emitted one names."""
        return {}

    def obstacle(self, layout: Layout) -> str | None:  # noqa: ARG002
        """Why its file is not written for a layout, in words; None where it is."""
        return None

    @abstractmethod
    def fuses(self, training: FineTuning) -> bool:
        """True if its loss never holds whole logits."""

    def why_unfused(self, layout: Layout) -> str:  # noqa: ARG002
        """Why a loss is not fused, where it is not."""
        return self.unknown

    def cannot(self, training: FineTuning) -> list[str]:  # noqa: ARG002
        """Say what the settings have and it has no words for, beside what all such have not."""
        return []

    @abstractmethod
    def said(self, training: FineTuning) -> list[str]:
        """Lines of a comment: things that a reader has to know or do."""

    @abstractmethod
    def values(self, training: FineTuning) -> dict[str, Value]:
        """Its settings by name: what holds memory, and stand-ins for what is learned."""

    @abstractmethod
    def command(self, training: FineTuning) -> str:
        """The command that starts the emitted training."""

    def refuse(self, launched: FinetunerTrial) -> None:
        """Raise UsageError for settings of a trial that it does not have."""
        self.refuse_untrainable(launched.cell)

    def environment(self, launched: FinetunerTrial) -> Mapping[str, str]:  # noqa: ARG002
        """Variables of a trial beside those of every one."""
        return {}

    @abstractmethod
    def own(self, launched: FinetunerTrial, emitted: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that are the trial's, by it and what is emitted for it; None: left out."""

    @abstractmethod
    def settled(
        self, launched: FinetunerTrial, config: dict[str, Any], base: OwnFile
    ) -> TrialFiles:
        """The files from all fields together, where some exclude each other."""

    @abstractmethod
    def start(self, launched: FinetunerTrial, words: tuple[str, ...]) -> tuple[str, ...]:
        """The command of a trial, by the words of its program."""


def is_ddp(cell: Cell) -> bool:
    """True if several GPUs have a copy of the model each, in NF4, and nothing is sharded."""
    return cell.settings.lora_base == "nf4" and 1 < cell.layout.replicate_degree == cell.layout.gpus


def trial_files(trainer: Finetuner, launched: FinetunerTrial, base: OwnFile) -> TrialFiles:
    """The files of a trial, over the user's; UsageError, with another way, for the untried."""
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
    changed = [name for name, value in kept.items() if config.get(name) != value]
    notes = [*found.notes, *told_of(base.source, changed, left)]
    said = config.get(trainer.attention, f"what {trainer.words.name} takes by itself")
    return found._replace(config=config, notes=(*notes, f"attention is {said}"))


def of_recomputation(launched: FinetunerTrial, base: OwnFile) -> bool:
    """True if the trainer's own switch recomputes: the user's where it is there and nobody named
    another. On GPUs FSDP recomputes where it does not; both at once are refused by transformers.
    """
    name = "gradient_checkpointing"
    if name in base.config and "recompute" not in launched.spec.settings.named:
        return bool(base.config[name])
    return launched.is_on_cpu and launched.spec.settings.recompute != "none"


def _refuse_untried(trainer: Finetuner, launched: FinetunerTrial) -> None:
    length_tokens, multiple = launched.spec.length_tokens, trainer.multiple
    refuse_unlaunched(launched.spec, name=trainer.words.name)
    trainer.refuse(launched)
    if length_tokens % multiple:
        near_tokens = length_tokens + -length_tokens % multiple
        raise UsageError(
            f"{trainer.words.name} pads each batch to a multiple of {multiple} tokens, and "
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
    """Emit the trial's settings, without flash attention where it is not there."""
    training = FineTuning(
        launched.cell,
        launched.spec.length_tokens,
        str(launched.place.model_directory),
        launched.yarn,
    )
    values: dict[str, Any] = nested(trainer.values(training))
    return values if launched.has_flash else {**values, **trainer.without_flash}


def _named(trainer: Finetuner, launched: FinetunerTrial) -> list[str]:
    """The fields of settings that somebody named, as far as that shows."""
    named = launched.spec.settings.named
    return [each for name, fields in trainer.by_setting.items() if name in named for each in fields]


def _picked(values: Mapping[str, Any], patterns: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if _is_one(name, patterns)}


def _is_one(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def trial_start(trainer: Finetuner) -> TrialStart:
    """The way that trials of a trainer start."""
    return TrialStart(partial(_prepare, trainer), partial(check_finetuner, trainer))


def _prepare(
    trainer: Finetuner, spec: TrialSpec, foreign: ForeignTrainer, home: TrialHome
) -> ForeignCommand:
    """The command of a trial, with its files written; HighwaterError for what cannot be told."""
    check_finetuner(trainer, spec, foreign, home.has_flash)
    folder = home.folder
    words = foreign.command or (trainer.program,)
    trial = launched(spec, _place(spec, folder), has_flash=home.has_flash(words[0]))
    files = trial_files(trainer, trial, finetuner_base(trainer, foreign))
    documents = DocumentOrder(
        path=str(folder / DOCUMENTS),
        kind="text",
        length_tokens=spec.length_tokens + trainer.more_tokens,
        count=(spec.steps + _MORE_STEPS) * trial.step_sequences,
    )
    model = home.prepared(documents)
    trial.place.model_directory.symlink_to(model, target_is_directory=True)
    said = (*missing_files(Path(spec.model_directory)).notes, *files.notes)
    write_files({trainer.file: files.config, **files.beside}, said, folder)
    return ForeignCommand(
        words=trainer.start(trial, words),
        environment={
            **QUIET,
            "DO_NOT_TRACK": "1",
            "HF_DATASETS_CACHE": str(folder / "datasets"),
            "PATH": path_of(words[0]),
            **trainer.environment(trial),
        },
        steps_done=partial(
            steps_of,
            step_tokens=trial.step_sequences * spec.length_tokens,
            shared_by=spec.layout.context_degree,
            counted=COUNTED,
        ),
    )


def check_finetuner(
    trainer: Finetuner, spec: TrialSpec, foreign: ForeignTrainer, has_flash: HasFlash
) -> tuple[str, ...]:
    """Notes of such trials for readers; HighwaterError for a trainer not here or not told so."""
    program = (foreign.command or (trainer.program,))[0]
    files = trial_files(
        trainer,
        launched(spec, _place(spec, Path("there")), has_flash=has_flash(program)),
        finetuner_base(trainer, foreign),
    )
    refuse_no_program(program, trainer.words.name, trainer.package, trainer.program)
    return files.notes


def finetuner_base(trainer: Finetuner, foreign: ForeignTrainer) -> OwnFile:
    """The user's own configuration of a trainer."""
    return own_file(foreign, f"name the file that `{trainer.program} {trainer.subcommand}` takes")


def launched(spec: TrialSpec, place: TrialPlace, *, has_flash: bool) -> FinetunerTrial:
    """The trial at its place, as its processes are told of it."""
    model = load_model(spec.model_directory)
    return FinetunerTrial(
        spec=spec,
        shape=model.shape,
        place=place,
        yarn=yarn(model, length_tokens=spec.length_tokens, rope=spec.settings.rope),
        has_flash=has_flash and fused_attention(model.shape) != "sdpa",
    )


def _place(spec: TrialSpec, folder: Path) -> TrialPlace:
    # Some know a model by what its directory is called.
    return TrialPlace(folder / Path(spec.model_name).name, folder, folder / OUTPUT)

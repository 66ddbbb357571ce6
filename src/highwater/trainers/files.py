"""Finetuners: trainers for supervised fine-tuning whose configuration is one YAML file, which is
emitted for a recommendation, and written for a trial.

A trial's file has the emitted fields for its settings, and the user's own. A field of the user's
stays unless it sets the length, the batch, how processes share the work, the data, the steps or the
output, which the trial sets. Fields that the user's file leaves out have the trainer's defaults;
without a file, the values of ``highwater emit``. A field that would make a trial prove something
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
    """What a file for a finetuner is written from: cell, length, model, rollout."""

    cell: Cell
    length_tokens: int
    model_path: str | None = None
    """The model's directory, or its id on the Hub; None: the command names it."""
    yarn: Yarn | None = None
    """YaRN for the length; None: not needed."""
    shape: ModelShape | None = None
    """The model's shape, for the choice of attention and loss; None: not on this machine."""
    rollout_gpus: int = 0
    """Number of GPUs set aside for a server that generates."""
    rollout: Rollout | None = None
    """The vLLM engine on the training's GPUs; None: without."""

    @property
    def sharing(self) -> SequenceSharing:
        """How accelerate shares the training's sequences among GPUs."""
        return sharing_of(self.cell.layout, self.shape)


DOCUMENTS = "documents.jsonl"
"""File of a trial's data: a text per line, at least as long as the trial's length."""
_MORE_STEPS = 1
"""Further steps of documents than a trial has: a trainer that packs or shuffles may drop some."""
COUNTED = "num_input_tokens_seen"
"""Optional count of transformers' trainer: tokens of all batches, with padding."""


class TrialPlace(NamedTuple):
    """Paths that the processes of a trial read and write."""

    model_directory: Path
    folder: Path
    """The trial's own folder, for configuration and data."""
    output: Path


class FinetunerTrial(NamedTuple):
    """A trial of a finetuner, with the paths that its processes use."""

    spec: TrialSpec
    shape: ModelShape
    place: TrialPlace
    yarn: Yarn | None = None
    """YaRN for the length; None: not needed."""
    has_flash: bool = False
    """True if flash-attn can be used: installed, and without wide heads in the model."""

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
    """Base of the external fine-tuning programs (Axolotl, LLaMA-Factory, ms-swift): makes a
    program's configuration file, for a user and for a trial.
    """

    name: ClassVar[ForeignName]
    words: ClassVar[Dialect]
    program: ClassVar[str]
    """Name of the trainer's program, as pip installs it."""
    package: ClassVar[str]
    """Name of the package with the program."""
    subcommand: ClassVar[str]
    file: ClassVar[str]
    """Name of the configuration file."""
    yarn: ClassVar[str | None] = None
    """Reason for YaRN's block in the model's config.json; None: the block is among the values."""
    unknown: ClassVar[str]
    """Words on a family whose loss the trainer does not fuse."""
    left_out: ClassVar[Collection[str]]
    """The user's fields on data, reports and checkpoints, which a trial drops; ``*``: any end."""
    ends: ClassVar[Mapping[str, Any]]
    """The last fields of every trial: no evaluation, no checkpoint, each step in the log."""
    refused: ClassVar[Mapping[str, str]]
    """Fields that a trial cannot take over from the user, and hints."""
    trains: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Fields for the kind of training, with the one value that trials have."""
    by_setting: ClassVar[Mapping[str, Collection[str]]]
    """The emitted fields of each setting of ours; ``*``: any end."""
    attention: ClassVar[str]
    """Name of the attention's field."""
    without_flash: ClassVar[Mapping[str, Any]]
    """Fields with other values without flash-attn; None: left out."""
    multiple: ClassVar[int] = 1
    """Tokens to whose multiple the trainer pads each batch."""
    more_tokens: ClassVar[int] = 0
    """Tokens of each document past the length: the trainer cuts it after adding its template."""
    has_copies: ClassVar[bool] = False
    """True if copies of shards can be written; False: only those of DDP, see ``is_ddp``."""

    def emit(
        self, found: Recommendation, chosen: Candidate, *, model_path: str | None = None
    ) -> Emitted:
        """Make a whole file, except for the data. Raises UsageError for inexpressible settings."""
        cell = chosen.cell
        self.refuse(cell)
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
            ),
            yarn=self.yarn,
            logits_bytes=None if self.fuses(training) else whole_logits_bytes(chosen, shape),
            beside=self.beside(training),
        )

    def refuse(self, cell: Cell) -> None:
        """Raise UsageError for an objective, a layout or an optimizer that the trainer lacks."""
        words, has_copies = self.words, self.has_copies or is_ddp(cell)

        def obstacle(objective: Objective, layout: Layout) -> str | None:
            other = words.other_objective(objective, is_written=True) or self.obstacle(layout)
            if other is None and layout.replicate_degree > 1 and not has_copies:
                return f"{words.name}'s states are sharded among all GPUs, without copies"
            return other

        refuse_obstacle(cell, obstacle)
        words.refuse_optimizer(cell.settings)

    def shared_otherwise(self, launched: FinetunerTrial) -> UsageError | None:  # noqa: ARG002
        """The error for a trial whose degrees of sharing the trainer would change; None: none."""
        return None

    def variables(self, settings: Settings) -> dict[str, str]:
        """Environment variables for the emitted command."""
        return environment(settings)

    def beside(self, training: FineTuning) -> Mapping[str, str]:  # noqa: ARG002
        """Contents of further files that the emitted one names, by name."""
        return {}

    def obstacle(self, layout: Layout) -> str | None:  # noqa: ARG002
        """Reason why no file can be written for a layout; None if it can."""
        return None

    @abstractmethod
    def fuses(self, training: FineTuning) -> bool:
        """True if the trainer's loss never holds all logits at once."""

    def why_unfused(self, layout: Layout) -> str:  # noqa: ARG002
        """Reason why the loss is not fused, for a training where it is not."""
        return self.unknown

    def cannot(self, training: FineTuning) -> list[str]:  # noqa: ARG002
        """Names of the settings that this trainer cannot express, besides those that none can."""
        return []

    @abstractmethod
    def said(self, training: FineTuning) -> list[str]:
        """Comment lines for the user: facts to know, and steps to do."""

    @abstractmethod
    def values(self, training: FineTuning) -> dict[str, Value]:
        """Fields of the emitted file: all that change memory, and placeholders for data."""

    @abstractmethod
    def command(self, training: FineTuning) -> str:
        """The command that starts the emitted training."""

    def environment(self, launched: FinetunerTrial) -> Mapping[str, str]:  # noqa: ARG002
        """Environment variables of a trial, besides those of all finetuners."""
        return {}

    @abstractmethod
    def own(self, launched: FinetunerTrial, emitted: Mapping[str, Any]) -> dict[str, Any]:
        """Fields that a trial sets over the user's and emitted ones; None removes a field."""

    @abstractmethod
    def settled(
        self, launched: FinetunerTrial, config: dict[str, Any], base: OwnFile
    ) -> TrialFiles:
        """The files of a trial, once fields that exclude each other are sorted out."""

    @abstractmethod
    def start(self, launched: FinetunerTrial, words: tuple[str, ...]) -> tuple[str, ...]:
        """The command that starts a trial; ``words`` are the trainer's program, as typed."""


def is_ddp(cell: Cell) -> bool:
    """True if each of several GPUs has its own copy of an NF4 model, and nothing is sharded."""
    return cell.settings.lora_base == "nf4" and 1 < cell.layout.replicate_degree == cell.layout.gpus


def trial_files(trainer: Finetuner, launched: FinetunerTrial, base: OwnFile) -> TrialFiles:
    """The files of a trial on top of the user's. Raises UsageError if either forbids it."""
    length_tokens, multiple = launched.spec.length_tokens, trainer.multiple
    refuse_unlaunched(launched.spec, name=trainer.words.name)
    trainer.refuse(launched.cell)
    if (shared_otherwise := trainer.shared_otherwise(launched)) is not None:
        raise shared_otherwise
    if length_tokens % multiple:
        near_tokens = length_tokens + -length_tokens % multiple
        raise UsageError(
            f"{trainer.words.name} pads each batch to a multiple of {multiple} tokens, and "
            f"{format_tokens(length_tokens)} are none",
            hint=f"use `--length {near_tokens}`; of a search `--start-length {near_tokens} "
            f"--resolution {multiple}` or multiples of them",
        )
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
    """Value of the trainer's own recomputation switch: the user's, if it is in the file and not
    named as a setting; else the setting on the CPU, and False on GPUs, where FSDP recomputes.
    """
    name = "gradient_checkpointing"
    if name in base.config and "recompute" not in launched.spec.settings.named:
        return bool(base.config[name])
    return launched.is_on_cpu and launched.spec.settings.recompute != "none"


def _emitted(trainer: Finetuner, launched: FinetunerTrial) -> dict[str, Any]:
    """The emitted fields of a trial's settings, without flash attention if it cannot be used."""
    training = FineTuning(
        launched.cell,
        launched.spec.length_tokens,
        str(launched.place.model_directory),
        launched.yarn,
    )
    values: dict[str, Any] = nested(trainer.values(training))
    return values if launched.has_flash else {**values, **trainer.without_flash}


def _named(trainer: Finetuner, launched: FinetunerTrial) -> list[str]:
    """Names of the emitted fields for settings that the user named, as far as recorded."""
    named = launched.spec.settings.named
    return [each for name, fields in trainer.by_setting.items() if name in named for each in fields]


def _picked(values: Mapping[str, Any], patterns: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if _is_one(name, patterns)}


def _is_one(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def trial_start(trainer: Finetuner) -> TrialStart:
    """How trials of a trainer are started."""

    def notes(spec: TrialSpec, foreign: ForeignTrainer, has_flash: HasFlash) -> tuple[str, ...]:
        return _checked(trainer, spec, foreign, has_flash, Path("there"))[1].notes

    return TrialStart(partial(_prepare, trainer), notes)


def _prepare(
    trainer: Finetuner, spec: TrialSpec, foreign: ForeignTrainer, home: TrialHome
) -> ForeignCommand:
    """Write a trial's files, and return its command. Raises the errors of ``_checked``."""
    folder, words = home.folder, foreign.command or (trainer.program,)
    trial, files = _checked(trainer, spec, foreign, home.has_flash, folder)
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


def _checked(
    trainer: Finetuner, spec: TrialSpec, foreign: ForeignTrainer, has_flash: HasFlash, folder: Path
) -> tuple[FinetunerTrial, TrialFiles]:
    """The trial in a folder, and the contents of its files. Raises HighwaterError if the trainer is
    missing or cannot express it.
    """
    program = (foreign.command or (trainer.program,))[0]
    trial = launched(spec, _place(spec, folder), has_flash=has_flash(program))
    files = trial_files(trainer, trial, finetuner_base(trainer, foreign))
    refuse_no_program(program, trainer.words.name, trainer.package, trainer.program)
    return trial, files


def finetuner_base(trainer: Finetuner, foreign: ForeignTrainer) -> OwnFile:
    """The user's own configuration file of a fine-tuning trainer."""
    return own_file(foreign, f"name the file that `{trainer.program} {trainer.subcommand}` takes")


def launched(spec: TrialSpec, place: TrialPlace, *, has_flash: bool) -> FinetunerTrial:
    """The trial with its paths, its model's shape, and YaRN if the length needs it."""
    model = load_model(spec.model_directory)
    return FinetunerTrial(
        spec=spec,
        shape=model.shape,
        place=place,
        yarn=yarn(model, length_tokens=spec.length_tokens, rope=spec.settings.rope),
        has_flash=has_flash and fused_attention(model.shape) != "sdpa",
    )


def _place(spec: TrialSpec, folder: Path) -> TrialPlace:
    # some trainers recognise a model by the name of its directory
    return TrialPlace(folder / Path(spec.model_name).name, folder, folder / OUTPUT)

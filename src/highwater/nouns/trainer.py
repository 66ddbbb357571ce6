"""Trainers: the registry, with a row for each system that trains.

A row names the trainer's module, which has the words of its configuration, its memory formula and
how a trial of it starts. ``TrainerParts`` imports the module when one of these is first used.

Foreign trainers: trainers other than this package's engine, in so far as trials are made of them.

``find`` and ``try`` start a foreign trainer's own entry point in processes of its own. A question
and a trial carry a ``ForeignTrainer``; trials/foreign_trial.py starts it.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, Literal, NamedTuple, Self, TypeVar, cast, get_args

import msgspec

from highwater.errors import UsageError
from highwater.nouns.codec import Record, digest
from highwater.nouns.declaration import Spelling
from highwater.nouns.objective import Objective, RolloutTraits
from highwater.nouns.secrets import hidden_words
from highwater.nouns.settings import Loss
from highwater.units import counted

TrainerName = Literal[
    "highwater",
    "trinity",
    "trl",
    "transformers",
    "accelerate",
    "llamafactory",
    "axolotl",
    "ms-swift",
    "verl",
]
"""Trainers whose memory is predicted: by ``PREDICTED`` and ``MEMORY`` of their own modules, or of
the module of the trainer by whose step they train."""
ForeignName = Literal["command", "accelerate", "trl", "llamafactory", "axolotl", "ms-swift"]
"""Trainers other than our engine that can be tried: by ``TRIED`` and ``TRIAL`` of their modules."""
TriedTrainer = Literal["highwater", ForeignName]
"""Names that ``find --trainer`` takes: this package's engine, or a foreign trainer."""
AnyTrainer = TrainerName | ForeignName
"""A trainer whose memory is predicted, or one that is only tried: either can have a capacity."""
Target = Literal[
    "trinity",
    "verl",
    "areal",
    "trl",
    "torchtitan",
    "accelerate",
    "axolotl",
    "llamafactory",
    "ms-swift",
]
"""Trainers that a configuration is emitted for: by ``TARGET`` of their modules."""
Traces = Literal["made", "bundled", "none"]

OURS: TrainerName = "highwater"
"""This package's engine: the trainer that is meant where none is named."""


class Registered(NamedTuple):
    """A trainer's row in the registry: its title, its module, and whose step it runs."""

    title: str
    """Its name as its users write it."""
    module: str
    """Name of its module, below ``highwater.trainers``."""
    trains_by: TrainerName | None = None
    """The trainer whose step it runs, by whose formula its memory is predicted. None: its own."""
    runs: str = ""
    """Words on runs that were compared with that formula; empty: no run was measured."""
    lacks: frozenset[str] = frozenset()
    """Settings of that step for which its own configuration has no words."""
    trained: str = ""
    """Words for what is trained with it, if it has no trainer itself."""
    tokens_field: str = ""
    """Field of its file for a GPU's tokens of a micro-batch; empty: it counts sequences."""


REGISTRY: Mapping[str, Registered] = {
    "highwater": Registered("highwater", "highwater"),
    "command": Registered("your command", "foreign"),
    "accelerate": Registered(
        *("accelerate", "accelerate", "transformers"),
        "the one search with accelerate that was measured held more",
        trained="accelerate's scripts",
    ),
    "trl": Registered("TRL", "trl", trained="TRL 1.16"),
    "transformers": Registered("Hugging Face", "hugging_face"),
    "llamafactory": Registered(
        "LLaMA-Factory", "llamafactory", "transformers", lacks=frozenset(("activations",))
    ),
    "axolotl": Registered("Axolotl", "axolotl", "transformers"),
    "ms-swift": Registered(
        "ms-swift", "ms_swift", "transformers", lacks=frozenset(("activations",))
    ),
    "verl": Registered("verl", "verl", "trinity", tokens_field="ppo_max_token_len_per_gpu"),
    "trinity": Registered("Trinity-RFT", "trinity", tokens_field="max_token_len_per_gpu"),
    "areal": Registered("AReaL", "areal"),
    "torchtitan": Registered("torchtitan", "torchtitan"),
}
NameT = TypeVar("NameT", bound=str)
PartT = TypeVar("PartT")


class TrainerParts(Mapping[NameT, PartT]):
    """One constant of every trainer's module by the trainer's name; imported when asked for."""

    def __init__(
        self, names: Any, constant: str, of_another: Callable[[PartT, str], PartT] | None = None
    ) -> None:
        """``names``: the ``Literal`` of the trainers' names. ``of_another``: derives a trainer's
        part from the part of the trainer whose step it uses, by name; None: all have their own.
        """
        self._names: tuple[NameT, ...] = get_args(names)
        self._constant = constant
        self._of_another = of_another

    def __getitem__(self, name: NameT) -> PartT:
        """The trainer's constant; its module is imported."""
        if name not in self._names:
            raise KeyError(name)
        other = REGISTRY[name].trains_by
        if other is not None and self._of_another is not None:
            return self._of_another(self[cast(NameT, other)], name)
        module = import_module(f"highwater.trainers.{REGISTRY[name].module}")
        return getattr(module, self._constant)

    def __contains__(self, name: object) -> bool:
        """True if the trainer's module has the constant; nothing is imported."""
        return name in self._names

    def __iter__(self) -> Iterator[NameT]:
        """Yield the names of trainers that have the constant; nothing is imported."""
        return iter(self._names)

    def __len__(self) -> int:
        """Number of trainers that have the constant."""
        return len(self._names)


IN_PLACE: Mapping[str, object] = {"offload": False, "activations": "gpu"}
"""Settings that leave everything on the GPU, as every trainer does that has no words for them."""
OF_OTHERS = {"deepspeed", "deepspeed_bucket", "liger", "paged"}
"""Settings that only those trainers have whose ``settings`` name them."""


class TrainerTraits(Record, frozen=True, kw_only=True):
    """What predictions of a trainer's step know: its defaults, and the settings it takes."""

    step: str
    """The step that is predicted, and what is particular about it, for a configuration's reader."""
    is_run: bool
    """True if its trials can run here. If not, no trial of ours says anything about it."""
    is_watched: bool = False
    """True if its trials are watched from outside: a foreign trainer with a memory formula."""
    settings: frozenset[str] | None = None
    """The fields of ``Request`` that may be named for it: what its memory depends on, the grid of
    lengths, and what takes no memory. None: every field."""
    traces: Traces
    """Traces of its step: made on demand, bundled for some models and layouts, or none."""
    ring_objectives: frozenset[Objective] | None = None
    """Objectives whose sequences it shares by a ring, if the model's layers allow that and nobody
    named a degree. None: it shares them by heads."""
    shards_packed: bool = False
    """True if it shards a model in NF4 unless copies are named; else each GPU has a copy."""
    offloads_states: bool = False
    """True if its optimizer's moments alone can be in host memory, at a step's peak too."""
    rollout: RolloutTraits = RolloutTraits()
    """Its defaults for an engine that generates beside it."""
    usual_sequences: int = 1
    """Sequences of a micro-batch where none are named."""
    reference_first: str = ""
    """Its setting by which a reference runs before training; empty: it has none."""
    loads_as_saved: bool = False
    """True if weights train in the dtype of their files, mostly bf16, unless a script says float32,
    which is what is predicted."""
    targets: tuple[Target, ...] = ()
    """Targets of ``highwater emit --for`` whose step is exactly this one, its own first: for no
    other it is a prediction. Without any its settings are typed as flags."""

    def refused(self, named: Iterable[str]) -> list[str]:
        """The fields of ``Request`` among ``named`` that it does not take, alphabetically."""
        known = self.settings
        return sorted({*named} & OF_OTHERS if known is None else {*named} - known)


def _composed(traits: TrainerTraits, name: str) -> TrainerTraits:
    """The traits of a trainer that runs another's step, derived from the other's."""
    row = REGISTRY[name]
    return traits.replace(
        step=f"{row.title}'s step, taken as {traits.step}",
        settings=traits.settings and traits.settings - row.lacks,
        is_run=name in FOREIGN,
        is_watched=name in FOREIGN,
        loads_as_saved=False,
        targets=(name,),
    )


TRAINERS: Mapping[TrainerName, TrainerTraits] = TrainerParts(TrainerName, "PREDICTED", _composed)
"""The traits of each trainer whose memory is predicted, by the name that ``--trainer`` takes."""


def predicted_trainer(name: str) -> TrainerName | None:
    """``name`` as a predicted trainer; None if that trainer's memory is not predicted."""
    return next((known for known in TRAINERS if known == name), None)


def predicted_traits(name: AnyTrainer) -> TrainerTraits | None:
    """The traits of a trainer whose memory is predicted; None if it can only be tried."""
    known = predicted_trainer(name)
    return None if known is None else TRAINERS[known]


def is_step_of(name: AnyTrainer, target: str) -> bool:
    """True if the prediction for ``name`` is of the very step that ``emit --for`` writes."""
    traits = predicted_traits(name)
    return traits is not None and target in traits.targets


def trainer_title(name: AnyTrainer | Target) -> str:
    """A trainer's name, for readers."""
    return REGISTRY[name].title


def known_runs(name: str, own_trials: int = 0) -> str:
    """Words on the trials that a prediction rests on: the user's, or published runs."""
    if own_trials:
        return f"its interval is learned from {counted(own_trials, 'trial')} of yours"
    row = REGISTRY[name]
    return row.runs or f"no run of {row.title} was measured"


def predicted_as(name: str, own_trials: int = 0) -> str:
    """``predicted for highwater``; for another trainer ``predicted``, and whose step stands for its
    own, if another's does, and what was measured.
    """
    row = REGISTRY[name]
    if row.trains_by is None:
        return "predicted for highwater" if name == OURS else "predicted"
    known = known_runs(name, own_trials) if own_trials else row.runs
    known = known or f"{row.title}'s own unmeasured"
    return f"predicted as {trainer_title(row.trains_by)}'s step, {known}"


def step_in_words(name: AnyTrainer) -> str:
    """A trainer's step in words, for readers of a configuration."""
    traits = predicted_traits(name)
    return trainer_title(name) if traits is None else traits.step


class ForeignTrainer(Record, frozen=True, kw_only=True):
    """A trainer that is not ours, as a trial runs it: its command, its file, its version."""

    trainer: ForeignName
    command: tuple[str, ...] = ()
    """``command``: the words that start it, with placeholders (nouns/foreign_request.py), secrets
    hidden; ``accelerate``: the words that it launches. If a trainer's command is made here: the
    words for its program; empty: its own name."""
    base_config_path: str | None = None
    """Absolute path of the user's own configuration, whose fields stay unless the question says
    otherwise; not in a key. None: there is none."""
    base_config_digest: str | None = None
    """Digest of the bytes in that file."""
    done_pattern: str | None = None
    """Pattern in the log of done steps; a group ``step`` is the number of steps so far. Empty: exit
    status 0 proves it. None: the usual signs of progress (trainers/logs.py)."""
    secrets_digest: str | None = None
    """Digest of the words as they were typed, where some of them are hidden: with another secret it
    is another question. It is too short to tell a secret by. None: none is hidden."""

    def __post_init__(self) -> None:
        """Hide secrets in the command, which is recorded; launchers get the command as typed."""
        if self.secrets_digest is None and (hidden := hidden_words(self.command)) != self.command:
            msgspec.structs.force_setattr(self, "secrets_digest", digest(self.command)[:4])
            msgspec.structs.force_setattr(self, "command", hidden)

    def as_typed(self, words: tuple[str, ...]) -> Self:
        """A copy with the command as typed, secrets included: to be started, never recorded."""
        typed = self.replace()
        msgspec.structs.force_setattr(typed, "command", words)
        return typed

    @property
    def title(self) -> str:
        """The trainer's display name."""
        return trainer_title(self.trainer)

    @property
    def typed(self) -> str:
        """The command as typed, with its placeholders; empty if the user typed none."""
        is_usual = self.command == (self.trainer,)
        return "" if is_usual else " ".join(map(_typed, self.command))

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags that name the trainer again: ``--trainer trl``."""
        named = (
            ("--command", self.typed or None),
            ("--trainer-config", self.base_config_path),
            ("--done-pattern", self.done_pattern),
        )
        told = (word for flag, value in named if value is not None for word in (flag, value))
        return ("--trainer", self.trainer, *told)


def _typed(word: str) -> str:
    """Quote a word of a command for a shell; placeholders in braces need no quotes."""
    bare = word.replace("{", "").replace("}", "")
    return word if bare and shlex.quote(bare) == bare else shlex.quote(word)


class ForeignTraits(Record, frozen=True, kw_only=True):
    """What a trainer that is not ours can be told in a trial, and how it is started."""

    settings: frozenset[str]
    """The fields of ``Request`` that may be named for it."""
    is_typed: bool = False
    """True if it is a command that the user types; else its configuration says what to start."""
    is_launched: bool = False
    """True if a launcher, which is told the layout, starts that command; else the command itself
    says how many processes there are, and how they share."""
    objectives: frozenset[Objective] | None = None
    """Objectives that its trials are written for. None: what it trains is its own affair."""
    has_run_on_gpus: bool = True
    """True if its trials were tried on GPUs; else only on the CPU."""
    loss: Loss = "full"
    """Loss of its rungs: ``chunked`` if its own loss never holds all logits at once."""

    def refused(self, named: Iterable[str]) -> list[str]:
        """The ``Request`` fields in ``named`` that the trainer cannot be told, sorted."""
        return sorted(set(named) - self.settings)


FROM_OUTSIDE = frozenset(
    (
        *("model", "trainer", "done_pattern", "device", "gpus", "memory", "allocator", "headroom"),
        *("start_length", "resolution", "max_length", "method", "proof", "budget", "timeout"),
        *("confirm", "steps", "log_dir", "study", "retry_crashed", "no_diagnose", "allow_busy"),
        *("max_concurrent_trials", "runner", "address"),
    )
)
"""Fields of ``Request`` that apply to any trainer, without a setting of its own."""

SHARED = {*("ulysses", "ring", "copies", "micro_batches", "sequences_per_micro_batch")}
"""Fields that say how GPUs share the work."""
OF_FINETUNERS = FROM_OUTSIDE | {
    *("command", "trainer_config", "micro_batches", "sequences_per_micro_batch", "optimizer"),
    *("recompute", "offload", "lora", "lora_alpha", "lora_targets", "lora_base"),
}
"""Fields that every trainer for supervised fine-tuning can be told."""

FOREIGN: Mapping[ForeignName, ForeignTraits] = TrainerParts(ForeignName, "TRIED")
"""The traits of each foreign trainer, by the name that ``--trainer`` takes."""

BY_COMMAND: Mapping[str, str] = {
    name: REGISTRY[name].title for name in get_args(Target) if name not in FOREIGN
}
"""Titles of trainers that ``emit`` writes for and that only a user's own command starts, by the
name that may be typed after ``--trainer``: no step of theirs was seen on the CPU."""
PAGE = "docs/other_trainers.md"
"""Document with these commands."""


def foreign_name(name: str) -> ForeignName | None:
    """``name`` as a foreign trainer; None if it is none, as our engine."""
    return next((known for known in FOREIGN if known == name), None)


_INSTEAD: Mapping[str, str] = {
    "dry_run": "leave `--dry-run` out: trials alone tell, or formulas of some in predict",
    "trainer_config": "name the file in the command itself, as one of its words",
    "command": "leave `--command` out, or use `--trainer command`",
    "rollout": "leave `rollout` out: `highwater predict` says what one takes, and no trial has any",
}
"""Hints for refused settings that are not the engine's alone."""


def refuse_inexpressible(trainer: ForeignName, named: Iterable[str], spelling: Spelling) -> None:
    """Raise UsageError for the first setting in ``named`` that a foreign trainer cannot be told."""
    title = f"`--trainer {trainer}`" if FOREIGN[trainer].is_typed else trainer_title(trainer)
    for name in FOREIGN[trainer].refused(named):
        hint, words = _INSTEAD.get(name), name.replace("_", " ")
        if hint is not None:
            raise UsageError(f"{spelling.where}{title} takes no {words}", hint=hint)
        leave = f"leave `{spelling.name(name)}` out"
        raise UsageError(
            f"{spelling.where}{title} cannot be told {words}: that is a setting of "
            "this package's engine",
            hint=f"{leave}, and say it in the command" if FOREIGN[trainer].is_typed else leave,
        )

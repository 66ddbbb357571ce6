"""Trainers: the registry, with a row for each system that trains.

A row names the module that has all the rest: the words of the trainer's configuration, its memory
law, how a trial of it starts. It is imported when a part of it is asked for, by ``TrainerParts``.
"""

from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from highwater.nouns.codec import Record
from highwater.nouns.objective import Objective

TrainerName = Literal["highwater", "trinity", "trl"]
"""Trainers whose memory is predicted: their modules have ``PREDICTED`` and ``MEMORY``."""
ForeignName = Literal["command", "accelerate", "trl", "llamafactory", "axolotl", "ms-swift"]
"""Trainers that are tried and are not this package's engine: ``TRIED`` and ``TRIAL``."""
TriedTrainer = Literal[
    "highwater", "command", "accelerate", "trl", "llamafactory", "axolotl", "ms-swift"
]
"""What ``find --trainer`` takes: this package's engine, or a foreign trainer."""
AnyTrainer = TrainerName | ForeignName
"""Whoever found a capacity: a trainer whose memory is predicted, or one that is tried alone."""
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
"""Whom a configuration is emitted for: ``TARGET``."""
Traces = Literal["made", "bundled", "none"]

OURS: TrainerName = "highwater"
"""This package's engine: the trainer that is meant where none is named."""


class Registered(NamedTuple):
    """A trainer's row."""

    title: str
    """Its name as its users write it."""
    module: str
    """What is known of it, below ``highwater.trainers``."""


REGISTRY: Mapping[str, Registered] = {
    "highwater": Registered("highwater", "highwater"),
    "command": Registered("your command", "foreign"),
    "accelerate": Registered("accelerate", "accelerate"),
    "trl": Registered("TRL", "trl"),
    "llamafactory": Registered("LLaMA-Factory", "llamafactory"),
    "axolotl": Registered("Axolotl", "axolotl"),
    "ms-swift": Registered("ms-swift", "ms_swift"),
    "verl": Registered("verl", "verl"),
    "trinity": Registered("Trinity-RFT", "trinity"),
    "areal": Registered("AReaL", "areal"),
    "torchtitan": Registered("torchtitan", "torchtitan"),
}
NameT = TypeVar("NameT", bound=str)
PartT = TypeVar("PartT")


class TrainerParts(Mapping[NameT, PartT]):
    """One part of each trainer that has it, by the trainer's name: a constant of its module."""

    def __init__(self, names: Any, constant: str) -> None:
        """``names``: the ``Literal`` of their names."""
        self._names: tuple[NameT, ...] = get_args(names)
        self._constant = constant

    def __getitem__(self, name: NameT) -> PartT:
        """The part of a trainer, whose module is imported by now."""
        if name not in self._names:
            raise KeyError(name)
        module = import_module(f"highwater.trainers.{REGISTRY[name].module}")
        return getattr(module, self._constant)

    def __contains__(self, name: object) -> bool:
        """Whether a trainer has the part; nothing is imported."""
        return name in self._names

    def __iter__(self) -> Iterator[NameT]:
        """The names; nothing is imported."""
        return iter(self._names)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._names)


class TrainerTraits(Record, frozen=True, kw_only=True):
    """What is known of one trainer."""

    step: str
    """The step that is predicted, and what is particular about it, for readers of a
    configuration."""
    is_run: bool
    """Whether its trials are run here. If not, no trial of ours says anything about it."""
    is_watched: bool = False
    """Whether its trials are watched from outside: a foreign trainer, whose formula is known."""
    settings: frozenset[str] | None = None
    """The fields of ``Request`` that may be named for it: what its memory depends on, what names a
    grid of lengths, and what takes no memory. None: every field."""
    traces: Traces
    """Traces of its step: made when somebody asks for them, bundled with the package, for some
    models and layouts, or none."""
    ring_objectives: frozenset[Objective] | None = None
    """Objectives whose sequences it shares round a ring, where the model's layers allow that and
    nobody named a degree. None: it shares them by heads."""
    offloads_states: bool = False
    """Whether its optimizer's moments can be in host memory by themselves, at a step's peak too."""
    targets: tuple[str, ...] = ()
    """Names in ``highwater emit --for`` of the configurations whose very step this is, its own
    first: no other is predicted. Without any its settings are typed as flags."""

    @property
    def knows_every_setting(self) -> bool:
        """Whether any field of ``Request`` may be named for it."""
        return self.settings is None

    def refused(self, named: Iterable[str]) -> list[str]:
        """The fields of ``Request`` among ``named`` that may not be named for this trainer, in
        alphabetical order.
        """
        known = self.settings
        return [] if known is None else sorted(set(named) - known)


TRAINERS: Mapping[TrainerName, TrainerTraits] = TrainerParts(TrainerName, "PREDICTED")
"""The traits of each trainer whose memory is predicted, by the name that ``--trainer`` takes."""


def predicted_trainer(name: AnyTrainer) -> TrainerName | None:
    """The trainer, where its memory is predicted; None of one that is tried alone."""
    return next((known for known in TRAINERS if known == name), None)


def predicted_traits(name: AnyTrainer) -> TrainerTraits | None:
    """The traits of a trainer whose memory is predicted; None of one that is tried alone."""
    known = predicted_trainer(name)
    return None if known is None else TRAINERS[known]


def is_step_of(name: AnyTrainer, target: str) -> bool:
    """Whether a trainer's predicted step is the very one of an ``emit`` target's configuration."""
    traits = predicted_traits(name)
    return traits is not None and target in traits.targets


def trainer_title(name: AnyTrainer | Target) -> str:
    """A trainer's name, for readers."""
    return REGISTRY[name].title


def step_in_words(name: AnyTrainer) -> str:
    """Whose step it is, for readers of a configuration."""
    traits = predicted_traits(name)
    return trainer_title(name) if traits is None else traits.step

"""Trainers: the systems that train, a row for each with what everybody may know of it.

The code that a trainer brings is registered where it can be imported: its formula and its replay in
memory/trainers.py, the step that is traced in engine/tracer/trainers.py, its configuration in
trainers/targets.py.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

from highwater.nouns.codec import Record
from highwater.nouns.foreign_trainer import FOREIGN, ForeignName
from highwater.nouns.objective import Objective

TrainerName = Literal["highwater", "trinity", "trl"]
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
"""Whom a configuration is emitted for."""
Traces = Literal["made", "bundled", "none"]

OURS: TrainerName = "highwater"
"""This package's engine: the trainer that is meant where none is named."""


class TrainerTraits(Record, frozen=True, kw_only=True):
    """What is known of one trainer."""

    title: str
    """The trainer's name, for readers."""
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


TRAINERS: Mapping[TrainerName, TrainerTraits] = {
    "highwater": TrainerTraits(
        title="highwater",
        step="highwater's own engine, with its tiles, chunks and kernels",
        is_run=True,
        traces="made",
        offloads_states=True,
    ),
    "trinity": TrainerTraits(
        title="Trinity-RFT",
        step="Trinity-RFT's trainer, which is verl's actor",
        is_run=False,
        settings=frozenset(
            (
                *("ulysses", "allocator", "offload", "sequences_per_micro_batch", "token_budget"),
                *("rope", "headroom", "start_length", "resolution", "max_length"),
                *("lora", "lora_alpha", "lora_targets"),
            )
        ),
        traces="bundled",
        targets=("trinity", "verl"),
    ),
    "trl": TrainerTraits(
        title=FOREIGN["trl"].title,
        step="TRL's trainer, which accelerate launches",
        is_run=True,
        is_watched=True,
        settings=frozenset(
            (
                *("ulysses", "ring", "copies", "strategy", "allocator", "recompute", "offload"),
                *("sequences_per_micro_batch", "micro_batches", "objective", "entropy", "loss"),
                *("optimizer", "lora", "lora_alpha", "lora_targets", "lora_base"),
                *("rope", "headroom", "start_length", "resolution", "max_length"),
            )
        ),
        traces="none",
        ring_objectives=frozenset(("sft",)),
        targets=("trl", "accelerate"),
    ),
}
"""The traits of each trainer, by the name that ``--trainer`` takes."""


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


def trainer_title(name: AnyTrainer) -> str:
    """A trainer's name, for readers."""
    titles = {known: traits.title for known, traits in (*TRAINERS.items(), *FOREIGN.items())}
    return titles[name]


def step_in_words(name: AnyTrainer) -> str:
    """Whose step it is, for readers of a configuration."""
    traits = predicted_traits(name)
    return trainer_title(name) if traits is None else traits.step

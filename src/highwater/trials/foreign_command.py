"""A foreign command: what is started for one trial of a foreign trainer, and who writes it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from highwater.nouns.foreign_trainer import ForeignTrainer
from highwater.nouns.protocols import OnPhase
from highwater.nouns.trial import TrialSpec

OUTPUT = "output"
"""Folder within a trial's own in which its trainer may write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignCommand:
    """What is started for one trial."""

    words: tuple[str, ...]
    """The command; its first word is a program's path or name."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables beside those that every trial has."""
    steps_done: Callable[[str], int] | None = None
    """Steps that are done by the log's text (and by files, if the trainer leaves some). None: by
    the question's pattern, or by the usual signs of progress."""


Prepare = Callable[[TrialSpec, ForeignTrainer, Path, Event, OnPhase], ForeignCommand]
"""Makes the command of a trial. The folder is there, empty but for ``output``, the trial's alone,
and gone after it. The event and the listener are the launch's. Raises HighwaterError for what the
trainer cannot be told, and TrialEndedError where the trial is ended meanwhile."""

Check = Callable[[TrialSpec, ForeignTrainer], tuple[str, ...]]
"""Says before anything starts what a reader should know of such trials. Raises HighwaterError for
what the trainer cannot be told, and where it is not here."""

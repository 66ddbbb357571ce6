"""Foreign commands: how a trial of each foreign trainer is started, a row for each.

A row writes what the trainer reads (configuration, data) into the trial's own folder, and says what
to start and how its log shows the steps that are done. Everything else is the same for all
(run/foreign_trial.py): environment, limits, log, peak, outcome.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from highwater.spec.command_template import filled_command
from highwater.spec.foreign_trainer import ForeignName, ForeignTrainer
from highwater.spec.trial import TrialSpec

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


Prepare = Callable[[TrialSpec, ForeignTrainer, Path], ForeignCommand]
"""Makes the command of a trial. The folder is there, empty but for ``output``, the trial's alone,
and gone after it. Raises HighwaterError for what the trainer cannot be told."""


def prepare_command(spec: TrialSpec, foreign: ForeignTrainer, folder: Path) -> ForeignCommand:
    """The user's own command with the trial's values in it."""
    return ForeignCommand(words=filled_command(foreign.command, spec, folder / OUTPUT))


PREPARE: Mapping[ForeignName, Prepare] = {"command": prepare_command}
"""How trials of each foreign trainer are prepared."""

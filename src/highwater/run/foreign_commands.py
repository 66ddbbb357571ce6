"""Foreign commands: how a trial of each foreign trainer is started, a row for each.

A row writes what the trainer reads (configuration, data) into the trial's own folder, and says what
to start and how its log shows the steps that are done. Everything else is the same for all
(run/foreign_trial.py): environment, limits, log, peak, outcome.
"""

from collections.abc import Mapping
from pathlib import Path

from highwater.run.foreign_command import OUTPUT, Check, ForeignCommand, Prepare
from highwater.run.trl_trial import check_trl, prepare_trl
from highwater.spec.command_template import filled_command
from highwater.spec.foreign_trainer import ForeignName, ForeignTrainer
from highwater.spec.trial import TrialSpec

__all__ = ["CHECK", "OUTPUT", "PREPARE", "ForeignCommand", "Prepare", "prepare_command"]


def prepare_command(spec: TrialSpec, foreign: ForeignTrainer, folder: Path) -> ForeignCommand:
    """The user's own command with the trial's values in it."""
    return ForeignCommand(words=filled_command(foreign.command, spec, folder / OUTPUT))


PREPARE: Mapping[ForeignName, Prepare] = {"command": prepare_command, "trl": prepare_trl}
"""How trials of each foreign trainer are prepared."""
CHECK: Mapping[ForeignName, Check] = {"trl": check_trl}
"""What is looked at before the first trial of a foreign trainer, where there is anything."""

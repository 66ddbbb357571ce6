"""Foreign commands: how a trial of each foreign trainer is started, a row for each.

A row writes what the trainer reads (configuration, data) into the trial's own folder, and says what
to start and how its log shows the steps that are done. Everything else is the same for all
(trials/foreign_trial.py): environment, limits, log, peak, outcome.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from threading import Event

from highwater.nouns.command_template import filled_command
from highwater.nouns.foreign_trainer import ForeignName, ForeignTrainer
from highwater.nouns.protocols import OnPhase
from highwater.nouns.trial import TrialSpec
from highwater.trainers.axolotl_files import AXOLOTL
from highwater.trainers.llamafactory_files import LLAMAFACTORY
from highwater.trainers.ms_swift_files import MS_SWIFT
from highwater.trials.accelerate_trial import check_accelerate, prepare_accelerate
from highwater.trials.finetuner_trial import check_finetuner, prepare_finetuner
from highwater.trials.foreign_command import OUTPUT, Check, ForeignCommand, Prepare
from highwater.trials.trl_trial import check_trl, prepare_trl


def prepare_command(
    spec: TrialSpec,
    foreign: ForeignTrainer,
    folder: Path,
    ended: Event,  # noqa: ARG001 - nothing takes time
    on_phase: OnPhase,  # noqa: ARG001
) -> ForeignCommand:
    """The user's own command with the trial's values in it."""
    return ForeignCommand(words=filled_command(foreign.command, spec, folder / OUTPUT))


_FINETUNERS = (LLAMAFACTORY, AXOLOTL, MS_SWIFT)
"""Trainers whose trials are a file of YAML."""
PREPARE: Mapping[ForeignName, Prepare] = {
    "command": prepare_command,
    "accelerate": prepare_accelerate,
    "trl": prepare_trl,
    **{each.name: partial(prepare_finetuner, each) for each in _FINETUNERS},
}
"""How trials of each foreign trainer are prepared."""
_CHECK: Mapping[ForeignName, Check] = {
    "accelerate": check_accelerate,
    "trl": check_trl,
    **{each.name: partial(check_finetuner, each) for each in _FINETUNERS},
}
"""What is looked at before the first trial of a foreign trainer, where there is anything."""


def check_foreign(specs: Iterable[TrialSpec]) -> tuple[str, ...]:
    """What a reader should know of these trials before the first one, each sentence once.

    Raises HighwaterError for what their trainer cannot be told, and where it is not here.
    """
    said: dict[str, None] = {}
    for spec in specs:
        check = None if spec.foreign is None else _CHECK.get(spec.foreign.trainer)
        if check is not None and spec.foreign is not None:
            said |= dict.fromkeys(check(spec, spec.foreign))
    return tuple(said)

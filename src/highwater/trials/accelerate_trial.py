"""A trial of accelerate: its configuration and, where the model's directory is not whole, one to
train from, before ``accelerate launch`` starts the user's own script.
"""

from pathlib import Path
from threading import Event
from typing import Any

import yaml

from highwater.model.model import load_model
from highwater.nouns.corpus import missing_files
from highwater.nouns.foreign_request import (
    base_config,
    filled_command,
    launched_command,
    placeholders_of,
)
from highwater.nouns.foreign_trainer import ForeignTrainer
from highwater.nouns.protocols import OnPhase
from highwater.nouns.trial import TrialSpec
from highwater.trainers.accelerate import FILE, LauncherFile, launcher_file
from highwater.trainers.emitted import comment
from highwater.trials.foreign_command import OUTPUT, ForeignCommand, yaml_fields
from highwater.trials.inputs import prepared_model, refuse_full_disk

_HINT = "name the file that `accelerate config` wrote"


def prepare_accelerate(
    spec: TrialSpec, foreign: ForeignTrainer, folder: Path, ended: Event, on_phase: OnPhase
) -> ForeignCommand:
    """The command of a trial that accelerate launches, whose file is written into the folder.

    Raises HighwaterError for what accelerate cannot be told, and where nothing can be prepared.
    """
    found = _file(spec, foreign)
    text = yaml.safe_dump(found.values, sort_keys=False, allow_unicode=True)
    (folder / FILE).write_text(comment(list(found.notes)) + text, encoding="utf-8")
    model = prepared_model(spec, ended, on_phase) if _opens_model(foreign) else None
    program, words = launched_command(foreign.command)
    filled = filled_command((program, *words), spec, folder / OUTPUT, model=model)
    return ForeignCommand(
        words=(filled[0], "launch", "--config_file", str(folder / FILE), *filled[1:])
    )


def check_accelerate(spec: TrialSpec, foreign: ForeignTrainer) -> tuple[str, ...]:
    """What a reader should know of such trials, before the first one.

    Raises HighwaterError for what accelerate cannot be told, and for a disk without room.
    """
    notes = _file(spec, foreign).notes
    if not _opens_model(foreign):
        return notes
    refuse_full_disk(spec)
    return (*missing_files(Path(spec.model_directory)).notes, *notes)


def _file(spec: TrialSpec, foreign: ForeignTrainer) -> LauncherFile:
    base: dict[str, Any] = {}
    content = base_config(foreign)
    path = Path(foreign.base_config_path or FILE)
    if content is not None:
        base = yaml_fields(content, path, hint=_HINT)
    return launcher_file(spec, load_model(spec.model_directory).shape, base, source=path.name)


def _opens_model(foreign: ForeignTrainer) -> bool:
    """Whether the command is told the model's directory."""
    return "model" in placeholders_of(foreign.command)

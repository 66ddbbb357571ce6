"""A trial of a trainer for supervised fine-tuning whose configuration is YAML: that file, the
documents and, where the model's directory is not whole, one to train from, written before the
trainer's own entry point is started.
"""

import json
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import yaml

from highwater.errors import MachineError
from highwater.model.model import load_model
from highwater.model.rope import yarn
from highwater.nouns.corpus import DocumentOrder, missing_files
from highwater.nouns.foreign_request import base_config
from highwater.nouns.foreign_trainer import ForeignTrainer
from highwater.nouns.protocols import OnPhase
from highwater.nouns.trial import TrialSpec
from highwater.trainers.emitted import comment
from highwater.trainers.finetuner_files import (
    COUNTED,
    DOCUMENTS,
    Finetuner,
    FinetunerTrial,
    OwnFile,
    TrialPlace,
    trial_files,
)
from highwater.trials.foreign_command import (
    OUTPUT,
    ForeignCommand,
    python_of,
    versions_there,
    yaml_fields,
)
from highwater.trials.foreign_log import steps_of
from highwater.trials.inputs import prepared_model, refuse_full_disk

_FLASH = "flash-attn"
_QUIET = {"HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled", "DO_NOT_TRACK": "1"}
_MORE_STEPS = 1
"""Steps of documents beyond those of a trial: a trainer that packs or shuffles may leave some."""


def prepare_finetuner(
    trainer: Finetuner,
    spec: TrialSpec,
    foreign: ForeignTrainer,
    folder: Path,
    ended: Event,
    on_phase: OnPhase,
) -> ForeignCommand:
    """The command of a trial, whose files are written into the folder.

    Raises HighwaterError for what the trainer cannot be told, and where nothing can be prepared.
    """
    check_finetuner(trainer, spec, foreign)
    words = foreign.command or (trainer.program,)
    launched = _launched(spec, folder, words[0])
    files = trial_files(trainer, launched, base_of(trainer, foreign))
    documents = DocumentOrder(
        path=str(folder / DOCUMENTS),
        kind="text",
        length_tokens=spec.length_tokens + trainer.more_tokens,
        count=(spec.steps + _MORE_STEPS) * launched.step_sequences,
    )
    model = prepared_model(spec, ended, on_phase, documents=documents)
    launched.place.model_directory.symlink_to(model, target_is_directory=True)
    said = (*missing_files(Path(spec.model_directory)).notes, *files.notes)
    _write({trainer.file: files.config, **files.beside}, said, folder)
    return ForeignCommand(
        words=trainer.start(launched, words),
        environment={
            **_QUIET,
            "HF_DATASETS_CACHE": str(folder / "datasets"),
            "PATH": _path(words[0]),
            **trainer.environment(launched),
        },
        steps_done=partial(
            steps_of,
            step_tokens=launched.step_sequences * spec.length_tokens,
            shared_by=spec.layout.context_degree,
            counted=COUNTED,
        ),
    )


def check_finetuner(
    trainer: Finetuner, spec: TrialSpec, foreign: ForeignTrainer
) -> tuple[str, ...]:
    """What a reader should know of such trials, before the first one.

    Raises HighwaterError for what the trainer cannot be told, and where it is not here.
    """
    program = (foreign.command or (trainer.program,))[0]
    files = trial_files(trainer, _launched(spec, Path("there"), program), base_of(trainer, foreign))
    if shutil.which(program) is None:
        raise MachineError(
            f"{trainer.words.name} is not found: there is no program {program}",
            hint=f"`pip install {trainer.package}`, or name where it is: "
            f"`--command /path/to/{trainer.program}`",
        )
    refuse_full_disk(spec)
    return (*missing_files(Path(spec.model_directory)).notes, *files.notes)


def base_of(trainer: Finetuner, foreign: ForeignTrainer) -> OwnFile:
    """The user's own configuration.

    Raises UsageError for a file that cannot be read, or is no YAML of named fields.
    """
    content = base_config(foreign)
    if content is None or foreign.base_config_path is None:
        return OwnFile()
    path = Path(foreign.base_config_path)
    hint = f"name the file that `{trainer.program} {trainer.subcommand}` takes"
    return OwnFile(config=yaml_fields(content, path, hint=hint), source=path.name)


def _launched(spec: TrialSpec, folder: Path, program: str) -> FinetunerTrial:
    model, python = load_model(spec.model_directory), python_of(program)
    # Some know a model by what its directory is called.
    place = TrialPlace(folder / Path(spec.model_name).name, folder, folder / OUTPUT)
    return FinetunerTrial(
        spec=spec,
        shape=model.shape,
        place=place,
        yarn=yarn(model, length_tokens=spec.length_tokens, rope=spec.settings.rope),
        has_flash=python is not None and _FLASH in versions_there(python, (_FLASH,)),
    )


def _path(program: str) -> str:
    """PATH with the program's own folder first: it starts others of its environment by name."""
    found, path = shutil.which(program), os.environ.get("PATH", os.defpath)
    return path if found is None else f"{Path(found).absolute().parent}{os.pathsep}{path}"


def _write(files: Mapping[str, Any], said: tuple[str, ...], folder: Path) -> None:
    for name, values in files.items():
        if name.endswith(".json"):
            text = json.dumps(values, indent=2) + "\n"
        else:
            dumped = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
            text = comment(list(said)) + dumped
        (folder / name).write_text(text, encoding="utf-8")

"""A trial of TRL: its configuration, the documents and, where the model's directory is not whole,
a directory to train from, written before ``trl sft`` or ``trl grpo`` is started.
"""

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from threading import Event

import yaml

from highwater.errors import MachineError, UsageError
from highwater.model.model import load_model
from highwater.model.rope import yarn
from highwater.nouns.corpus import DocumentOrder, missing_files
from highwater.nouns.files import SETTINGS_BYTES, read_file
from highwater.nouns.foreign_request import base_config
from highwater.nouns.foreign_trainer import ForeignTrainer
from highwater.nouns.protocols import OnPhase
from highwater.nouns.trial import TrialSpec
from highwater.trainers.accelerate import FILE
from highwater.trainers.emitted import comment
from highwater.trainers.trl import COMMANDS
from highwater.trainers.trl_files import (
    CONFIG,
    TRIED,
    Base,
    Launched,
    TrialFiles,
    batch_of,
    document_tokens,
    refuse_untried,
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

PROGRAM = "trl"
_HINT = "name the file that `trl sft --config` takes"
_DOCUMENTS = "documents.jsonl"
_FLASH = "flash-attn"
_OFFLINE = {"HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled"}


def prepare_trl(
    spec: TrialSpec, foreign: ForeignTrainer, folder: Path, ended: Event, on_phase: OnPhase
) -> ForeignCommand:
    """The command of a trial of TRL, whose files are written into the folder.

    Raises HighwaterError for what TRL cannot be told, and where nothing can be prepared.
    """
    check_trl(spec, foreign)
    base, words = base_of(foreign), foreign.command or (PROGRAM,)
    model = prepared_model(spec, ended, on_phase, documents=_documents(spec, base, folder))
    launched = _launched(spec, model, folder, words[0])
    files = trial_files(launched, base)
    said = (*missing_files(Path(spec.model_directory)).notes, *files.notes)
    _write(files, said, folder)
    step_tokens = batch_of(spec, base.config).sequences * spec.length_tokens
    return ForeignCommand(
        words=(*words, COMMANDS[spec.settings.objective].name, "--config", str(folder / CONFIG)),
        environment={**_OFFLINE, "HF_DATASETS_CACHE": str(folder / "datasets")},
        steps_done=partial(steps_of, step_tokens=step_tokens, shared_by=spec.layout.context_degree),
    )


def check_trl(spec: TrialSpec, foreign: ForeignTrainer) -> tuple[str, ...]:
    """What a reader should know of such trials, before the first one.

    Raises HighwaterError for what TRL cannot be told, and where it is not here.
    """
    refuse_untried(spec, load_model(spec.model_directory).shape)
    base, program = base_of(foreign), (foreign.command or (PROGRAM,))[0]
    _refuse_no_program(program)
    refuse_full_disk(spec)
    nowhere = Path("there")
    files = trial_files(_launched(spec, nowhere, nowhere, program), base)
    batch = batch_of(spec, base.config)
    said = [*missing_files(Path(spec.model_directory)).notes, *files.notes]
    said += [f"attention is {files.config.get('attn_implementation', 'what TRL takes by itself')}"]
    if batch.micro_batches != spec.micro_batches:
        said.append(f"a step has {batch.micro_batches} micro-batches: whole groups of completions")
    if "max_completion_length" in files.config:
        said.append(
            f"each sequence is a prompt and {files.config['max_completion_length']} tokens that "
            "are generated one by one, which takes most of the time: `max_completion_length` in "
            "`--trainer-config` names fewer, and the prompt has the others"
        )
    return tuple(said)


def _launched(spec: TrialSpec, model_directory: Path, folder: Path, program: str) -> Launched:
    model = load_model(spec.model_directory)
    return Launched(
        spec=spec,
        model=model.shape,
        yarn=yarn(model, length_tokens=spec.length_tokens, rope=spec.settings.rope),
        model_directory=model_directory,
        documents=folder / _DOCUMENTS,
        output=folder / OUTPUT,
        launcher=folder / FILE,
        has_flash=_FLASH in _versions(program),
    )


def base_of(foreign: ForeignTrainer) -> Base:
    """The user's own configuration, and accelerate's that it names by a path.

    Raises UsageError for files that cannot be read, or are no YAML of named fields.
    """
    content = base_config(foreign)
    if content is None or foreign.base_config_path is None:
        return Base()
    path = Path(foreign.base_config_path)
    config = yaml_fields(content, path, hint=_HINT)
    named = config.get("accelerate_config")
    if named is None:
        return Base(config=config, source=path.name)
    beside = Path(path.parent, str(named))
    if not beside.is_file():
        raise UsageError(
            f"{path.name} names accelerate's configuration {named}, which is no file beside it",
            hint="leave `accelerate_config` out: a trial says how processes share the work",
        )
    launcher = yaml_fields(read_file(beside, most_bytes=SETTINGS_BYTES), beside, hint=_HINT)
    return Base(config=config, launcher=launcher, source=path.name)


def _refuse_no_program(program: str) -> None:
    """Raise MachineError where the program that starts TRL is not found."""
    if shutil.which(program) is None:
        raise MachineError(
            f"TRL is not found: there is no program {program}",
            hint="`pip install trl`, or name where it is: `--command /path/to/trl`",
        )


def _versions(program: str) -> Mapping[str, str]:
    """Versions of the packages that decide what is emitted, in the Python that starts TRL."""
    python = python_of(program)
    return {} if python is None else versions_there(python, (PROGRAM, _FLASH))


def _documents(spec: TrialSpec, base: Base, folder: Path) -> DocumentOrder:
    end = base.config.get("eos_token")
    return DocumentOrder(
        path=str(folder / _DOCUMENTS),
        kind=TRIED[spec.settings.objective],
        length_tokens=document_tokens(spec, base.config),
        count=spec.steps * batch_of(spec, base.config).sequences,
        end=None if end is None else str(end),
    )


def _write(files: TrialFiles, said: tuple[str, ...], folder: Path) -> None:
    for name, values in ((CONFIG, files.config), (FILE, files.launcher)):
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        (folder / name).write_text(comment(list(said)) + text, encoding="utf-8")

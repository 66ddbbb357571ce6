"""What is started for one trial of a foreign trainer, with the files that it reads: configuration,
documents and, where the model's directory is not whole, one to train from.

accelerate launches the user's own script, ``trl sft`` and ``trl grpo`` take two files, trainers for
supervised fine-tuning one of YAML. What their Pythons have is asked from outside.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from threading import Event
from typing import Any, cast

import yaml

from highwater.errors import MachineError, UsageError
from highwater.model.model import load_model
from highwater.model.rope import yarn
from highwater.nouns.corpus import DocumentOrder, missing_files
from highwater.nouns.files import SETTINGS_BYTES, open_regular, read_file
from highwater.nouns.foreign_request import (
    base_config,
    filled_command,
    launched_command,
    placeholders_of,
)
from highwater.nouns.foreign_trainer import ForeignTrainer
from highwater.nouns.protocols import OnPhase
from highwater.nouns.trial import TrialSpec
from highwater.trainers import finetuner_files, trl_files
from highwater.trainers.accelerate import FILE, LauncherFile, launcher_file
from highwater.trainers.emitted import comment
from highwater.trainers.finetuner_files import Finetuner, FinetunerTrial, OwnFile, TrialPlace
from highwater.trainers.trl import COMMANDS
from highwater.trainers.trl_files import Base, Launched
from highwater.trials.foreign_log import steps_of
from highwater.trials.inputs import prepared_model, refuse_full_disk
from highwater.trials.ranks import answered
from highwater.trials.trial_process import clean_environment

OUTPUT = "output"
"""Folder within a trial's own in which its trainer may write."""
_TRL = "trl"
_DOCUMENTS = "documents.jsonl"
_FLASH = "flash-attn"
_QUIET = {"HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled"}
_MORE_STEPS = 1
"""Steps of documents beyond those of a trial: a trainer that packs or shuffles may leave some."""
_ASK = (
    "import json, sys; from importlib.metadata import version, PackageNotFoundError as Missing\n"
    "def of(name):\n"
    "    try: return version(name)\n"
    "    except Missing: return None\n"
    "print(json.dumps({name: of(name) for name in sys.argv[1:]}))"
)
_ASK_S = 60.0
"""Seconds that the answer may take: nothing is imported, but a disk may be far away."""
_SHEBANG_BYTES = 256


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


def prepare_accelerate(
    spec: TrialSpec, foreign: ForeignTrainer, folder: Path, ended: Event, on_phase: OnPhase
) -> ForeignCommand:
    """The command of a trial that accelerate launches, whose file is written into the folder.

    Raises HighwaterError for what accelerate cannot be told, and where nothing can be prepared.
    """
    found = _launcher_file(spec, foreign)
    _write({FILE: found.values}, found.notes, folder)
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
    notes = _launcher_file(spec, foreign).notes
    if not _opens_model(foreign):
        return notes
    refuse_full_disk(spec)
    return (*missing_files(Path(spec.model_directory)).notes, *notes)


def _launcher_file(spec: TrialSpec, foreign: ForeignTrainer) -> LauncherFile:
    base, source = _own_fields(foreign, "name the file that `accelerate config` wrote")
    shape = load_model(spec.model_directory).shape
    return launcher_file(spec, shape, base, source=source or FILE)


def _opens_model(foreign: ForeignTrainer) -> bool:
    """Whether the command is told the model's directory."""
    return "model" in placeholders_of(foreign.command)


def prepare_trl(
    spec: TrialSpec, foreign: ForeignTrainer, folder: Path, ended: Event, on_phase: OnPhase
) -> ForeignCommand:
    """The command of a trial of TRL, whose files are written into the folder.

    Raises HighwaterError for what TRL cannot be told, and where nothing can be prepared.
    """
    check_trl(spec, foreign)
    base, words = trl_base(foreign), foreign.command or (_TRL,)
    model = prepared_model(spec, ended, on_phase, documents=_trl_documents(spec, base, folder))
    launched = _trl_launched(spec, model, folder, words[0])
    files = trl_files.trial_files(launched, base)
    said = (*missing_files(Path(spec.model_directory)).notes, *files.notes)
    _write({trl_files.CONFIG: files.config, FILE: files.launcher}, said, folder)
    step_tokens = trl_files.batch_of(spec, base.config).sequences * spec.length_tokens
    config = str(folder / trl_files.CONFIG)
    return ForeignCommand(
        words=(
            *words,
            COMMANDS[spec.settings.objective].name,
            "--config",
            config,
        ),
        environment={**_QUIET, "HF_DATASETS_CACHE": str(folder / "datasets")},
        steps_done=partial(steps_of, step_tokens=step_tokens, shared_by=spec.layout.context_degree),
    )


def check_trl(spec: TrialSpec, foreign: ForeignTrainer) -> tuple[str, ...]:
    """What a reader should know of such trials, before the first one.

    Raises HighwaterError for what TRL cannot be told, and where it is not here.
    """
    trl_files.refuse_untried(spec, load_model(spec.model_directory).shape)
    base, program = trl_base(foreign), (foreign.command or (_TRL,))[0]
    _refuse_no_program(program, "TRL", _TRL, _TRL)
    refuse_full_disk(spec)
    nowhere = Path("there")
    files = trl_files.trial_files(_trl_launched(spec, nowhere, nowhere, program), base)
    batch = trl_files.batch_of(spec, base.config)
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


def _trl_launched(spec: TrialSpec, model_directory: Path, folder: Path, program: str) -> Launched:
    model = load_model(spec.model_directory)
    return Launched(
        spec=spec,
        model=model.shape,
        yarn=yarn(model, length_tokens=spec.length_tokens, rope=spec.settings.rope),
        model_directory=model_directory,
        documents=folder / _DOCUMENTS,
        output=folder / OUTPUT,
        launcher=folder / FILE,
        has_flash=_has_flash(program),
    )


def trl_base(foreign: ForeignTrainer) -> Base:
    """The user's own configuration of TRL, and accelerate's that it names by a path.

    Raises UsageError for files that cannot be read, or are no YAML of named fields.
    """
    hint = "name the file that `trl sft --config` takes"
    config, source = _own_fields(foreign, hint)
    named = config.get("accelerate_config")
    if source is None or foreign.base_config_path is None:
        return Base()
    if named is None:
        return Base(config=config, source=source)
    beside = Path(foreign.base_config_path).parent / str(named)
    if not beside.is_file():
        raise UsageError(
            f"{source} names accelerate's configuration {named}, which is no file beside it",
            hint="leave `accelerate_config` out: a trial says how processes share the work",
        )
    launcher = _yaml_fields(read_file(beside, most_bytes=SETTINGS_BYTES), beside, hint=hint)
    return Base(config=config, launcher=launcher, source=source)


def _trl_documents(spec: TrialSpec, base: Base, folder: Path) -> DocumentOrder:
    end = base.config.get("eos_token")
    return DocumentOrder(
        path=str(folder / _DOCUMENTS),
        kind=trl_files.TRIED[spec.settings.objective],
        length_tokens=trl_files.document_tokens(spec, base.config),
        count=spec.steps * trl_files.batch_of(spec, base.config).sequences,
        end=None if end is None else str(end),
    )


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
    launched = _finetuner_launched(spec, folder, words[0])
    files = finetuner_files.trial_files(trainer, launched, finetuner_base(trainer, foreign))
    documents = DocumentOrder(
        path=str(folder / finetuner_files.DOCUMENTS),
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
            "DO_NOT_TRACK": "1",
            "HF_DATASETS_CACHE": str(folder / "datasets"),
            "PATH": _path(words[0]),
            **trainer.environment(launched),
        },
        steps_done=partial(
            steps_of,
            step_tokens=launched.step_sequences * spec.length_tokens,
            shared_by=spec.layout.context_degree,
            counted=finetuner_files.COUNTED,
        ),
    )


def check_finetuner(
    trainer: Finetuner, spec: TrialSpec, foreign: ForeignTrainer
) -> tuple[str, ...]:
    """What a reader should know of such trials, before the first one.

    Raises HighwaterError for what the trainer cannot be told, and where it is not here.
    """
    program = (foreign.command or (trainer.program,))[0]
    files = finetuner_files.trial_files(
        trainer, _finetuner_launched(spec, Path("there"), program), finetuner_base(trainer, foreign)
    )
    _refuse_no_program(program, trainer.words.name, trainer.package, trainer.program)
    refuse_full_disk(spec)
    return (*missing_files(Path(spec.model_directory)).notes, *files.notes)


def finetuner_base(trainer: Finetuner, foreign: ForeignTrainer) -> OwnFile:
    """The user's own configuration of a trainer.

    Raises UsageError for a file that cannot be read, or is no YAML of named fields.
    """
    hint = f"name the file that `{trainer.program} {trainer.subcommand}` takes"
    config, source = _own_fields(foreign, hint)
    return OwnFile() if source is None else OwnFile(config=config, source=source)


def _finetuner_launched(spec: TrialSpec, folder: Path, program: str) -> FinetunerTrial:
    model = load_model(spec.model_directory)
    # Some know a model by what its directory is called.
    place = TrialPlace(folder / Path(spec.model_name).name, folder, folder / OUTPUT)
    return FinetunerTrial(
        spec=spec,
        shape=model.shape,
        place=place,
        yarn=yarn(model, length_tokens=spec.length_tokens, rope=spec.settings.rope),
        has_flash=_has_flash(program),
    )


def _path(program: str) -> str:
    """PATH with the program's own folder first: it starts others of its environment by name."""
    found, path = shutil.which(program), os.environ.get("PATH", os.defpath)
    return path if found is None else f"{Path(found).absolute().parent}{os.pathsep}{path}"


def _own_fields(foreign: ForeignTrainer, hint: str) -> tuple[dict[str, Any], str | None]:
    """The fields of the user's own configuration, and its file's name; none where none is named."""
    content = base_config(foreign)
    if content is None or foreign.base_config_path is None:
        return {}, None
    path = Path(foreign.base_config_path)
    return _yaml_fields(content, path, hint=hint), path.name


def _yaml_fields(content: bytes, path: Path, *, hint: str) -> dict[str, Any]:
    """The fields in a file's content.

    Raises UsageError, with this hint, for what is no YAML or has no fields.
    """
    try:
        read: Any = yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is no YAML: {str(error).splitlines()[0]}", hint=hint) from error
    if not isinstance(read, dict):
        raise UsageError(f"{path} has no named fields", hint=hint)
    return {str(name): value for name, value in cast(dict[Any, Any], read).items()}


def _refuse_no_program(program: str, title: str, package: str, usual: str) -> None:
    """Raise MachineError where the program that starts a trainer is not found."""
    if shutil.which(program) is None:
        raise MachineError(
            f"{title} is not found: there is no program {program}",
            hint=f"`pip install {package}`, or name where it is: `--command /path/to/{usual}`",
        )


def _write(files: Mapping[str, Any], said: tuple[str, ...], folder: Path) -> None:
    for name, values in files.items():
        if name.endswith(".json"):
            text = json.dumps(values, indent=2) + "\n"
        else:
            dumped = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
            text = comment(list(said)) + dumped
        (folder / name).write_text(text, encoding="utf-8")


def _has_flash(program: str) -> bool:
    """Whether flash attention is installed in the Python that starts a trainer."""
    python = python_of(program)
    return python is not None and _FLASH in versions_there(python, (_FLASH,))


def python_of(program: str) -> Path | None:
    """The interpreter in the first line of a program that pip installed; None of any other, and
    where there is no such program.
    """
    found = shutil.which(program)
    if found is None:
        return None
    with open_regular(Path(found)) as file:
        first = file.read(_SHEBANG_BYTES).partition(b"\n")[0].decode(errors="replace")
    python = Path(first.removeprefix("#!").strip())
    return python if first.startswith("#!/") and "python" in python.name else None


@cache
def versions_there(python: Path, packages: tuple[str, ...]) -> Mapping[str, str]:
    """The versions of these packages as an interpreter finds them; those it has not are left out,
    all of them where it does not answer.
    """
    command: Sequence[str] = [str(python), "-P", "-c", _ASK, *packages]
    try:
        done = answered(command, environment=clean_environment("native"), timeout_s=_ASK_S)
        done.check_returncode()
        answer: dict[str, str | None] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return {name: version for name, version in answer.items() if version is not None}

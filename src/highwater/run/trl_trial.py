"""A trial of TRL: its configuration, the documents and, where the model's directory is not whole,
a directory to train from, written before ``trl sft`` or ``trl grpo`` is started.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, cast

import msgspec
import yaml

from highwater.emit.accelerate import FILE
from highwater.emit.emitted import comment
from highwater.emit.trl import COMMANDS
from highwater.emit.trl_files import (
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
from highwater.errors import HighwaterError, MachineError, UsageError
from highwater.run.foreign_command import OUTPUT, ForeignCommand
from highwater.run.private_folder import last_lines, private_folder
from highwater.run.probe import INSTALL_HINT
from highwater.run.reaper import module, under_reaper
from highwater.run.trainer_python import python_of, versions_there
from highwater.run.trial_environment import ON_THE_CPU, clean_environment
from highwater.run.trial_process import exit_code_of
from highwater.run.trl_log import steps_of
from highwater.spec.codec import from_json, to_json
from highwater.spec.files import SETTINGS_BYTES, read_file
from highwater.spec.foreign_request import base_config
from highwater.spec.foreign_trainer import ForeignTrainer
from highwater.spec.model import load_model
from highwater.spec.preparation import (
    ORDER_FILE,
    PREPARED_FILE,
    PreparationOrder,
    Prepared,
    missing_files,
    prepared_name,
)
from highwater.spec.protocols import OnPhase
from highwater.spec.rope import yarn
from highwater.spec.trial import TrialSpec
from highwater.units import format_bytes

PROGRAM = "trl"
_DOCUMENTS = "documents.jsonl"
_PREPARATION = "highwater.train.trainer_inputs"
_FLASH = "flash-attn"
_PREPARE_S = 3600.0
"""Longest time of a preparation: random weights of 70 billion parameters take minutes to write."""
_BF16_BYTES = 2
_OFFLINE = {"HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled"}


def prepare_trl(
    spec: TrialSpec, foreign: ForeignTrainer, folder: Path, ended: Event, on_phase: OnPhase
) -> ForeignCommand:
    """The command of a trial of TRL, whose files are written into the folder.

    Raises HighwaterError for what TRL cannot be told, and where nothing can be prepared.
    """
    check_trl(spec, foreign)
    base, words = base_of(foreign), foreign.command or (PROGRAM,)
    prepared = _prepared(_order(spec, base, folder), folder, ended, on_phase)
    launched = _launched(spec, Path(prepared.model_directory), folder, words[0])
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
    _refuse_full_disk(spec)
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
    config = _fields(content, path)
    named = config.get("accelerate_config")
    if named is None:
        return Base(config=config, source=path.name)
    beside = Path(path.parent, str(named))
    if not beside.is_file():
        raise UsageError(
            f"{path.name} names accelerate's configuration {named}, which is no file beside it",
            hint="leave `accelerate_config` out: a trial says how processes share the work",
        )
    launcher = _fields(read_file(beside, most_bytes=SETTINGS_BYTES), beside)
    return Base(config=config, launcher=launcher, source=path.name)


def model_cache(environment: Mapping[str, str]) -> Path:
    """The folder of directories that were made to train from: ``$XDG_CACHE_HOME/highwater/models``,
    by default in ``~/.cache``.
    """
    base = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base, "highwater", "models")


def _fields(content: bytes, path: Path) -> dict[str, Any]:
    try:
        read: Any = yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise UsageError(
            f"{path} is no YAML: {str(error).splitlines()[0]}",
            hint="name the file that `trl sft --config` takes",
        ) from error
    if not isinstance(read, dict):
        raise UsageError(
            f"{path} has no named fields", hint="name the file that `trl sft --config` takes"
        )
    return {str(name): value for name, value in cast(dict[Any, Any], read).items()}


def _refuse_no_program(program: str) -> None:
    """Raise MachineError where the program that starts TRL is not found."""
    if shutil.which(program) is None:
        raise MachineError(
            f"TRL is not found: there is no program {program}",
            hint="`pip install trl`, or name where it is: `--command /path/to/trl`",
        )


def _refuse_full_disk(spec: TrialSpec) -> None:
    """Raise MachineError where random weights would have to be written and there is no room."""
    source, cache = Path(spec.model_directory), model_cache(os.environ)
    missing = missing_files(source)
    if not missing.weights or (cache / prepared_name(source, spec.seed, missing)).is_dir():
        return
    needed_bytes = _BF16_BYTES * load_model(spec.model_directory).shape.parameters
    place = next(each for each in (cache, *cache.parents) if each.is_dir())
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < needed_bytes:
        raise MachineError(
            f"{spec.model_name} has no weights here: random ones take "
            f"{format_bytes(needed_bytes)}, and {cache} has {format_bytes(free_bytes)} free",
            hint="name a folder with room: `export XDG_CACHE_HOME=/path`",
        )


def _versions(program: str) -> Mapping[str, str]:
    """Versions of the packages that decide what is emitted, in the Python that starts TRL."""
    python = python_of(program)
    return {} if python is None else versions_there(python, (PROGRAM, _FLASH))


def _order(spec: TrialSpec, base: Base, folder: Path) -> PreparationOrder:
    end = base.config.get("eos_token")
    return PreparationOrder(
        model_directory=spec.model_directory,
        cache_directory=str(model_cache(os.environ)),
        scratch_directory="",
        documents_path=str(folder / _DOCUMENTS),
        kind=TRIED[spec.settings.objective],
        length_tokens=document_tokens(spec, base.config),
        documents=spec.steps * batch_of(spec, base.config).sequences,
        end=None if end is None else str(end),
        seed=spec.seed,
    )


def _prepared(order: PreparationOrder, folder: Path, ended: Event, on_phase: OnPhase) -> Prepared:
    """What was prepared, by a process of the data plane.

    Raises what it refused, and MachineError where it failed.
    """
    cache = Path(order.cache_directory)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with private_folder(cache, kind="model-") as scratch:
            order = msgspec.structs.replace(order, scratch_directory=str(scratch))
            (folder / ORDER_FILE).write_text(to_json(order), encoding="utf-8")
            _run(folder, scratch, ended, on_phase)
    except OSError as error:
        raise MachineError(
            f"the model to train from could not be prepared: {error}",
            hint="make room there, or name another folder: `export XDG_CACHE_HOME=/path`",
        ) from error
    prepared = from_json((folder / PREPARED_FILE).read_bytes(), Prepared)
    if prepared.refused is not None:
        raise HighwaterError(prepared.refused.problem, hint=prepared.refused.hint)
    return prepared


def _run(folder: Path, scratch: Path, ended: Event, on_phase: OnPhase) -> None:
    """Run the preparation to its end; nothing of it runs any more when this returns or raises."""
    log = folder / "preparation.log"
    with log.open("wb") as talk:
        process = subprocess.Popen(
            under_reaper(module(_PREPARATION, str(folder)), inherit=[scratch]),
            env=clean_environment("native") | ON_THE_CPU,
            stdin=subprocess.DEVNULL,
            stdout=talk,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = exit_code_of(
            process, timeout_s=_PREPARE_S, ended=ended, tell=lambda: on_phase("preparing")
        )
    if status != 0:
        raise MachineError(
            f"what TRL trains on could not be prepared: {last_lines(log)}", hint=INSTALL_HINT
        )


def _write(files: TrialFiles, said: tuple[str, ...], folder: Path) -> None:
    for name, values in ((CONFIG, files.config), (FILE, files.launcher)):
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        (folder / name).write_text(comment(list(said)) + text, encoding="utf-8")

"""Foreign trials: what trials of all other trainers share (the start command, files, the user's
configuration in them); and trials of a command that the user types.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, cast

import yaml

from highwater.errors import MachineError, UsageError
from highwater.nouns.codec import SETTINGS_BYTES, packaged
from highwater.nouns.corpus import DocumentOrder
from highwater.nouns.foreign_request import base_config, file_content, filled_command
from highwater.nouns.trainer import (
    FROM_OUTSIDE,
    SHARED,
    ForeignName,
    ForeignTrainer,
    ForeignTraits,
    TrainerParts,
)
from highwater.nouns.trial import TrialSpec
from highwater.trainers.emitted import comment

OUTPUT = "output"
"""Folder within a trial's own, into which the trainer may write."""
TRIAL_FIELDS: Mapping[str, Any] = packaged("trainers/trial_fields.json", dict[str, Any])
"""Fields of a trainer's file that a trial sets or leaves out, by trainer."""
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_MOST_CHARACTERS = 16 * SETTINGS_BYTES
"""A file of ``SETTINGS_BYTES`` without aliases has fewer."""
QUIET = {"HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignCommand:
    """What a foreign trainer's trial starts: words, environment, and how steps are counted."""

    words: tuple[str, ...]
    """The command; its first word is a program's path or name."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables besides those of every trial."""
    steps_done: Callable[[str], int] | None = None
    """Counts the finished steps in the log's text (and in files, if the trainer writes some). None:
    counted by the question's pattern, or by the usual signs of progress."""


HasFlash = Callable[[str], bool]
"""Takes a program's name or path; True if the Python that starts it has the package flash-attn."""


class TrialHome(NamedTuple):
    """A trial's folder, and what its launcher does for whoever prepares it."""

    folder: Path
    """The trial's own folder, deleted after it; empty but for ``output``."""
    has_flash: HasFlash
    prepared: Callable[[DocumentOrder | None], Path]
    """Writes documents, if asked for, and returns the model directory to train from. Raises
    HighwaterError if that fails, and TrialEndedError if the trial is ended meanwhile."""


class TrialStart(NamedTuple):
    """How trials of one trainer are checked, prepared and started."""

    prepare: Callable[[TrialSpec, ForeignTrainer, TrialHome], ForeignCommand]
    """Makes the command of a trial. Raises HighwaterError for settings that it cannot express."""
    check: Callable[[TrialSpec, ForeignTrainer, HasFlash], tuple[str, ...]] | None = None
    """Returns notes on such trials before anything starts. Raises HighwaterError for settings that
    the trainer cannot express, and if it is not installed."""
    opens_model: Callable[[ForeignTrainer], bool] = lambda _: True
    """Returns whether trials of this trainer read the model's files; by default they do."""


TRIALS: Mapping[ForeignName, TrialStart] = TrainerParts(ForeignName, "TRIAL")
"""The way that trials of each foreign trainer start."""


def path_of(program: str) -> str:
    """PATH with a program's own folder first, as it starts other programs there by name."""
    found, path = shutil.which(program), os.environ.get("PATH", os.defpath)
    return path if found is None else f"{Path(found).absolute().parent}{os.pathsep}{path}"


class OwnFile(NamedTuple):
    """The user's own file for a trainer: its fields, and its name in messages."""

    config: Mapping[str, Any] = MappingProxyType({})
    """Fields of the file; empty without a file."""
    source: str = "the configuration"
    """Name of the file, for messages."""
    launcher: Mapping[str, Any] = MappingProxyType({})
    """Fields of accelerate's file, if the configuration names one."""


class TrialFiles(NamedTuple):
    """Contents of the files that a trial writes for its trainer."""

    config: dict[str, Any]
    """Fields of the trainer's configuration: the user's, changed where the trial has its own."""
    beside: Mapping[str, Any] = MappingProxyType({})
    """Fields of further files that ``config`` names, by file name, which ends in json or yaml."""
    notes: tuple[str, ...] = ()
    """Notes on the user's fields that the trial changes or leaves out."""


def told_of(source: str, changed: Collection[str], left: Collection[str] = ()) -> tuple[str, ...]:
    """Notes on the fields of ``source`` that a trial changes, and on those it drops."""
    said = {
        f"the trial's own in {source}": changed,
        f"left out of {source}, the data and the reports being the trial's": left,
    }
    return tuple(f"{what}: {', '.join(sorted(names))}" for what, names in said.items() if names)


def own_file(foreign: ForeignTrainer, hint: str) -> OwnFile:
    """The user's own configuration. Raises UsageError, with ``hint``, unless it is YAML fields."""
    content = base_config(foreign)
    if content is None or foreign.base_config_path is None:
        return OwnFile()
    path = Path(foreign.base_config_path)
    return OwnFile(yaml_fields(content, path, hint=hint), path.name)


class _Loader(yaml.SafeLoader):
    """A loader that leaves a date the text that was written."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in known if tag != _TIMESTAMP]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def yaml_value(content: bytes, path: Path, *, hint: str) -> Any:
    """What YAML content says; None if nothing. Raises UsageError, with ``hint``, for content that
    is no YAML, is nested too deep, or whose aliases say more than ``_MOST_CHARACTERS``.
    """
    try:
        loader = _Loader(content)
        whole = loader.get_single_node()
        if whole is None:
            return None
        if _characters(whole, {}) > _MOST_CHARACTERS:
            raise ValueError("its aliases repeat too much")
        return loader.construct_document(whole)
    # a tag on a text that is none of it raises anything of these: `!!int`, `!!timestamp x`
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        said = " ".join(str(error).split())
        raise UsageError(f"{path} is no YAML: {said}", hint=hint) from error


def _characters(node: yaml.Node, known: dict[int, int]) -> int:
    """Characters below a node, those of an alias each time that it stands there."""
    if isinstance(node, yaml.ScalarNode):
        return 1 + len(node.value)
    if id(node) not in known:
        known[id(node)] = _MOST_CHARACTERS  # if it is an alias of itself, it has no end
        parts = (
            chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        )
        known[id(node)] = 1 + sum(_characters(part, known) for part in parts)
    return known[id(node)]


def yaml_fields(content: bytes, path: Path, *, hint: str) -> dict[str, Any]:
    """The fields in YAML content. Raises UsageError, with ``hint``, for other content."""
    read = yaml_value(content, path, hint=hint)
    if not isinstance(read, dict):
        raise UsageError(f"{path} has no named fields", hint=hint)
    return {str(name): value for name, value in cast(dict[Any, Any], read).items()}


def flat_fields(content: bytes, path: Path, *, hint: str) -> dict[str, Any]:
    """Return by dotted names the values in ``content``, a trainer's file: YAML, or a shell script
    whose command has overrides like ``a.b=1``. Values that refer to others (``${...}``) are left
    out. ``path`` is named in errors. Raises UsageError, with ``hint``, for content that is neither.
    """
    try:
        fields = yaml_fields(content, path, hint=hint)
    except UsageError:
        text = re.sub(r"(?m)^\s*#.*", "", content.decode(errors="replace"))
        pairs = re.findall(r"(?:^|[\s'+])(\w+(?:\.\w+)+)=(\[[^]]*\]|[^\s'\\]*)", text)
        fields = {name: yaml.safe_load(value.strip('"')) for name, value in pairs}
        if not fields:
            raise
    while sections := [name for name, value in fields.items() if isinstance(value, Mapping)]:
        for name in sections:
            fields |= {f"{name}.{key}": value for key, value in fields.pop(name).items()}
    return {name: value for name, value in fields.items() if not str(value).startswith("${")}


def launcher_of(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Fields of accelerate's file that a trainer's file at ``path`` names; empty if it names none.
    Raises UsageError if that file is missing.
    """
    named = config.get("accelerate_config")
    if named is None:
        return {}
    beside = path.parent / str(named)
    if not beside.is_file():
        raise UsageError(
            f"{path.name} names accelerate's configuration {named}, which is no file beside it",
            hint="leave `accelerate_config` out, or name a file of yours there",
        )
    return yaml_fields(file_content(beside), beside, hint="name the file that accelerate takes")


def mapping_in(base: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The section ``name`` of a configuration as a dict; empty if there is none."""
    value = base.get(name)
    return {str(key): each for key, each in value.items()} if isinstance(value, Mapping) else {}


def fsdp_keys(base: Mapping[str, Any]) -> dict[str, Any]:
    """The user's keys of FSDP, all with the prefix ``fsdp_``, as accelerate adds it."""
    section = mapping_in(base, "fsdp_config")
    return {
        name if name.startswith("fsdp") else f"fsdp_{name}": each for name, each in section.items()
    }


def refuse_no_program(program: str, title: str, package: str, usual: str) -> None:
    """Raise MachineError if the program that starts a trainer is not found."""
    if shutil.which(program) is None:
        raise MachineError(
            f"{title} is not found: there is no program {program}",
            hint=f"`pip install {package}`, or name where it is: `--command /path/to/{usual}`",
        )


def write_files(files: Mapping[str, Any], said: tuple[str, ...], folder: Path) -> None:
    """Write files as JSON or YAML, by their names' ends; YAML begins with ``said`` as a comment."""
    for name, values in files.items():
        if name.endswith(".json"):
            text = json.dumps(values, indent=2) + "\n"
        else:
            dumped = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
            text = comment(list(said)) + dumped
        (folder / name).write_text(text, encoding="utf-8")


# The trainer ``command``: whatever the user types.


def _prepare(spec: TrialSpec, foreign: ForeignTrainer, home: TrialHome) -> ForeignCommand:
    """The user's command with the trial's values in its placeholders."""
    return ForeignCommand(words=filled_command(foreign.command, spec, home.folder / OUTPUT))


TRIED = ForeignTraits(is_typed=True, settings=FROM_OUTSIDE | SHARED | {"command"})
TRIAL = TrialStart(_prepare)

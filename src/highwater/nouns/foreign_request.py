"""Requests for foreign trainers: what a request says of one, checked and made into the noun."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from highwater.errors import UsageError
from highwater.nouns.command_template import (
    EXAMPLE,
    LAUNCHED_EXAMPLE,
    launched_command,
    placeholders_of,
    split_command,
    split_words,
)
from highwater.nouns.declared_settings import DECLARED
from highwater.nouns.files import SETTINGS_BYTES, read_file
from highwater.nouns.foreign_trainer import FOREIGN, ForeignName, ForeignTrainer, foreign_name
from highwater.nouns.request import Request

_MEANT: Mapping[str, ForeignName] = {
    "command": "command",
    "trainer_config": "trl",
    "done_pattern": "command",
}
"""Fields of a request that say something of a foreign trainer alone, and which one is meant."""
_SEVERAL = ("gpus", "ulysses", "ring", "copies")
"""Settings of which a search may name several values."""


def foreign_of(request: Request) -> ForeignTrainer | None:
    """The foreign trainer of a request; None where this package's engine is asked.

    Raises UsageError for what it lacks, and for what says nothing of the engine.
    """
    trainer = foreign_name(request.trainer)
    if trainer is None:
        for name in _MEANT:
            if getattr(request, name) is not None:
                raise UsageError(
                    f"a {DECLARED[name].words}, and the trainer is this package's engine",
                    hint=f"add `--trainer {_MEANT[name]}`, or leave `{DECLARED[name].flag}` out",
                )
        return None
    words = command_of(request, trainer)
    if request.proof == "memory":
        raise UsageError(
            "a memory-only trial cuts attention in this package's engine, and in no other trainer",
            hint="leave `--proof` out",
        )
    _check_pattern(request.done_pattern)
    path = None if request.trainer_config is None else Path(request.trainer_config).absolute()
    return ForeignTrainer(
        trainer=trainer,
        command=words,
        base_config_path=None if path is None else str(path),
        base_config_digest=None if path is None else config_digest(path),
        done_pattern=request.done_pattern,
    )


def base_config(foreign: ForeignTrainer) -> bytes | None:
    """The user's own configuration, as it was when it was asked about; None where there is none.

    Raises UsageError for one that has changed since: its trials would not be the question's.
    """
    if foreign.base_config_path is None:
        return None
    path = Path(foreign.base_config_path)
    content = _content(path)
    if _digest(content) != foreign.base_config_digest:
        raise UsageError(
            f"{path} has changed since the search began",
            hint="put it back as it was, or ask again: another configuration is another question",
        )
    return content


def config_digest(path: Path) -> str:
    """The digest of a configuration's bytes; raises UsageError for one that cannot be read."""
    return _digest(_content(path))


def _content(path: Path) -> bytes:
    try:
        return read_file(path, most_bytes=SETTINGS_BYTES)
    except OSError as error:
        raise UsageError(
            f"the trainer's configuration {path} cannot be read: {error.strerror}",
            hint="name a file that is there: `--trainer-config base.yaml`",
        ) from error
    except ValueError as error:
        raise UsageError(
            f"the trainer's configuration {path} cannot be read: {error}",
            hint="name the trainer's own file: `--trainer-config base.yaml`",
        ) from error


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def command_of(request: Request, trainer: ForeignName) -> tuple[str, ...]:
    """The words of the request's command, or of its program; empty for the usual one."""
    if not FOREIGN[trainer].is_typed:
        return () if request.command is None else split_words(request.command)
    example = LAUNCHED_EXAMPLE if FOREIGN[trainer].is_launched else EXAMPLE
    if request.command is None:
        raise UsageError(
            f"`--trainer {trainer}` without a command", hint=f"add `--command '{example}'`"
        )
    words = split_command(request.command, example=example)
    if FOREIGN[trainer].is_launched:
        launched_command(words)  # raises for what it does not launch
        return words
    has = placeholders_of(words)
    for name in _SEVERAL:
        several = getattr(request, name)
        if several is not None and len(set(several)) > 1 and name not in has:
            raise UsageError(
                f"several {name} are searched, and the command has no {{{name}}}",
                hint=f"put `{{{name}}}` into the command, or name one: `--{name} {several[0]}`",
            )
    return words


def program_of(request: Request) -> str | None:
    """The program that a request's command starts, or that launches it; None: it names none."""
    trainer = foreign_name(request.trainer)
    if trainer is None or request.command is None:
        return None
    words = split_words(request.command)
    launched = FOREIGN[trainer].is_launched
    program = launched_command(words).program if launched else words[0]
    return None if "{" in program else program


def with_one_count(request: Request, foreign: ForeignTrainer) -> Request:
    """The request of a command that cannot be told a number of GPUs, and that names none: one."""
    traits = FOREIGN[foreign.trainer]
    if traits.is_launched or not traits.is_typed or request.gpus is not None:
        return request
    if "gpus" in placeholders_of(foreign.command):
        return request
    return msgspec.structs.replace(request, gpus=(1,))


def _check_pattern(pattern: str | None) -> None:
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise UsageError(
            f"the pattern {pattern!r} is no regular expression: {error}",
            hint="for example `--done-pattern 'step 2 done'`",
        ) from error

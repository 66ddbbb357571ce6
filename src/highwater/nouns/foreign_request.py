"""Requests for foreign trainers: check a request's settings, and make a ``ForeignTrainer`` of them.

The words of a command are split as a POSIX shell splits them, and no shell runs them. ``{length}``
and the other ``PLACEHOLDERS`` stand for the trial's values; ``{{`` and ``}}`` are braces.
``--trainer accelerate`` takes a script and its words, or the whole ``accelerate launch``.
"""

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Formatter
from typing import NamedTuple

from highwater.errors import UsageError
from highwater.nouns.codec import SETTINGS_BYTES, packaged, read_file
from highwater.nouns.declaration import nearest
from highwater.nouns.request import DECLARED, Request
from highwater.nouns.secrets import HIDDEN, hidden_words
from highwater.nouns.trainer import FOREIGN, ForeignName, ForeignTrainer, foreign_name
from highwater.nouns.trial import TrialSpec

PLACEHOLDERS: Mapping[str, str] = packaged("nouns/catalog/placeholders.json", dict[str, str])
"""Words that may stand in braces, and their meaning."""
EXAMPLE = "python train.py --max-len {length} --steps {steps}"


def split_command(text: str, *, example: str = EXAMPLE) -> tuple[str, ...]:
    """The words of a command, checked; ``example`` is what hints show.

    Raises UsageError for quotes that do not end, for no word, for an unknown placeholder, and where
    no word has the length.
    """
    words = split_words(text, example=example)
    shown = hidden_words(words)
    named = {name for word, as_ in zip(words, shown, strict=True) for name in _named(word, as_)}
    for name in sorted(named - set(PLACEHOLDERS)):
        near = nearest(name, tuple(PLACEHOLDERS))
        raise UsageError(
            f"unknown placeholder {{{name}}} in the command",
            hint=f"did you mean `{{{near}}}`?"
            if near
            else "there are "
            + ", ".join(f"{{{each}}}" for each in PLACEHOLDERS)
            + "; a brace is written `{{` or `}}`",
        )
    if "length" not in named:
        raise UsageError(
            "the command has no {length}: every trial would be the same",
            hint=f"put it where the command takes the tokens of a sequence: `{example}`",
        )
    return words


def split_words(text: str, *, example: str = EXAMPLE) -> tuple[str, ...]:
    """The words of a command; raises UsageError for open quotes, no word, a hidden secret."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(
            f"the command cannot be split into words: {error}",
            hint=f"for example `--command '{example}'`",
        ) from error
    if not words:
        raise UsageError("the command is empty", hint=f"for example `--command '{example}'`")
    if any(HIDDEN in word for word in words):
        raise UsageError(
            f"the command has {HIDDEN} where a secret stood, which no study keeps",
            hint=f"type the secret itself in the place of {HIDDEN}",
        )
    return words


def placeholders_of(words: tuple[str, ...]) -> frozenset[str]:
    """Names of the placeholders in a user's command, which a trial fills in."""
    return frozenset(name for word in words for name in _named(word, word))


def filled_command(
    words: tuple[str, ...], spec: TrialSpec, output: Path, *, model: Path | None = None
) -> tuple[str, ...]:
    """The words with placeholders filled; ``model``: its directory, if not the trial's own."""
    values = {
        "length": spec.length_tokens,
        "gpus": spec.layout.gpus,
        "ulysses": spec.layout.ulysses_degree,
        "ring": spec.layout.ring_degree,
        "copies": spec.layout.replicate_degree,
        "shards": spec.layout.shard_degree,
        "model": model or spec.model_directory,
        "steps": spec.steps,
        "micro_batches": spec.micro_batches,
        "sequences": spec.sequences,
        "seed": spec.seed,
        "output": output,
    }
    return tuple(word.format_map(values) for word in words)


def _named(word: str, shown: str) -> Iterator[str]:
    """Yield the placeholders in a word; UsageError, which quotes ``shown``, for other braces."""
    try:
        for _, name, form, conversion in Formatter().parse(word):
            if name is None:
                continue
            if form or conversion:
                raise ValueError(f"{{{name}}} takes neither a format nor a conversion")
            yield name
    except ValueError as error:
        raise UsageError(
            f"the command's word {shown!r} is no template: {error}",
            hint="a brace that is no placeholder is written `{{` or `}}`",
        ) from error


LAUNCHER = "accelerate"
LAUNCHED_EXAMPLE = "train.py --max-len {length} --steps {steps}"
_LAUNCH = "launch"
_NO_SCRIPT = ("-m", "--module", "--no_python", "--no-python")
"""The launcher's flags that say what the next word is, if it is no script of Python."""
_OTHER_LAUNCHERS = re.compile(r"python[\d.]*|torchrun|deepspeed|accelerate-launch")


class LaunchedCommand(NamedTuple):
    """A user's command without the ``accelerate launch`` before it, and that accelerate."""

    program: str
    words: tuple[str, ...]
    """The words after ``launch``: the script, or what stands for one, and its own."""

    @property
    def script(self) -> Path | None:
        """The script's path; None if a module or program is started, or a placeholder names it."""
        first = self.words[0]
        return None if first in _NO_SCRIPT or "{" in first else Path(first)


def launched_command(words: tuple[str, ...]) -> LaunchedCommand:
    """Split a command; UsageError for another launcher, accelerate's own flags, or no script."""
    program, rest = LAUNCHER, words
    if Path(words[0]).name == LAUNCHER:
        program, rest = words[0], words[1:]
        rest = rest[1:] if rest[:1] == (_LAUNCH,) else rest
    if not rest or (rest[0] in _NO_SCRIPT and len(rest) == 1):
        raise UsageError(
            "the command names no script that accelerate starts",
            hint=f"for example `--command '{LAUNCHED_EXAMPLE}'`",
        )
    first = rest[0]
    if _OTHER_LAUNCHERS.fullmatch(Path(first).name):
        raise UsageError(
            f"accelerate starts the processes, and the command begins with {first}",
            hint=f"begin with the script: `--command '{LAUNCHED_EXAMPLE}'`",
        )
    if first.startswith("-") and first not in _NO_SCRIPT:
        raise UsageError(
            f"in a trial accelerate is told {first} by its file, not by a flag",
            hint="say it in accelerate's file: `--trainer-config accelerate.yaml`",
        )
    return LaunchedCommand(program=program, words=rest)


_MEANT: Mapping[str, ForeignName] = {
    "command": "command",
    "trainer_config": "trl",
    "done_pattern": "command",
}
"""Fields of a request that only foreign trainers read, and the trainer that each suggests."""
_SEVERAL = ("gpus", "ulysses", "ring", "copies")
"""Settings of which a search may name several values."""


def foreign_of(request: Request) -> ForeignTrainer | None:
    """The foreign trainer of a request, None: our engine; UsageError for what it does not take."""
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
    try:
        re.compile(request.done_pattern or "")
    except re.error as error:
        raise UsageError(
            f"the pattern {request.done_pattern!r} is no regular expression: {error}",
            hint="for example `--done-pattern 'step 2 done'`",
        ) from error
    path = None if request.trainer_config is None else Path(request.trainer_config).absolute()
    return ForeignTrainer(
        trainer=trainer,
        command=words,
        base_config_path=None if path is None else str(path),
        base_config_digest=None if path is None else config_digest(path),
        done_pattern=request.done_pattern,
    )


def base_config(foreign: ForeignTrainer) -> bytes | None:
    """Content of the user's own configuration; None where there is none.

    Raises UsageError if it has changed since it was asked about: that is another question.
    """
    if foreign.base_config_path is None:
        return None
    path = Path(foreign.base_config_path)
    content = file_content(path)
    if _digest(content) != foreign.base_config_digest:
        raise UsageError(
            f"{path} has changed since the search began",
            hint="put it back as it was, or ask again: another configuration is another question",
        )
    return content


def config_digest(path: Path) -> str:
    """Digest of the bytes of a configuration file; raises UsageError if it cannot be read."""
    return _digest(file_content(path))


def file_content(path: Path) -> bytes:
    """Bytes of a trainer's configuration file; raises UsageError if it cannot be read."""
    try:
        return read_file(path, most_bytes=SETTINGS_BYTES)
    except (OSError, ValueError) as error:
        what, why = "the trainer's own file", str(error)
        if isinstance(error, OSError):
            what, why = "a file that is there", str(error.strerror)
        raise UsageError(
            f"the trainer's configuration {path} cannot be read: {why}",
            hint=f"name {what}: `--trainer-config base.yaml`",
        ) from error


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def command_of(request: Request, trainer: ForeignName) -> tuple[str, ...]:
    """Words of the command to start, or of the trainer's program; empty: the default program."""
    if not FOREIGN[trainer].is_typed:
        return () if request.command is None else split_words(request.command)
    example = LAUNCHED_EXAMPLE if FOREIGN[trainer].is_launched else EXAMPLE
    if request.command is None:
        raise UsageError(
            f"`--trainer {trainer}` without a command", hint=f"add `--command '{example}'`"
        )
    words = split_command(request.command, example=example)
    if FOREIGN[trainer].is_launched:
        launched_command(words)  # raises for what accelerate cannot launch
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
    """The program that the request's command starts or launches; None if it names none."""
    trainer = foreign_name(request.trainer)
    if trainer is None or request.command is None:
        return None
    words = split_words(request.command)
    launched = FOREIGN[trainer].is_launched
    program = launched_command(words).program if launched else words[0]
    return None if "{" in program else program


def with_one_count(request: Request, foreign: ForeignTrainer) -> Request:
    """The request on one GPU, if it names no number and its command has no place for one."""
    traits = FOREIGN[foreign.trainer]
    if traits.is_launched or not traits.is_typed or request.gpus is not None:
        return request
    if "gpus" in placeholders_of(foreign.command):
        return request
    return request.replace(gpus=(1,))

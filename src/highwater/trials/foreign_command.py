"""A foreign command: what is started for one trial of a foreign trainer, and who writes it.

A trainer's configuration in YAML, as its user wrote it, by the names of its fields.

The Python that another trainer runs in, asked from outside: which packages it has.
"""

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Event
from typing import Any, cast

import yaml

from highwater.errors import UsageError
from highwater.nouns.files import open_regular
from highwater.nouns.foreign_trainer import ForeignTrainer
from highwater.nouns.protocols import OnPhase
from highwater.nouns.trial import TrialSpec
from highwater.trials.trial_process import clean_environment

OUTPUT = "output"
"""Folder within a trial's own in which its trainer may write."""


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


def yaml_fields(content: bytes, path: Path, *, hint: str) -> dict[str, Any]:
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
        done = subprocess.run(
            command,
            env=clean_environment("native"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ASK_S,
            check=True,
        )
        answer: dict[str, str | None] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return {name: version for name, version in answer.items() if version is not None}

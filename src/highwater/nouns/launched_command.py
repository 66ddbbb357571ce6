"""Launched commands: the command of ``--trainer accelerate``, a script and its words, or the whole
``accelerate launch`` as one types it.
"""

import re
from pathlib import Path
from typing import NamedTuple

from highwater.errors import UsageError

LAUNCHER = "accelerate"
EXAMPLE = "train.py --max-len {length} --steps {steps}"
_LAUNCH = "launch"
_NO_SCRIPT = ("-m", "--module", "--no_python", "--no-python")
"""The launcher's flags that say what the next word is, if it is no script of Python."""
_OTHER_LAUNCHERS = re.compile(r"python[\d.]*|torchrun|deepspeed|accelerate-launch")


class LaunchedCommand(NamedTuple):
    """What accelerate starts, and which accelerate."""

    program: str
    words: tuple[str, ...]
    """The words after ``launch``: the script, or what stands for one, and its own."""

    @property
    def script(self) -> Path | None:
        """The script; None where a module or a program is started, or a placeholder names it."""
        first = self.words[0]
        return None if first in _NO_SCRIPT or "{" in first else Path(first)


def launched_command(words: tuple[str, ...]) -> LaunchedCommand:
    """A command taken apart.

    Raises UsageError for another launcher in it, for flags of accelerate's own, and where nothing
    is started.
    """
    program, rest = LAUNCHER, words
    if Path(words[0]).name == LAUNCHER:
        program, rest = words[0], words[1:]
        rest = rest[1:] if rest[:1] == (_LAUNCH,) else rest
    if not rest or (rest[0] in _NO_SCRIPT and len(rest) == 1):
        raise UsageError(
            "the command names no script that accelerate starts",
            hint=f"for example `--command '{EXAMPLE}'`",
        )
    first = rest[0]
    if _OTHER_LAUNCHERS.fullmatch(Path(first).name):
        raise UsageError(
            f"accelerate starts the processes, and the command begins with {first}",
            hint=f"begin with the script: `--command '{EXAMPLE}'`",
        )
    if first.startswith("-") and first not in _NO_SCRIPT:
        raise UsageError(
            f"in a trial accelerate is told {first} by its file, not by a flag",
            hint="say it in accelerate's file: `--trainer-config accelerate.yaml`",
        )
    return LaunchedCommand(program=program, words=rest)

"""A folder to take away: the files of a configuration, the script that starts the training, and a
page of what to check.

Nothing that is there is written over. A file that is there already with the very same content
stays, so that a command may be given twice; with another content it is the user's, and nothing is
written at all.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from highwater.errors import MachineError, UsageError
from highwater.nouns.codec import SETTINGS_BYTES, read_file
from highwater.trainers.emitted import Emitted, comment

LAUNCH, CHECK = "launch.sh", "CHECK.md"
_NEEDED = {"MODEL_PATH": "the directory of the model", "DATASET": "where prompts come from"}
"""Variables that a configuration may read, and what they are; a quote would begin a text of bash's
there."""
_FOLDERS = 1000
"""Free names that are looked for."""


def launch_script(
    emitted: Emitted, *, file: str, said: Sequence[str], before: Sequence[str]
) -> str:
    """The script that starts the training, from wherever it is called: its words are handed on.
    ``said`` stands above it; ``before`` are lines that run before the training.
    """
    is_script = emitted.text.startswith("#!")
    command = f'bash {file} "$@"' if is_script else f'{emitted.command} "$@"'
    read = f"{emitted.text}{emitted.command}"
    lines = [
        "#!/usr/bin/env bash",
        comment(list(said)).rstrip("\n"),
        "set -euo pipefail",
        'cd "$(dirname "${BASH_SOURCE[0]}")"',
        "",
        *(
            f': "${{{name}:?export {name}={what}}}"'
            for name, what in _NEEDED.items()
            if any(form in read for form in (f"${name}", f"oc.env:{name}", f'environ["{name}"]'))
        ),
        *(f"export {name}={shlex.quote(value)}" for name, value in emitted.environment.items()),
        *before,
        f"exec {command}",
    ]
    return "\n".join(lines) + "\n"


def refuse_no_folder(folder: Path) -> None:
    """Raise UsageError for what is there and is no folder."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise UsageError(
            f"{folder} is there, and is no folder",
            hint=f"name another: `-o {shlex.quote(_free(folder))}`",
        )


def write_folder(folder: Path, files: Mapping[str, str]) -> tuple[Path, ...]:
    """Write the files into a folder, which is made where there is none; the paths of all.

    Raises UsageError where one is there with another content, and MachineError where writing
    fails: nothing new is left then.
    """
    refuse_no_folder(folder)
    others = [
        name
        for name, text in files.items()
        if os.path.lexists(folder / name) and not _holds(folder / name, text)
    ]
    if others:
        raise _taken(folder, others[0])
    made: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            if not os.path.lexists(folder / name):
                _write(folder / name, text, made)
    except FileExistsError as error:  # since it was looked for
        _remove(made)
        raise _taken(folder, Path(error.filename).name) from error
    except OSError as error:
        _remove(made)
        raise MachineError(
            f"{error.filename or folder} cannot be written: {error.strerror}",
            hint="name a folder that you may write to: `-o taken-away`",
        ) from error
    return tuple(folder / name for name in files)


def _write(path: Path, text: str, made: list[Path]) -> None:
    """Write a new file; a script may be run by whoever may read it."""
    mode = 0o777 if path.suffix == ".sh" else 0o666
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    made.append(path)
    with os.fdopen(descriptor, "wb") as file:
        file.write(text.encode())


def _remove(made: Sequence[Path]) -> None:
    for path in made:
        path.unlink(missing_ok=True)


def _holds(path: Path, text: str) -> bool:
    """Whether a file has this very content."""
    try:
        return read_file(path, most_bytes=SETTINGS_BYTES) == text.encode()
    except OSError:
        return False


def _taken(folder: Path, name: str) -> UsageError:
    return UsageError(
        f"{folder / name} is there already, with another content: nothing was written",
        hint=f"name a new folder: `-o {shlex.quote(_free(folder))}`",
    )


def _free(folder: Path) -> str:
    """``taken-away-2``, ``taken-away-3``, ...: the first that is not there yet."""
    plain = str(folder).rstrip("/") or "taken-away"
    names = (f"{plain}-{number}" for number in range(2, _FOLDERS))
    return next(name for name in names if not os.path.lexists(name))

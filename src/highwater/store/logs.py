"""Logs of trials: the last lines of one, where the file that a study names is a trial's log.

A study is a file that anybody may have written: a path in it is not read unless it is called as a
trial's log is.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from highwater.nouns.files import refuse_irregular
from highwater.nouns.trial import LogEnd

LINES = 20
"""Lines of a log's end that are read."""

_TAIL_BYTES = 64 * 1024
_LONGEST_LINE = 500
_SAID = 60
"""Characters of an error's text by which its line is found.

What a log and a result do to longer texts differs.
"""
_NAME = re.compile(r"model_len-\d+(?:\.attempt-\d+)?\.log")
"""Names that trials/local.py gives to logs."""
_FOLDER = re.compile(r"gpu-\d+")
"""The folder in a log's path from which on it lies beside the study."""
_LAUNCHER_ERROR = re.compile(r"torch\.distributed\.elastic\..*ChildFailedError:")
_LAUNCHER_LINE = re.compile(r"[EWI]\d{4} \S+ \d+ torch/distributed/")
"""Lines that torchrun writes into a log itself."""
_TRACEBACK = "Traceback (most recent call last):"
_POINTER = re.compile(r"\s*[~^]+")
"""Marks that a traceback draws under a line."""
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
"""Control sequences of terminals."""


def log_end(log_path: str | None, study_path: str | None, *, said: str = "") -> LogEnd:
    """The last lines of a log, where it was written or beside the study; never raises.

    They end with what was ``said`` by the rank that failed first, where that is there: its peers
    write after it.
    """
    if log_path is None:
        return LogEnd(reason="no log is recorded")
    if not _NAME.fullmatch(Path(log_path).name):
        return LogEnd(reason="it is not called as the log of a trial is, and is not read")
    for path in _places(Path(log_path), study_path):
        try:
            return LogEnd(lines=tuple(_last_lines(_end_of(path), said)))
        except (OSError, ValueError):  # not there, no file, or no path at all
            continue
    return LogEnd(reason="it is not there any more")


def _places(log_path: Path, study_path: str | None) -> Iterator[Path]:
    """Paths where a log may lie: as recorded, and beside the study.

    The study may have been moved with its logs, in the model's folder or above it.
    """
    yield log_path
    parts = log_path.parts
    start = next((index for index, part in enumerate(parts) if _FOLDER.fullmatch(part)), None)
    if study_path is None or start is None or ".." in parts[start:]:
        return
    for first in (start, start - 1):
        if first >= 0 and parts[first] not in ("..", log_path.anchor):
            yield Path(study_path).parent.joinpath(*parts[first:])


def _end_of(path: Path) -> str:
    """The last bytes of a regular file, as text; raises OSError for anything else, a link too."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        refuse_irregular(descriptor, path)
        start = max(0, os.fstat(descriptor).st_size - _TAIL_BYTES)
        return os.pread(descriptor, _TAIL_BYTES, start).decode("utf-8", errors="replace")
    finally:
        os.close(descriptor)


def _last_lines(text: str, said: str) -> list[str]:
    """The lines to show, without colours.

    What a progress bar wrote over itself is lines of its own.
    """
    lines = [_COLOUR.sub("", line).rstrip() for line in re.split(r"[\r\n]+", text)]
    kept = _without_launcher([line for line in lines if line and not _POINTER.fullmatch(line)])
    with_said = (index for index, line in enumerate(kept, 1) if said and said[:_SAID] in line)
    end = max(with_said, default=len(kept))
    return [
        line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}…"
        for line in kept[:end][-LINES:]
    ]


def _without_launcher(lines: list[str]) -> list[str]:
    """Lines of the workers, without the traceback and the summary that torchrun ends a log with.

    All lines, where torchrun's are all there is.
    """
    end = next((index for index, line in enumerate(lines) if _LAUNCHER_ERROR.match(line)), None)
    if end is None:
        return lines
    tracebacks = (index for index, line in enumerate(lines[:end]) if line == _TRACEBACK)
    start = max(tracebacks, default=end)
    return [line for line in lines[:start] if not _LAUNCHER_LINE.match(line)] or lines

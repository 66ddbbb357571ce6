"""Logs of trials: the last lines of a log, and the memory snapshots beside it.

Anyone may have written a study: its paths are read only if named as a trial's log is.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from highwater.nouns.codec import refuse_irregular
from highwater.nouns.environment import SNAPSHOTS, Profiling, coordinates, snapshot_name
from highwater.nouns.settings import short_settings
from highwater.nouns.study import Study
from highwater.nouns.trial import LogEnd, TrialResult, TrialSpec
from highwater.units import format_tokens

LINES = 20
"""Number of lines read from a log's end."""

_TAIL_BYTES = 64 * 1024
_LONGEST_LINE = 500
_SAID = 60
"""Characters of an error's text that identify its line: logs and results cut longer texts."""
_NAME = re.compile(r"model_len-\d+(?:\.attempt-\d+)?\.log")
"""Names that trials/local.py gives to logs."""
_FOLDER = re.compile(r"gpu-\d+")
"""Folder in a log's path: from it on, the path may also lie beside the study."""
_LAUNCHER_ERROR = re.compile(r"torch\.distributed\.elastic\..*ChildFailedError:")
_LAUNCHER_LINE = re.compile(r"[EWI]\d{4} \S+ \d+ torch/distributed/")
"""Lines that torchrun itself writes into a log."""
_TRACEBACK = "Traceback (most recent call last):"
_POINTER = re.compile(r"\s*[~^]+")
"""Marks that a traceback draws under a line."""
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
"""Control sequences of terminals."""


def log_end(log_path: str | None, study_path: str | None, *, said: str = "") -> LogEnd:
    """Return the last lines of a log, at its recorded path or beside the study; never raises. They
    end with the text ``said`` of the rank that failed first, if found: other ranks write after it.
    """
    if log_path is None:
        return LogEnd(reason="no log is recorded")
    if not _NAME.fullmatch(Path(log_path).name):
        return LogEnd(reason="it is not called as the log of a trial is, and is not read")
    for path in _places(Path(log_path), study_path):
        try:
            return LogEnd(lines=tuple(_last_lines(_end_of(path), said)))
        except (OSError, ValueError):  # missing, not a regular file, or not even a path
            continue
    return LogEnd(reason="it is not there any more")


def _places(log_path: Path, study_path: str | None) -> Iterator[Path]:
    """Yield paths of a log: as recorded, and beside a study that was moved, in its folders."""
    yield log_path
    parts = log_path.parts
    start = next((index for index, part in enumerate(parts) if _FOLDER.fullmatch(part)), None)
    if study_path is None or start is None or ".." in parts[start:]:
        return
    for first in (start, start - 1):
        if first >= 0 and parts[first] not in ("..", log_path.anchor):
            yield Path(study_path).parent.joinpath(*parts[first:])


def _end_of(path: Path) -> str:
    """Return the last bytes of a regular file, as text; OSError for anything else, links too."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        refuse_irregular(descriptor, path)
        start = max(0, os.fstat(descriptor).st_size - _TAIL_BYTES)
        return os.pread(descriptor, _TAIL_BYTES, start).decode("utf-8", errors="replace")
    finally:
        os.close(descriptor)


def _last_lines(text: str, said: str) -> list[str]:
    """Return lines to show, without colours, including states of progress bars."""
    lines = [_COLOUR.sub("", line).rstrip() for line in re.split(r"[\r\n]+", text)]
    kept = _without_launcher([line for line in lines if line and not _POINTER.fullmatch(line)])
    with_said = (index for index, line in enumerate(kept, 1) if said and said[:_SAID] in line)
    end = max(with_said, default=len(kept))
    last = kept[:end][-LINES:]
    return [each if len(each) <= _LONGEST_LINE else f"{each[:_LONGEST_LINE]}…" for each in last]


def _without_launcher(lines: list[str]) -> list[str]:
    """Return the lines without torchrun's traceback and summary, or all if nothing else is left."""
    end = next((index for index, line in enumerate(lines) if _LAUNCHER_ERROR.match(line)), None)
    if end is None:
        return lines
    tracebacks = (index for index, line in enumerate(lines[:end]) if line == _TRACEBACK)
    start = max(tracebacks, default=end)
    return [line for line in lines[:start] if not _LAUNCHER_LINE.match(line)] or lines


def snapshot_folder(log_path: Path) -> Path:
    """Return the folder of one launch's snapshots: ``model_len-8192/memory_snapshots``."""
    return log_path.with_suffix("") / SNAPSHOTS


def recorded_snapshots(log_path: Path) -> tuple[Path, ...]:
    """Return the snapshots of all launches of a trial, by one launch's log; latest step last."""
    stem = log_path.stem.partition(".attempt-")[0]
    found = [
        path
        for launch in (stem, f"{stem}.attempt-*")
        for path in log_path.parent.glob(f"{launch}/memory_snapshots/*/snapshot_rank*.pickle")
    ]
    return tuple(sorted(found, key=lambda path: (path.stat().st_mtime, path)))


def ranks_snapshots(folder: Path) -> tuple[Path, ...]:
    """Return one step's snapshots: those in the folder, of its last step, or any ``.pickle``."""
    for pattern in ("", "*/", "memory_snapshots/*/"):
        found = sorted(folder.glob(f"{pattern}snapshot_rank*.pickle"))
        if found:
            last = max((path.parent for path in found), key=_step)
            return tuple(path for path in found if path.parent == last)
    return tuple(sorted(folder.glob("*.pickle")))


def _step(part: Path) -> tuple[int, str]:
    """Sort key that orders ``setup``, ``step_0`` and ``step_10``."""
    number = part.name.removeprefix("step_")
    return (int(number) if number.isdecimal() else -1), part.name


def snapshot_lines(spec: TrialSpec, result: TrialResult, profiling: Profiling) -> Iterator[str]:
    """Yield, for each part of a trial, which ranks wrote a snapshot, and which did not."""
    if result.log_path is None:
        return
    folder = snapshot_folder(Path(result.log_path))
    ranks = [rank for rank in range(spec.layout.gpus) if profiling.records(rank)]
    parts = sorted(part for part in folder.glob("*") if part.is_dir())
    if not parts:
        yield f"memory snapshots: none below {folder}, no rank came so far"
    for part in parts:
        silent = [
            rank
            for rank in ranks
            if not (part / snapshot_name(rank, coordinates(spec.layout, rank))).is_file()
        ]
        none = f"; none of rank {', '.join(map(str, silent))}" if silent else ""
        told = len(ranks) - len(silent)
        yield f"memory snapshots: {told} of {len(ranks)} ranks in {part}{none}"
    ended = _ended(spec, result, profiling)
    if ended is not None:
        yield f"memory snapshots: {ended}"


def study_snapshot_lines(study: Study, profiling: Profiling) -> Iterator[str]:
    """Yield where a study's snapshots are, and which ranks ended before they could write one."""
    yield "memory snapshots of each trial are in a folder beside its log"
    for trial in study.trials:
        result = trial.result
        # a launch that records makes this folder; without it, the trial is of an earlier search
        if not (result and result.log_path and snapshot_folder(Path(result.log_path)).is_dir()):
            continue
        ended = _ended(trial.spec, result, profiling)
        if ended is not None:
            spec = trial.spec
            what = f"{short_settings(spec.settings)}, {format_tokens(spec.length_tokens)} tokens"
            yield f"memory snapshots, {what}: {ended}"


def _ended(spec: TrialSpec, result: TrialResult, profiling: Profiling) -> str | None:
    """Name the ranks that were ended, by a signal or because another failed; None if none were."""
    recorded = {rank for rank in range(spec.layout.gpus) if profiling.records(rank)}
    ended = sorted(recorded - {rank.rank for rank in result.ranks})
    if not ended:
        return None
    several, were = ("s", "were") if len(ended) > 1 else ("", "was")
    named = f"rank{several} {', '.join(map(str, ended))} {were}"
    return f"{named} ended, before a snapshot of where that was could be written"

"""Logs of trials: where each lies, a new one for each launch, and its end."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from highwater.nouns.trial import TrialSpec

LogLayout = Literal["rung", "published"]

_TAIL_BYTES = 256 * 1024


def log_path_of(log_directory: Path, spec: TrialSpec, layout: LogLayout) -> Path:
    """The path of a trial's log, by the layout of logs.

    ``LOG_DIR/<model>/gpu-<N>/sp-<S>/<rung>/model_len-<L>.log``; published: without ``<rung>/``.
    Before the rung of a foreign trainer stands its name.
    """
    folder = log_directory / spec.model_name / f"gpu-{spec.layout.gpus}" / spec.layout.slug
    if layout == "rung":
        by = "" if spec.foreign is None else f"{spec.foreign.trainer}+"
        folder /= f"{by}{spec.settings.slug}"
    return folder / f"model_len-{spec.length_tokens}.log"


@contextmanager
def new_log(wanted: Path) -> Generator[IO[bytes]]:
    """A new file at the path itself, or at the first ``.attempt-N`` beside it that is free.

    No log is ever overwritten, nor the statistics of one that is gone.
    """
    path, attempt = wanted, 1
    while (log := _opened(path)) is None:
        attempt += 1
        path = wanted.with_suffix(f".attempt-{attempt}.log")
    with log:
        yield log


def _opened(path: Path) -> IO[bytes] | None:
    """The new file; None where there is one, which another trial may have made just now."""
    if statistics_path(path).exists():
        return None
    try:
        return path.open("x+b")
    except FileExistsError:
        return None


def statistics_path(log_path: Path) -> Path:
    """Where a trial's statistics lie, beside its log."""
    return log_path.with_suffix(".statistics.jsonl")


def log_tail(log: IO[bytes], most_bytes: int = _TAIL_BYTES) -> str:
    """The end of an open log, whatever became of its name: who writes it may have removed it."""
    start = max(0, os.fstat(log.fileno()).st_size - most_bytes)
    return os.pread(log.fileno(), most_bytes, start).decode("utf-8", errors="replace")

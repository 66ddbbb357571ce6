"""The log directory: where studies lie in it, and proof that it can be written before anything starts."""

import errno
import os
import shlex
import shutil
import tempfile
from pathlib import Path

from highwater.errors import MachineError, StudyError, UsageError
from highwater.spec.study import Question
from highwater.units import MIB, format_bytes

FREE_BYTES = 64 * MIB
"""Free space that a search needs at the start: a log is tens of KiB, a study a few MiB."""

_PROBE_BYTES = 4096


def check_log_directory(directory: Path) -> None:
    """Make the directory and write a file in it, to the disk; the file is removed again.

    Raises UsageError when it cannot be written, MachineError when there is no space.
    """
    probe = directory / f".highwater-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with probe.open("xb") as file:
                file.write(b"\0" * _PROBE_BYTES)
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _full(directory, f"no space left: {error.strerror}") from error
        raise UsageError(
            f"the log directory {directory} cannot be written: {error.strerror}",
            hint=f"use `--log-dir {_another()}`",
        ) from error
    free = shutil.disk_usage(directory).free
    if free < FREE_BYTES:
        raise _full(directory, f"{format_bytes(free)} are free, a search needs {format_bytes(FREE_BYTES)}")


def study_path(log_directory: Path, question: Question) -> Path:
    """Where a question's study lies unless the user says otherwise: the same question, the same file."""
    return log_directory / question.model.name / f"study-{question.key[:6]}.jsonl"


def newest_studies(log_directory: Path) -> list[Path]:
    """The studies under the log directory, the one that was written last first; raises StudyError when there is none."""
    studies = sorted(log_directory.glob("*/study-*.jsonl"), key=lambda path: path.stat().st_mtime, reverse=True)
    if not studies:
        raise StudyError(f"there is no study under {log_directory}", hint="`highwater find Qwen3-0.6B` makes one")
    return studies


def _another() -> str:
    """A directory that can be written, as one types it: at home, or else where temporary files go."""
    home = Path.home()
    return shlex.quote(str((home if os.access(home, os.W_OK) else Path(tempfile.gettempdir())) / "highwater-logs"))


def _full(directory: Path, problem: str) -> MachineError:
    return MachineError(
        f"the log directory {directory} is full: {problem}",
        hint=f"free some space (`df -h {shlex.quote(str(directory))}`), or use `--log-dir {_another()}`",
    )

"""The file of a journal, held open and locked, to which lines are appended and synced.

A line is on the disk when it is written, or the file is as long as before. Who deletes, replaces,
cuts or writes the file while a search has it open stops that search: what it would append
afterwards belonged to nothing (docs/decisions/026).
"""

import errno
import fcntl
import os
import shlex
from pathlib import Path

from highwater.errors import MachineError, StudyError
from highwater.nouns.files import read_file, refuse_irregular
from highwater.units import MIB, format_bytes

MOST_BYTES = 512 * MIB
"""Bytes of a study at the most: 10,000 trials on 8 GPUs have about 60 MiB."""
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class LockedError(Exception):
    """Another process has the file open for writing."""


class JournalFile:
    """One open file. Made by ``open_file``; nobody else has it while it is open."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size

    def content(self) -> bytes:
        """All that is in the file."""
        return os.pread(self._descriptor, self._size, 0)

    def cut(self, size: int) -> None:
        """Drop what follows the first ``size`` bytes."""
        os.ftruncate(self._descriptor, size)
        self._size = size

    def append(self, line: bytes) -> None:
        """Append one line and wait until the disk has it; after a failure the file is as before.
        Raises MachineError when that fails, StudyError when the file is not as this process left
        it.
        """
        what = self._touched()
        if what is not None:
            raise self._lost(what, line)
        if self._size + len(line) > MOST_BYTES:
            raise StudyError(
                f"{self.path} would have more than {format_bytes(MOST_BYTES)}, and no study is "
                "read that has",
                hint=f"`highwater show {shlex.quote(str(self.path))}` shows what it has; use "
                f"{free_study(self.path)} for more",
            )
        left = memoryview(line)
        try:
            while left:  # a write may take less than it was given
                left = left[os.write(self._descriptor, left) :]
            os.fsync(self._descriptor)
        except OSError as error:
            # Half a line, or one that is not on the disk, must not stand before the next one.
            os.ftruncate(self._descriptor, self._size)
            raise self._unwritable(error) from error
        self._size += len(line)

    def sync_name(self) -> None:
        """Make a new file's name durable; the file's own fsync does not."""
        descriptor = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)

    def _touched(self) -> str | None:
        """What somebody did to the file since it was last written, in words; None for nothing."""
        held = os.fstat(self._descriptor)
        try:
            found = self.path.stat()
        except OSError:
            return "deleted"
        if (found.st_dev, found.st_ino) != (held.st_dev, held.st_ino):
            return "replaced"
        if held.st_size < self._size:
            return f"cut from {self._size:,} to {held.st_size:,} bytes"
        if held.st_size > self._size:
            return f"written by somebody else, {held.st_size - self._size:,} bytes"
        return None

    def _lost(self, what: str, line: bytes) -> StudyError:
        """The error for a file that somebody touched. Of a file that is gone from its place
        everything can still be read through the open descriptor: it is kept in a free path beside
        it, the new line too.
        """
        problem = f"{self.path} was {what} while the search had it open"
        if what not in ("deleted", "replaced"):
            return StudyError(
                f"{problem}: what is left of its finished trials is in it",
                hint=f"type the same command to go on from what is left, or start afresh with "
                f"{free_study(self.path)}",
            )
        flag, kept = free_study(self.path), free_path(self.path)
        try:
            with kept.open("xb") as file:
                os.fchmod(file.fileno(), os.fstat(self._descriptor).st_mode & 0o777)
                file.write(self.content() + line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            why = f"its finished trials cannot be kept in {kept}: {error.strerror}"
            return StudyError(f"{problem}; {why}", hint="type the same command to start afresh")
        return StudyError(
            f"{problem}: its finished trials are kept in {kept}",
            hint=f"go on with the same command and {flag}",
        )

    def _unwritable(self, error: OSError) -> MachineError:
        if error.errno not in _NO_SPACE:
            return MachineError(
                f"{self.path} cannot be written: {error.strerror}",
                hint="check the disk with `df -h` and `dmesg`",
            )
        look = f"`df -h {shlex.quote(str(self.path.parent))}`"
        return MachineError(
            f"no space left to record the study in {self.path}: {error.strerror}",
            hint=f"free some space ({look}), then type the same command: every finished trial is "
            "kept",
        )


def open_file(path: Path, *, is_private: bool = False) -> JournalFile:
    """Open the file at ``path`` for writing, locked, and create it where there is none; with
    ``is_private`` its user alone may read it. Raises StudyError where it cannot be opened,
    LockedError while somebody else has it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o644)
    except OSError as error:
        raise _unopened(path, error) from error
    try:
        refuse_irregular(descriptor, path)
        if is_private:
            os.fchmod(descriptor, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise LockedError(path) from error
    except OSError as error:
        os.close(descriptor)
        raise _unopened(path, error) from error
    if os.fstat(descriptor).st_size > MOST_BYTES:
        os.close(descriptor)
        raise _unopened(path, OSError(errno.EFBIG, f"it has more than {format_bytes(MOST_BYTES)}"))
    return JournalFile(path, descriptor)


def read_journal(path: Path) -> bytes:
    """The content of the file at ``path`` now; raises OSError."""
    return read_file(path, most_bytes=MOST_BYTES)


def split_torn(content: bytes) -> tuple[bytes, bytes]:
    """The full lines, and what follows the last line end."""
    end = content.rfind(b"\n") + 1
    return content[:end], content[end:]


def free_path(path: Path) -> Path:
    """The first path beside ``path`` where there is no file."""
    number = 2
    while (other := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    return other


def free_study(path: Path) -> str:
    """The flag for a free path beside ``path``: what hints offer when ``path`` will not do."""
    name = shlex.quote(str(free_path(path)))
    return f"`--study={name}`" if name.startswith("-") else f"`--study {name}`"


def _unopened(path: Path, error: OSError) -> StudyError:
    return StudyError(
        f"{path} cannot be opened for writing: {error.strerror}",
        hint="name a file that can with `--study`, or use `--log-dir ./logs`",
    )

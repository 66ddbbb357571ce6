"""Journal file: held open and locked, while lines are appended and synced.

A line is on the disk after it is written; if that fails, the file is as long as before. If anyone
deletes, replaces, cuts or writes the file while a search has it open, that search stops: further
lines would not belong to what is left (docs/decisions/026).
"""

import errno
import fcntl
import hashlib
import os
import shlex
from pathlib import Path

from highwater.errors import MachineError, StudyError
from highwater.nouns.codec import read_file, refuse_irregular
from highwater.units import MIB, format_bytes

MOST_BYTES = 512 * MIB
"""Largest size of a study: 10,000 trials on 8 GPUs have about 60 MiB."""
_CHECKSUM_DIGITS = 16
_SEAL = b'{"checksum":"%b",'
NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class LockedError(Exception):
    """Raised if another process has the journal open for writing."""


class JournalFile:
    """One open journal file, locked against other processes; made by ``open_file``."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size

    def content(self) -> bytes:
        """Return all bytes of the file."""
        return os.pread(self._descriptor, self._size, 0)

    def cut(self, size: int) -> None:
        """Drop everything after the first ``size`` bytes."""
        os.ftruncate(self._descriptor, size)
        self._size = size

    def append(self, line: bytes) -> None:
        """Append a line, and wait for the disk. Raises MachineError if that fails, StudyError if
        others changed the file, or if it would be too large.
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
            # Half a line, or one that may not be on the disk, must not come before the next one.
            os.ftruncate(self._descriptor, self._size)
            raise self._unwritable(error) from error
        self._size += len(line)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)

    def _touched(self) -> str | None:
        """Describe how others changed the file since it was last written; None if unchanged."""
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
        """Return the error for a file that others changed. If it is gone from its path, its whole
        content, read through the open descriptor, and the new line are saved beside that path.
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
        if error.errno not in NO_SPACE:
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
    """Open the file at ``path`` for writing, made if need be, and lock it; with ``is_private`` for
    its user alone. StudyError: it cannot be opened; LockedError: another process has it.
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
    """Return the current content of the file at ``path``; raises OSError."""
    return read_file(path, most_bytes=MOST_BYTES)


def split_torn(content: bytes) -> tuple[bytes, bytes]:
    """Split a journal into its whole lines and a last line that was cut off, perhaps empty."""
    end = content.rfind(b"\n") + 1
    return content[:end], content[end:]


def sealed(text: str, *, after: str) -> tuple[bytes, str]:
    """Return the line with its checksum in front, and that checksum: of this line and of ``after``,
    the checksum of the line before.
    """
    content = text.encode()
    checksum = hashlib.sha256(after.encode() + content).hexdigest()[:_CHECKSUM_DIGITS]
    return _SEAL % checksum.encode() + content[1:], checksum


def unsealed(line: bytes, *, after: str) -> tuple[bytes, str]:
    """A line without its checksum, and the checksum; ValueError if they do not match."""
    text = b"{" + line[len(_SEAL % (b"0" * _CHECKSUM_DIGITS)) :]
    as_written, checksum = sealed(text.decode(), after=after)
    if line != as_written:
        raise ValueError("it is not as it was written, or a line before it is missing")
    return text, checksum


def free_path(path: Path) -> Path:
    """Return the first numbered path beside ``path`` at which there is no file."""
    number = 2
    while (other := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    return other


def free_study(path: Path) -> str:
    """Return the flag, quoted, for a free path beside ``path``, for hints."""
    name = shlex.quote(str(free_path(path)))
    return f"`--study={name}`" if name.startswith("-") else f"`--study {name}`"


def _unopened(path: Path, error: OSError) -> StudyError:
    return StudyError(
        f"{path} cannot be opened for writing: {error.strerror}",
        hint="name a file that can with `--study`, or use `--log-dir ./logs`",
    )

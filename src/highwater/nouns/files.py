"""Files that a user names, or that are found on a disk: regular ones alone, with a bound. A pipe
would be waited for without end, a device would fill the memory. And files that are written whole.
"""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

import msgspec

from highwater.errors import UsageError
from highwater.nouns.codec import T, from_json
from highwater.units import MIB, format_bytes

SETTINGS_BYTES = MIB
"""Bytes of a file of settings, or a table of capacities, at the most. The published table has 12
KiB."""
CONFIG_BYTES = 16 * MIB
"""Bytes of a model's ``config.json``, or an answer of ``predict --json``, at the most. The largest
known have a few MiB."""

INDEX_BYTES = 1024 * MIB
"""Bytes of a JSON document in a checkpoint or a corpus at the most: its manifest, its index, its
state. An index of 100,000 pieces has about 20 MiB, a state of a million steps as much."""


def record_in(path: Path, kind: type[T], *, called: str, what: str, hint: str) -> T:
    """The JSON record in a file that a user names, ``called`` so; UsageError where it cannot be
    read, or is not ``what`` it is to be.
    """
    try:
        return from_json(read_file(path, most_bytes=CONFIG_BYTES), kind)
    except OSError as error:
        problem = f"the {called} {path} cannot be read: {error.strerror}"
        raise UsageError(problem, hint=hint) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not {what}: {error}", hint=hint) from error


def read_file(path: Path, *, most_bytes: int) -> bytes:
    """The content of a regular file of at most ``most_bytes``.

    Raises OSError for any other, a pipe or a device for example.
    """
    content = bytearray()
    with open_regular(path) as file:
        # in pieces: to read up to a bound at once takes memory for all of it
        is_longer = os.fstat(file.fileno()).st_size > most_bytes
        while not is_longer and (piece := file.read(MIB)):
            content += piece
            is_longer = len(content) > most_bytes
    if is_longer:
        raise OSError(errno.EFBIG, f"it has more than {format_bytes(most_bytes)}", str(path))
    return bytes(content)


def open_regular(path: Path) -> BufferedReader:
    """A regular file, open to be read; raises OSError for any other, a pipe or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        refuse_irregular(descriptor, path)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def refuse_irregular(descriptor: int, path: Path) -> None:
    """Raise OSError for what was opened and is no regular file."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def write_whole(path: Path, content: bytes, *, durably: bool = False) -> None:
    """Write a file whole, or not at all, whoever else writes the same; ``durably``: onto the disk,
    with its name.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            if durably:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    if durably:
        make_durable(path.parent)


def make_durable(folder: Path) -> None:
    """Sync the names in a folder to the disk; a file's own fsync leaves its name out."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

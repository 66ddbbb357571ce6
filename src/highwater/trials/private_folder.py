"""Private folders of a trial, a trace or a reading, for its user alone and while it lasts.

Who is killed with -9, and the reaper with it, cannot tidy up: the next start does. A folder is
known by the lock in it, which the kernel holds for as long as its maker lives; what has no such
lock, or is somebody else's, is never touched.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

_PREFIX = "highwater-"
_LOCK = ".made-by-highwater"


@contextmanager
def private_folder(parent: Path | None = None, *, kind: str = "") -> Generator[Path]:
    """A new folder below ``parent``, by default where temporary files go.

    It is gone when this returns, with all that is in it. ``kind`` becomes a part of its name.
    Before the first one below a parent is made, what others left there is removed.
    """
    parent = (parent or Path(tempfile.gettempdir())).resolve()
    _remove_what_is_left(parent)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}", dir=parent))
    lock = None
    try:
        lock = _locked(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the reaper may be at it, too
        if lock is not None:
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """Take the folder's lock, which is free when this process is gone.

    None where the disk knows no locks.
    """
    unnamed = folder / f"{_LOCK}.new"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    unnamed.rename(folder / _LOCK)  # only now: nobody finds one that is not held yet
    return lock


@cache
def _remove_what_is_left(parent: Path) -> None:
    """Remove the folders of those who were killed."""
    with suppress(OSError):
        for folder in parent.glob(f"{_PREFIX}*"):
            with suppress(OSError):
                _remove_if_left(folder)


def _remove_if_left(folder: Path) -> None:
    """Remove a folder of this user's that nobody holds; raises OSError for anything else."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)

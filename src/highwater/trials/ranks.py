"""Ranks: start the processes of one trial, one for each GPU, and keep each one's exit and output.

The ranks meet through a file in the trial's own folder, so that no port is open. All write to one
log. The end of each rank's output is also kept apart, because an error in a log of several ranks
does not show which rank wrote it.
"""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import IO

import msgspec

from highwater.nouns.codec import Record, from_json, to_json, write_whole
from highwater.nouns.control_group import kernel_kills
from highwater.nouns.environment import STORE_VARIABLE

_TAIL_BYTES = 64 * 1024
_DRAINED_S = 5.0
"""Bound on the time until a pipe is empty after all its writers have ended."""
_EXITS = "exits.json"


def started(
    words: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    stdin: int | None = subprocess.DEVNULL,
    stdout: IO[bytes] | int | None = None,
    stderr: IO[bytes] | int | None = None,
    keeps: Sequence[int] = (),
    prepare: Callable[[], None] | None = None,
    is_apart: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a program without a shell; the only function that does. ``keeps``: file descriptors
    that stay open; ``prepare`` runs in the new process before the program; ``is_apart``: Ctrl-C in
    the terminal does not reach it.
    """
    return subprocess.Popen(
        words,
        env=environment,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=keeps,
        preexec_fn=prepare,
        start_new_session=is_apart,
    )


def answered(
    words: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a short program to its end. After ``timeout_s``, kill it and raise TimeoutExpired."""
    pipe = subprocess.PIPE
    with started(words, environment=environment, stdout=pipe, stderr=pipe) as process:
        try:
            said, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, said, errors)


class RankExit(Record, frozen=True, kw_only=True):
    """How one rank's process ended; a rank killed because another failed has no record."""

    rank: int
    status: int
    """Exit status; -n if signal n ended the process."""
    output: str = ""
    """The end of the rank's output."""


class RanksLeft(Record, frozen=True, kw_only=True):
    """How the ranks of one machine ended, and how many the kernel killed."""

    exits: tuple[RankExit, ...] = ()
    """Exits of the ranks, the earliest first; empty if no reaper lived to write them."""
    kernel_kills: int = 0
    """Processes that the kernel killed for lack of memory meanwhile."""


class RankShare(Record, frozen=True, kw_only=True):
    """The ranks of one trial that one machine starts: all of them, or some."""

    count: int
    folder: str
    """Folder for the file that says how the ranks ended."""
    first: int = 0
    """Number of the first of these ranks."""
    world: int | None = None
    """Number of ranks of the whole trial; None: ``count``."""
    store: str | None = None
    """The file through which all ranks meet; None: one in ``folder``."""
    is_at_port: bool = False
    """True if the ranks meet at the port that their environment names, and not through a file."""


class Ranks:
    """The processes of one trial on one machine; ``pids`` maps process ids to ranks."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        share: RankShare,
        prepare: Callable[[], None],
        is_plain: bool = False,
    ) -> None:
        """Start the ranks, each after ``prepare``; ``is_plain``: without copying output."""
        self._folder, self._first = Path(share.folder), share.first
        self._kills_before = kernel_kills()
        self._processes: list[subprocess.Popen[bytes]] = []
        """The processes, kept until all ended, so that a reaped process id is known."""
        for local_rank in range(share.count):
            of_rank = {
                "RANK": str(share.first + local_rank),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": str(share.world or share.count),
            }
            if not share.is_at_port:
                of_rank[STORE_VARIABLE] = share.store or str(self._folder / "store")
            self._processes.append(
                started(
                    command,
                    environment=os.environ | of_rank,
                    stdin=None,
                    stdout=None if is_plain else subprocess.PIPE,
                    stderr=None if is_plain else subprocess.STDOUT,
                    prepare=prepare,
                )
            )
        self.pids = {
            process.pid: rank for rank, process in enumerate(self._processes, start=share.first)
        }
        # Threads start only now: a process with threads had better not fork.
        self._outputs = [_RankOutput() for _ in self._processes]
        self._copying = [
            Thread(target=output.copy, args=(process.stdout,), daemon=True)
            for output, process in zip(self._outputs, self._processes, strict=True)
            if process.stdout is not None
        ]
        for thread in self._copying:
            thread.start()

    def leave_exits(self, statuses: Sequence[tuple[int, int]]) -> None:
        """Write the exits of all ranks, in the order of ``statuses``, after all have ended."""
        for thread in self._copying:
            thread.join(_DRAINED_S)
        exits = tuple(
            RankExit(
                rank=(rank := self.pids[pid]),
                status=status,
                output=self._outputs[rank - self._first].text(),
            )
            for pid, status in statuses
        )
        left = RanksLeft(exits=exits, kernel_kills=kernel_kills() - self._kills_before)
        write_whole(self._folder / _EXITS, to_json(left).encode())


def read_left(folder: Path) -> RanksLeft:
    """Read exits and kernel kills that the ranks left in ``folder``; empty if not readable."""
    try:
        return from_json((folder / _EXITS).read_bytes(), RanksLeft)
    except (OSError, msgspec.MsgspecError):
        return RanksLeft()


class _RankOutput:
    """Copies a rank's output to the log, and keeps the last part of it."""

    def __init__(self) -> None:
        self._kept = b""

    def copy(self, pipe: IO[bytes]) -> None:
        """Copy until all writers of the pipe have closed it. A full disk must not stop the rank."""
        while chunk := os.read(pipe.fileno(), _TAIL_BYTES):
            self._kept = (self._kept + chunk)[-_TAIL_BYTES:]
            left = memoryview(chunk)
            try:
                while left:
                    left = left[os.write(1, left) :]
            except OSError:
                continue

    def text(self) -> str:
        return self._kept.decode("utf-8", errors="replace")

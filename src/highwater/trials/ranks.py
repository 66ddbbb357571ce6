"""Ranks: the processes of one trial, one for each GPU, and what each of them leaves.

That is its exit, and the end of its output. The ranks meet through a file in the trial's own
folder, so that nobody listens for them. What they write goes to one log, as it comes; of each rank
the end is kept apart, because an error in a log of several says nothing about who made it.
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
"""Bound on the time until a pipe is empty whose writers are all gone."""
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
    """Start a process of these words, which no shell sees; no other place starts a program.
    ``keeps``: file descriptors that stay open; ``prepare`` runs in it before the program;
    ``is_apart``: Ctrl-C in the terminal does not reach it.
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
    """Output and status of a short program; TimeoutExpired, and it is killed, if it is longer."""
    pipe = subprocess.PIPE
    with started(words, environment=environment, stdout=pipe, stderr=pipe) as process:
        try:
            said, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, said, errors)


class RankExit(Record, frozen=True, kw_only=True):
    """The end of one rank's process; one that was killed because another had failed has none."""

    rank: int
    status: int
    """The exit status; -n where signal n ended the process."""
    output: str = ""
    """The end of what the rank wrote."""


class RanksLeft(Record, frozen=True, kw_only=True):
    """Whatever the ranks of one machine left besides their reports."""

    exits: tuple[RankExit, ...] = ()
    """Their ends, the first one first; empty where nobody lived to write it down."""
    kernel_kills: int = 0
    """Processes that the kernel killed for want of memory meanwhile."""


class RankShare(Record, frozen=True, kw_only=True):
    """The ranks of one trial that one machine starts: all of them, or those that follow others."""

    count: int
    folder: str
    """The file that says how they ended."""
    first: int = 0
    """The rank of the first."""
    world: int | None = None
    """Ranks of the whole trial; None: these."""
    store: str | None = None
    """The file through which all ranks meet; None: one in ``folder``."""
    is_at_port: bool = False
    """True if they meet at the port that their environment names, and not through a file."""


class Ranks:
    """The processes of one trial on one machine; ``pids`` says which process is which rank."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        share: RankShare,
        prepare: Callable[[], None],
        is_plain: bool = False,
    ) -> None:
        """Start ranks of ``command`` after ``prepare``; ``is_plain``: with this one's output."""
        self._folder, self._first = Path(share.folder), share.first
        self._kills_before = kernel_kills()
        self._processes: list[subprocess.Popen[bytes]] = []
        """The processes, kept to the end: whoever reaps knows them by their ids."""
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
        # Only now: a process that has threads had better not fork.
        self._outputs = [_RankOutput() for _ in self._processes]
        self._copying = [
            Thread(target=output.copy, args=(process.stdout,), daemon=True)
            for output, process in zip(self._outputs, self._processes, strict=True)
            if process.stdout is not None
        ]
        for thread in self._copying:
            thread.start()

    def leave_exits(self, statuses: Sequence[tuple[int, int]]) -> None:
        """Write down who ended how, in this order; comes once none of them runs any more."""
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
    """Read what the ranks left that wrote into ``folder``."""
    try:
        return from_json((folder / _EXITS).read_bytes(), RanksLeft)
    except (OSError, msgspec.MsgspecError):
        return RanksLeft()


class _RankOutput:
    """Passes on what a rank writes, and keeps its end."""

    def __init__(self) -> None:
        self._kept = b""

    def copy(self, pipe: IO[bytes]) -> None:
        """Copy to the log until nobody has the pipe. A full disk must not stop who writes."""
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

"""Ranks: the processes of one trial, one for each GPU, and what each of them leaves.

That is its exit, and the end of its output. The ranks meet through a file in the trial's own
folder, so that nobody listens for them. What they write goes to one log, as it comes; of each rank
the end is kept apart, because an error in a log of several says nothing about who made it.
"""

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO

import msgspec

from highwater.nouns.codec import Record, from_json, to_json
from highwater.nouns.environment import STORE_VARIABLE

_TAIL_BYTES = 64 * 1024
_DRAINED_S = 5.0
"""Bound on the time until a pipe is empty whose writers are all gone."""
_EXITS = "exits.json"


class RankExit(Record, frozen=True, kw_only=True):
    """How one rank's process ended by itself.

    A rank that was killed because another had failed has none.
    """

    rank: int
    status: int
    """The exit status; -n where signal n ended the process."""
    output: str = ""
    """The end of what the rank wrote."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """The ranks of one trial that one machine starts: all of them, or those that follow others."""

    count: int
    folder: Path
    """Where it is written how they ended."""
    first: int = 0
    """The rank of the first."""
    world: int | None = None
    """Ranks of the whole trial; None: these."""
    store: Path | None = None
    """The file through which all ranks meet; None: one in ``folder``."""

    @property
    def words(self) -> tuple[str, ...]:
        """The share in words, for ``RankShare.of``."""
        world, store = self.world or self.count, self.store or self.folder / "store"
        return (str(self.count), str(self.folder), str(self.first), str(world), str(store))

    @classmethod
    def of(cls, words: Sequence[str]) -> "RankShare":
        """The share that ``words`` says."""
        count, folder, first, world, store = words
        return cls(int(count), Path(folder), int(first), int(world), Path(store))


class Ranks:
    """The processes of one trial on one machine; ``pids`` says which process is which rank."""

    def __init__(
        self, command: Sequence[str], *, share: RankShare, prepare: Callable[[], None]
    ) -> None:
        """Start a process of ``command`` for each rank of the share; ``prepare`` runs in each of
        them before it.
        """
        self._folder, self._first = share.folder, share.first
        _, _, first, world, store = share.words
        self._processes: list[subprocess.Popen[bytes]] = []
        """The processes, kept to the end: whoever reaps knows them by their ids."""
        for local_rank in range(share.count):
            of_rank = {
                "RANK": str(int(first) + local_rank),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": world,
                STORE_VARIABLE: store,
            }
            self._processes.append(
                subprocess.Popen(
                    command,
                    env=os.environ | of_rank,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    preexec_fn=prepare,
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
        ]
        for thread in self._copying:
            thread.start()

    def leave_exits(self, statuses: Sequence[tuple[int, int]]) -> None:
        """Write down who ended how, as process and status in this order.

        Comes once none of them runs any more.
        """
        for thread in self._copying:
            thread.join(_DRAINED_S)
        exits = [
            RankExit(
                rank=(rank := self.pids[pid]),
                status=status,
                output=self._outputs[rank - self._first].text(),
            )
            for pid, status in statuses
        ]
        (self._folder / _EXITS).write_text(to_json(exits), encoding="utf-8")


def read_exits(folder: Path) -> tuple[RankExit, ...]:
    """How the ranks ended, the first one first; empty where nobody lived to write it down."""
    try:
        return from_json((folder / _EXITS).read_bytes(), tuple[RankExit, ...])
    except (OSError, msgspec.MsgspecError):
        return ()


class _RankOutput:
    """Passes on what a rank writes, and keeps its end."""

    def __init__(self) -> None:
        self._kept = b""

    def copy(self, pipe: IO[bytes]) -> None:
        """Copy to the log until nobody has the pipe any more.

        A log whose disk is full must not stop who writes.
        """
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

"""A folder in which the machines of one search, or of one training, meet: a file for each word that
one says to others. A training has one trial, which is all of it.

Every machine sees it, on a file system that they share. Nobody listens on a port, and what is read
is JSON of known types. A file is written beside its name and then renamed: whoever finds it finds
all of it.

    node-0.json   a machine has come, and what it is
    node-0.alive  a number that changes as long as it is there
    trial-1/      the first trial: its specification, its reports, the file through which ranks meet
      go.json     start your ranks
      end         end them
      1/done.json the second machine's have ended, and how; in the folder also their exits
    over          the search is over, or was interrupted
"""

import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import TypeVar

from highwater.errors import UsageError
from highwater.nouns.codec import Record, from_json, to_json

LOST_S = 60.0
"""Seconds without a sign of life after which a machine counts as lost: file systems that are shared
show what others wrote up to half a minute late."""
_SIGN_S = 1.0
_GONE_S = 30.0
_ASKED_S = 0.1
_WORD = re.compile(r"node-\d+\.(?:json|alive)|over")
_TRIAL = re.compile(r"trial-\d+")
_UNFINISHED = re.compile(r"\.(?:node-\d+\.(?:json|alive)|over)\.\d+$")
"""A word that is still being written, beside its name."""
_Said = TypeVar("_Said", bound=Record)


class NodeReady(Record, frozen=True, kw_only=True):
    """What a machine says when it has come."""

    host: str
    highwater_version: str
    device_name: str
    """Its GPUs as their driver names them, or ``CPU``."""
    config_digest: str
    """Digest of the model's configuration, as it lies there."""
    problem: str | None = None
    """Why it can run no trial; None where it can."""


class Go(Record, frozen=True, kw_only=True):
    """The word to start the ranks of a trial, or of a training."""

    log_path: str
    """The log, beside which each machine has its own."""
    trains: bool = False
    """Whether it is a training."""


class Done(Record, frozen=True, kw_only=True):
    """How the ranks of one machine ended."""

    exit_code: int | None
    """Exit status of its reaper; None where the ranks were ended."""
    kernel_kills: int = 0


class NodeFolder:
    """The folder, as one machine of the search uses it."""

    def __init__(self, path: Path, *, node: int, nodes: int) -> None:
        """``node`` is the machine's number, from 0, whose machine searches."""
        self.path = path
        self.node = node
        self.nodes = nodes
        self._seen: dict[int, tuple[str, float]] = {}
        """The last sign of life of each machine, and when it was seen first."""
        self._stopped = Event()
        self._signs = Thread(target=self._give_signs, daemon=True)
        self._has_come = False

    def refuse_used(self) -> None:
        """Raise UsageError for a folder that has anything but machines that came before this one:
        another search's, or a user's.
        """
        others = {f"node-{node}.json" for node in range(1, self.nodes)}
        others |= {f"node-{node}.alive" for node in range(1, self.nodes)}
        left = sorted(name for name in names(self.path) - others if not _UNFINISHED.match(name))
        if left:
            raise UsageError(
                f"{self.path} is no new directory: it has {left[0]}",
                hint=f"use `--rendezvous {self.path}-2` on every machine: it is removed afterwards",
            )

    def enter(self, ready: NodeReady) -> None:
        """Say that this machine has come, and give signs of life from now on."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._has_come = True
        self._signs.start()
        self._say(f"node-{self.node}.json", to_json(ready))

    def leave(self) -> None:
        """Go: this machine gives no more signs of life, and needs nothing here."""
        self._stopped.set()
        if self._signs.ident is not None:
            self._signs.join(timeout=_GONE_S)  # a sign that is being written comes before
        (self.path / f"node-{self.node}.json").unlink(missing_ok=True)

    def dissolve(self) -> None:
        """Say that the search is over, and remove the folder when the other machines have gone."""
        self._say("over", "")
        deadline = time.monotonic() + _GONE_S
        others = {f"node-{node}.json" for node in range(1, self.nodes)}
        while others & names(self.path) and time.monotonic() < deadline:
            pause()
        self.leave()
        if not others & names(self.path):
            self._remove()

    def ready(self, node: int) -> NodeReady | None:
        """What a machine said when it came; None where it has not."""
        return self._hear(f"node-{node}.json", NodeReady)

    def trial(self, number: int) -> Path:
        """The folder of a trial, 1 and up; it may not be there yet."""
        return self.path / f"trial-{number}"

    def own(self, trial: Path) -> Path:
        """The folder of this machine below a trial's."""
        return trial / str(self.node)

    def say_go(self, trial: Path, go: Go) -> None:
        """Tell every machine to start its ranks."""
        self._say(f"{trial.name}/go.json", to_json(go))

    def go(self, trial: Path) -> Go | None:
        """The word to start; None where it was not given yet."""
        return self._hear(f"{trial.name}/go.json", Go)

    def say_end(self, trial: Path) -> None:
        """Tell every machine to end its ranks."""
        self._say(f"{trial.name}/end", "")

    def is_ended(self, trial: Path) -> bool:
        """Whether the ranks are to be ended."""
        return "end" in names(trial) or self.is_over

    def say_done(self, trial: Path, done: Done) -> None:
        """Say how this machine's ranks ended."""
        self._say(f"{trial.name}/{self.node}/done.json", to_json(done))

    def done(self, trial: Path, node: int) -> Done | None:
        """How a machine's ranks ended; None while they run."""
        return self._hear(f"{trial.name}/{node}/done.json", Done)

    @property
    def is_over(self) -> bool:
        """Whether the search is over; it is where the folder has gone since this machine came."""
        found = names(self.path)
        return "over" in found or (self._has_come and not found)

    def is_lost(self, node: int) -> bool:
        """Whether a machine has given no sign of life for so long that it counts as lost."""
        try:
            sign = (self.path / f"node-{node}.alive").read_text(encoding="ascii")
        except OSError:
            sign = ""
        now = time.monotonic()
        before, since = self._seen.get(node, (None, now))
        if sign != before:
            self._seen[node] = sign, now
            return False
        return now - since > LOST_S

    def _remove(self) -> None:
        """Remove what machines of the search have written, and the folder if nothing else is there.

        What somebody else put there meanwhile stays.
        """
        with suppress(OSError):
            for path in self.path.iterdir():
                if _TRIAL.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)
                elif _WORD.fullmatch(path.name) or _UNFINISHED.match(path.name):
                    path.unlink(missing_ok=True)
            self.path.rmdir()

    def _give_signs(self) -> None:
        signs = 0
        while not self._stopped.wait(_SIGN_S if signs else 0.0):
            signs += 1
            try:
                self._say(f"node-{self.node}.alive", str(signs))
            except OSError:  # a file system may be away for a while: the others wait for it as long
                continue

    def _say(self, name: str, text: str) -> None:
        path = self.path / name
        beside = path.with_name(f".{path.name}.{self.node}")
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)

    def _hear(self, name: str, kind: type[_Said]) -> _Said | None:
        path = self.path / name
        if path.name not in names(path.parent):
            return None
        return from_json(path.read_bytes(), kind)


def names(folder: Path) -> set[str]:
    """The names in a folder, none where it is not there. It is listed, which asks a shared file
    system anew; whether a name is there is answered from memory for a while.
    """
    try:
        return {path.name for path in folder.iterdir()}
    except OSError:
        return set()


def pause() -> None:
    """Wait a moment before a machine looks again."""
    time.sleep(_ASKED_S)

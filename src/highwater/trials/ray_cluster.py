"""RayCluster: a running Ray cluster, as the control plane holds it, which imports no Ray.

Between them is a process of its own (ray_driver.py): what Ray prints, its signals and its crashes
stay there.
"""

import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

from highwater.errors import MachineError, UsageError
from highwater.trials.probe import OLDEST, release_of, versions_of
from highwater.trials.ranks import started
from highwater.trials.ray_messages import Join, Joined, NodesRead, ReadNodes
from highwater.trials.ray_node import Needs
from highwater.trials.ray_placement import STATUS, Node
from highwater.trials.reaper import module
from highwater.units import MIB

AUTO = "auto"
"""The address by which Ray looks itself: ``RAY_ADDRESS``, else the cluster of this machine."""
_INSTALL = "`pip install '.[ray]'` in the checkout of highwater, in the version of the cluster"
_START = "`ray start --head` starts one on this machine"
_JOIN_S = 60.0
"""Bound on the time until a cluster is joined; one that is there takes a second or two."""
_REACHED_S = 10.0
_LEAVES_S = 10.0
_SAID_BYTES = 16 * MIB

Hear = Callable[[object], None]


class RayCluster:
    """A connection to a cluster, and what was read of its nodes."""

    def __init__(self, address: str | None) -> None:
        """Join the cluster at ``address``; None: as Ray finds one. None is ever started.

        Raises MachineError where Ray is not installed, or there is no cluster, UsageError for an
        address that cannot be one.
        """
        self.address = address or os.environ.get("RAY_ADDRESS") or AUTO
        self.nodes: tuple[Node, ...] = ()
        """The nodes that were alive when they were last read."""
        self._needs: Needs | None = None
        if self.address != AUTO:
            _refuse_unreachable(self.address)
        _refuse_other_ray()
        self._hear: Hear = lambda _: None
        self._answered = threading.Event()
        self._answer: object = None
        self._is_closed = False
        self._sending = threading.Lock()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process, self._connection = self._start()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self._join()
        except BaseException:
            self.close()
            raise

    def listen(self, hear: Hear) -> None:
        """Tell what happens to the trials from now on, from another thread; last of all
        ConnectionError, where Ray's process has ended.
        """
        self._hear = hear

    def read_nodes(self, needs: Needs) -> tuple[Node, ...]:
        """The nodes that are alive; each is read once for what trials need."""
        known = {node.node_id: node for node in self.nodes} if needs == self._needs else {}
        self._needs = needs
        answer = self._ask(ReadNodes(needs, frozenset(known)), within_s=None)
        assert isinstance(answer, NodesRead)  # noqa: S101 - one answer to one question
        nodes = [node for node in known.values() if node.node_id in answer.alive]
        self.nodes = (*nodes, *answer.nodes)
        return self.nodes

    def send(self, said: object) -> None:
        """Tell Ray's process what to do; nothing where it has ended, of which ``listen`` hears."""
        with suppress(OSError), self._sending:
            self._connection.send(said)

    def close(self) -> None:
        """Leave the cluster: what runs for this connection is ended."""
        self._is_closed = True
        with suppress(OSError):
            self._connection.close()
        try:
            self._process.wait(_LEAVES_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        here, there = socket.socketpair()
        with there:
            process = started(
                module("highwater.trials.ray_driver", str(there.fileno())),
                stdout=self._said,
                stderr=subprocess.STDOUT,
                keeps=[there.fileno()],
                is_apart=True,  # Ctrl-C reaches find alone, which ends trials in order
            )
        return process, Connection(here.detach())

    def _join(self) -> None:
        joined = self._ask(Join(self.address), within_s=_JOIN_S)
        assert isinstance(joined, Joined)  # noqa: S101 - one answer to one question
        if joined.refusal is None:
            return
        where = "" if self.address == AUTO else f" at {self.address}"
        raise MachineError(
            f"no Ray cluster could be joined{where}: {joined.refusal}",
            hint=f"{_START}; `--address HOST:6379` joins another's, from one of its machines",
        )

    def _ask(self, question: object, *, within_s: float | None) -> object:
        self._answered.clear()
        self.send(question)
        if not self._answered.wait(within_s):
            raise MachineError(
                f"the Ray cluster at {self.address} does not answer", hint=f"{STATUS}; {_START}"
            )
        if isinstance(self._answer, ConnectionError):
            raise self.broken()
        return self._answer

    def broken(self) -> MachineError:
        """The error where Ray's process has ended by itself."""
        said = " / ".join(self._last_words().splitlines()[-3:])
        return MachineError(
            f"the connection to the Ray cluster was lost: {said or 'nothing was said'}",
            hint=f"{STATUS}; the same command goes on where it was",
        )

    def _listen(self) -> None:
        while True:
            try:
                said = self._connection.recv()
            except (EOFError, OSError) as error:
                if not self._is_closed:
                    self._take(ConnectionError(str(error)))
                    self._hear(ConnectionError(str(error)))
                return
            if isinstance(said, Joined | NodesRead):
                self._take(said)
            else:
                self._hear(said)

    def _take(self, answer: object) -> None:
        self._answer = answer
        self._answered.set()

    def _last_words(self) -> str:
        self._said.seek(0)
        return self._said.read(_SAID_BYTES).decode(errors="replace").strip()


def _refuse_other_ray() -> None:
    """Raise MachineError where Ray is not installed, or too old to keep trials on chosen nodes."""
    installed = versions_of(["ray"]).get("ray")
    if installed is None:
        raise MachineError("`--runner ray` needs ray, which is not installed", hint=_INSTALL)
    if release_of(installed) < OLDEST["ray"]:
        oldest = ".".join(map(str, OLDEST["ray"]))
        raise MachineError(
            f"ray {installed} is too old: {oldest} is the first that works", hint=_INSTALL
        )


def _refuse_unreachable(address: str) -> None:
    """Raise UsageError for what is no address, MachineError where nobody listens: Ray itself would
    try for minutes.
    """
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not host or not port.isdecimal():
        raise UsageError(
            f"{address!r} is not the address of a Ray cluster, which is HOST:PORT of its head",
            hint="for example `--address 10.0.0.1:6379`, on a machine of the cluster; `ray status` "
            "there says whether it runs",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACHED_S).close()
    except (OSError, OverflowError) as error:
        raise MachineError(
            f"no Ray cluster answers at {address}: {error}",
            hint=f"{_START}; `--address HOST:6379` joins another's",
        ) from error

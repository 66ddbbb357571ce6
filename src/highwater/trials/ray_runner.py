"""RayRunner: trials on the nodes of a Ray cluster, each on one node, side by side.

A trial that is lost with its node, or with the process that held it there, is CRASHED: it says
nothing about its length, and is tried again elsewhere. No Ray is imported here: between this and
the cluster is a process of its own (ray_driver.py), in which what Ray prints, its signals and its
crashes stay.
"""

import atexit
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path, PurePath
from typing import IO

import msgspec

from highwater.errors import HighwaterError, MachineError, UsageError
from highwater.model.model import load_model
from highwater.nouns.foreign_request import command_of, program_of
from highwater.nouns.foreign_trainer import foreign_name
from highwater.nouns.protocols import Launch, OnPhase, TrialEndedError, unheard
from highwater.nouns.request import Request
from highwater.nouns.trainer import OURS
from highwater.nouns.trial import Device, Outcome, TrialResult, TrialSpec
from highwater.trials.engine_trial import EngineLauncher
from highwater.trials.foreign_trial import ForeignLauncher
from highwater.trials.inputs import model_files
from highwater.trials.local import SeveralAtOnce, blames_the_host
from highwater.trials.probe import OLDEST, release_of, versions_of
from highwater.trials.ranks import started
from highwater.trials.ray_node import (
    End,
    Ended,
    Join,
    Joined,
    LauncherIn,
    Lost,
    Needs,
    NodesRead,
    Placed,
    ReadNodes,
    Runs,
    Start,
    TrialEnd,
)
from highwater.trials.ray_placement import (
    STATUS,
    Chosen,
    Demand,
    Node,
    Placement,
    alike_nodes,
    choose,
    demand_of,
)
from highwater.trials.reaper import module
from highwater.trials.trial_process import LogLayout, log_path_of, new_log
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


@dataclass(slots=True, kw_only=True, eq=False)
class _ClusterTrial:
    """A trial on the cluster."""

    launch: Launch
    future: Future[TrialResult]
    on_phase: OnPhase
    log: IO[bytes]
    began: float
    had_company: bool = False
    """Whether another trial of ours was on its node at any time."""
    is_ending: bool = False
    """Whether it was told to end."""
    failure: OSError | None = None
    """Why its log could not be written."""


class RayRunner(SeveralAtOnce):
    """Runs trials on a cluster's nodes; logs and what lies beside them come back to this machine.
    Closed, it leaves the cluster joined.

    On the CPU a node has one trial at a time. On GPUs small trials share a node; one that keeps
    states in host memory has a node of its own. Host memory that ran out beside others says
    nothing: such a trial is launched once more, with a node of its own.
    """

    def __init__(
        self,
        cluster: RayCluster,
        nodes: tuple[Node, ...],
        launcher_in: LauncherIn,
        needs: Needs,
        *,
        log_directory: Path,
        log_layout: LogLayout = "rung",
        most_trials: int | None = None,
    ) -> None:
        """``nodes`` are those of one kind, as ``choose`` gives them. ``launcher_in`` makes the
        launcher, on the node: it can be pickled. ``most_trials`` as for ``Placement``.
        """
        self._cluster = cluster
        self._launcher_in = launcher_in
        self._needs = needs
        self._log_directory = log_directory
        self._log_layout: LogLayout = log_layout
        self._placement = Placement(nodes, most_trials=most_trials)
        self._like = nodes[0]
        self._running: dict[int, _ClusterTrial] = {}
        self._lost_on: defaultdict[str, set[str]] = defaultdict(set)
        """Nodes on which a trial was lost, by its key."""
        self._count = 0
        self._has_lost_nodes = False
        """Whether a node was lost since they were read."""
        self._broken: MachineError | None = None
        self._changed = threading.Condition()
        cluster.listen(self._hear)

    def has_room(self, spec: TrialSpec) -> bool:
        """Whether a trial would start now, as ``Runner`` says, were the cluster ours alone."""
        with self._changed:
            return self._placement.has_room(demand_of(spec))

    def submit(self, launch: Launch, *, on_phase: OnPhase = unheard) -> Future[TrialResult]:
        """Start a trial, as ``Runner`` says; where others use the cluster it waits for them."""
        future: Future[TrialResult] = Future()
        try:
            self._read_again(launch.spec.device)
            with self._changed:
                self._start(launch, demand_of(launch.spec), future, on_phase)
        except (HighwaterError, OSError) as error:
            future.set_exception(error)
        return future

    def _is_idle(self) -> bool:
        return not self._running

    def _end_all(self) -> None:
        for trial, running in self._running.items():
            running.is_ending = True
            self._cluster.send(End(trial))

    def _read_again(self, device: Device) -> None:
        """Take in the nodes that have joined, where one was lost."""
        if not self._has_lost_nodes:
            return
        self._has_lost_nodes = False
        nodes = alike_nodes(self._cluster.read_nodes(self._needs), self._like, device)
        with self._changed:
            self._placement.nodes = nodes

    def _start(
        self, launch: Launch, demand: Demand, future: Future[TrialResult], on_phase: OnPhase
    ) -> None:
        """Start a trial; raises MachineError where no node could hold it."""
        if self._broken is not None:
            raise self._broken
        trial = self._count = self._count + 1
        avoided = frozenset(self._lost_on[launch.spec.key])
        wanted = self._placement.take(trial, demand, avoided=avoided)
        try:
            log = self._new_log(launch.spec)
        except OSError:
            self._placement.leave(trial)
            raise
        self._running[trial] = _ClusterTrial(
            launch=launch, future=future, on_phase=on_phase, log=log, began=time.monotonic()
        )
        self._note_company(trial)
        self._cluster.send(Start(trial, wanted, self._launcher_in, launch, self._needs.model))

    def _new_log(self, spec: TrialSpec) -> IO[bytes]:
        """An open log of its own for a launch, where those of this machine lie."""
        wanted = log_path_of(self._log_directory, spec, self._log_layout)
        wanted.parent.mkdir(parents=True, exist_ok=True)
        with new_log(wanted) as log:
            return Path(log.name).open("r+b")

    def _note_company(self, trial: int) -> None:
        beside = self._placement.beside(trial)
        for other in (trial, *beside) if beside else ():
            self._running[other].had_company = True

    def _hear(self, said: object) -> None:
        """Take in what happens to the trials; runs in the cluster's own thread."""
        match said:
            case Runs():
                running = self._running[said.trial]
                self._write(said.trial, running, said.log)
                running.on_phase(said.phase)
            case Placed():
                with self._changed:
                    self._placement.placed(said.trial, said.node_id)
                    self._note_company(said.trial)
            case Ended():
                self._finish(said.trial, self._result(self._running[said.trial], said.end))
            case Lost():
                self._finish(said.trial, self._lost(self._running[said.trial], said))
            case _:
                self._broken = self._cluster.broken()
                for trial in tuple(self._running):
                    self._finish(trial, self._broken)

    def _write(self, trial: int, running: _ClusterTrial, log: bytes) -> None:
        """Write what a log has got; a trial whose log cannot be written is ended."""
        try:
            running.log.write(log)
            running.log.flush()
        except OSError as error:
            running.failure = error
            self._cluster.send(End(trial))

    def _finish(self, trial: int, result: TrialResult | BaseException) -> None:
        """Free a trial's place, then tell how it ended, or launch it once more."""
        running = self._running[trial]
        with suppress(OSError):  # of a full disk, again
            running.log.close()
        with self._changed:
            self._placement.leave(trial)
            del self._running[trial]
            if running.is_ending:
                result = TrialEndedError()
            elif running.failure is not None:
                result = running.failure
            again = isinstance(result, TrialResult) and self._has_to_be_alone(running, result)
            if again:
                result = self._alone(running) or result
                again = not isinstance(result, BaseException)
            self._changed.notify_all()
        # Only now: whoever hears of the end finds the place free.
        if isinstance(result, BaseException):
            running.future.set_exception(result)
        elif not again:
            running.future.set_result(result)

    def _has_to_be_alone(self, running: _ClusterTrial, result: TrialResult) -> bool:
        return running.had_company and blames_the_host(result, running.launch.spec)

    def _alone(self, running: _ClusterTrial) -> BaseException | None:
        """Launch a trial once more on a node of its own; what hinders it, if anything."""
        launch = running.launch
        if launch.timeout_s is not None:
            left_s = max(0.0, launch.timeout_s - (time.monotonic() - running.began))
            launch = msgspec.structs.replace(launch, timeout_s=left_s)
        demand = demand_of(launch.spec)._replace(whole_node=True)
        try:
            self._start(launch, demand, running.future, running.on_phase)
        except (HighwaterError, OSError) as error:
            return error
        return None

    def _result(self, running: _ClusterTrial, end: TrialEnd) -> TrialResult | BaseException:
        """What a trial that ended says, its files brought here."""
        if end.refusal is not None:
            return end.refusal.error()
        if end.error is not None:
            return RuntimeError(f"on a node of the Ray cluster: {end.error}")
        if end.result is None:
            return TrialEndedError()
        try:
            for name, content in end.files:
                _write_beside(Path(running.log.name), name, content)
        except OSError as error:
            return error
        return msgspec.structs.replace(end.result, log_path=running.log.name)

    def _lost(self, running: _ClusterTrial, lost: Lost) -> TrialResult:
        """The crash of a trial whose node, or the process that held it there, is gone."""
        node_id = lost.node_id or ""
        named = {node.node_id: node.name for node in self._placement.nodes}
        name = named.get(node_id, "every node for it")
        if lost.is_node:
            reason = f"{name} of the Ray cluster was lost"
            with self._changed:
                nodes = self._placement.nodes
                self._placement.nodes = tuple(n for n in nodes if n.node_id != node_id)
            self._has_lost_nodes = True
        else:
            reason = f"Ray lost the trial on {name}: {lost.reason}"
        self._lost_on[running.launch.spec.key].add(node_id)
        with suppress(OSError):
            running.log.write(f"\n{reason}\n".encode())
        return TrialResult(
            outcome=Outcome.CRASHED,
            reason=reason,
            attempt=running.launch.attempt,
            log_path=running.log.name,
            wall_s=time.monotonic() - running.began,
        )


def _write_beside(log_path: Path, name: str, content: bytes) -> None:
    """Write what a trial left beside its log, called as the log is but for the end."""
    path = log_path.parent / f"{log_path.stem}{name}"
    if ".." in PurePath(name).parts:
        raise OSError(f"{name} is no name of a file beside a log")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


_joined: dict[str | None, RayCluster] = {}
"""The cluster of each address that was joined and not left: from a plan to its answer."""


def nodes_of(request: Request) -> Chosen:
    """The nodes that a request means, of its cluster, which stays joined until ``leave``.

    Raises MachineError where there is no cluster, or no node of it can run the trials.
    """
    _refuse_what_is_here(request)
    needs = _needs(request)
    nodes = _cluster(request).read_nodes(needs)
    chosen = choose(nodes, request.device, request.gpus)
    return chosen._replace(notes=(*chosen.notes, needs.model.way))


def runner_of(request: Request, log_layout: LogLayout) -> RayRunner:
    """The runner of a request's trials, on those nodes."""
    return RayRunner(
        _cluster(request),
        nodes_of(request).nodes,
        _launcher_in(request),
        _needs(request),
        log_directory=Path(request.log_dir),
        log_layout=log_layout,
        most_trials=request.max_concurrent_trials,
    )


def _launcher_in(request: Request) -> LauncherIn:
    """What makes the launcher of a request's trials on a node, where their logs lie meanwhile."""
    usual = {"timeout_s": request.timeout_s, "allow_busy": request.allow_busy}
    trainer = foreign_name(request.trainer)
    if trainer is not None:
        return partial(ForeignLauncher, **usual, command=command_of(request, trainer))
    saves_in = request.checkpoint_dir
    return partial(
        EngineLauncher,
        **usual,
        checkpoint_directory=None if saves_in is None else Path(saves_in),
        profiling=request.memory_profiler,
        tensorboard=request.tensorboard,
        logit_range=request.logit_range,
    )


def leave(request: Request) -> None:
    """Leave the cluster of a request; nothing where it is not joined."""
    cluster = _joined.pop(request.address, None)
    if cluster is not None:
        atexit.unregister(cluster.close)
        cluster.close()


def _cluster(request: Request) -> RayCluster:
    cluster = _joined.get(request.address)
    if cluster is None:
        cluster = _joined[request.address] = RayCluster(request.address)
        atexit.register(cluster.close)
    return cluster


def _needs(request: Request) -> Needs:
    return Needs(
        on_gpus=request.device != "cpu",
        model=model_files(Path(load_model(request.model).directory)),
        data_module=None if request.data is None else request.data.partition(":")[0],
        is_engine=request.trainer == OURS,
        program=program_of(request),
    )


def _refuse_what_is_here(request: Request) -> None:
    """Raise UsageError for what takes a GPU of this machine."""
    if request.prediction == "trace":
        raise UsageError(
            "`--prediction trace` traces for a GPU of this machine, and trials run on others",
            hint="use `--prediction formula`",
        )

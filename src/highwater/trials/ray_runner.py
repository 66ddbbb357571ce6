"""RayRunner: trials on the nodes of a Ray cluster, each on one node, side by side.

A trial that is lost with its node, or with the process that held it there, is CRASHED: it says
nothing about its length, and is tried again elsewhere. No Ray is imported here: each trial is a job
(``python -m highwater.trials.ray_runner``), whose process does what ray_job.py has. Which nodes
trials run on, and what each takes there, is told from what was read of the nodes: Ray itself would
spread small trials, and leave no node to a large one.
"""

import os
import socket
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from highwater.errors import MachineError, UsageError
from highwater.model.model import load_model
from highwater.nouns.codec import from_json, to_json
from highwater.nouns.foreign_request import program_of
from highwater.nouns.hardware import Machine, kind_name
from highwater.nouns.request import Request
from highwater.nouns.trainer import OURS
from highwater.nouns.trial import Device, Launch, OnPhase, TrialResult, TrialSpec, unheard
from highwater.trials import ray_job
from highwater.trials.inputs import model_files
from highwater.trials.job import Job
from highwater.trials.local import (
    Occupant,
    SeveralAtOnce,
    blames_the_host,
    host_bytes,
    is_alone,
    with_time_left,
)
from highwater.trials.probe import OLDEST, release_of, versions_of
from highwater.trials.ray_job import (
    AUTO,
    END_S,
    LAUNCHED_BY,
    READ_S,
    START,
    STATUS,
    WAITS,
    Needs,
    Node,
    NodeTrial,
    RayOrder,
    RayReport,
)
from highwater.trials.trial_process import LogLayout, log_path_of, new_log, private_folder
from highwater.units import MOST_SECONDS, format_bytes

_INSTALL = "`pip install '.[ray]'` in the checkout of highwater, in the version of the cluster"
_JOIN_S = 60.0
"""Bound on the time until a cluster is joined; one that is there takes a second or two."""
_REACHED_S = 10.0


class RayCluster(NamedTuple):
    """A Ray cluster, and what trials need on its nodes."""

    address: str
    needs: Needs

    def read_nodes(self) -> tuple[Node, ...]:
        """The nodes that are alive."""
        job = self._job(
            RayOrder(address=self.address, needs=self.needs),
            timeout_s=_JOIN_S + READ_S,
            failure=f"the Ray cluster at {self.address} does not answer",
            hint=f"{STATUS}; {START}",
        )
        with private_folder(kind="ray-") as folder:
            return job.run(folder).nodes

    def run(self, trial: NodeTrial, place: Occupant, on_phase: OnPhase) -> RayReport:
        """Run a trial on one of its nodes."""
        job = self._job(
            RayOrder(address=self.address, needs=self.needs, trial=trial),
            timeout_s=MOST_SECONDS,
            failure="the connection to the Ray cluster was lost",
            hint=f"{STATUS}; the same command goes on where it was",
        )
        with private_folder(kind="ray-") as folder:
            return job.run(folder, ended=place.ended, on_phase=on_phase)

    def _job(self, order: RayOrder, *, timeout_s: float, failure: str, hint: str) -> Job[RayReport]:
        return Job(
            module="highwater.trials.ray_runner",
            order=order,
            report=RayReport,
            environment=os.environ,
            timeout_s=timeout_s,
            grace_s=END_S,
            first_phase=WAITS,
            failure=failure,
            hint=hint,
        )


def cluster_at(address: str | None, needs: Needs) -> RayCluster:
    """The cluster at ``address``; None: as Ray finds one.

    Raises MachineError where Ray is not installed, or nobody listens, UsageError for an address
    that cannot be one.
    """
    address = address or os.environ.get("RAY_ADDRESS") or AUTO
    if address != AUTO:
        _refuse_unreachable(address)
    _refuse_other_ray()
    return RayCluster(address, needs)


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
            hint=f"{START}; `--address HOST:6379` joins another's",
        ) from error


class Chosen(NamedTuple):
    """The nodes that a search runs on."""

    nodes: tuple[Node, ...]
    machine: Machine
    """What a trial may count on: the node with the most GPUs, or the most memory."""
    notes: tuple[str, ...]
    """Which nodes are left out, and why."""


def choose(nodes: Sequence[Node], device: Device | None, counts: Sequence[int] | None) -> Chosen:
    """The nodes of one kind: answers of unlike GPUs, or of two versions of torch, are not of one
    study.

    It is the kind of which a node has as many GPUs as are asked for, then that with the most of
    them. Raises MachineError where no node can run a trial, UsageError for a count that no node
    has.
    """
    fit = [node for node in nodes if node.problem is None]
    unfit = [f"{node.name} is left out: {node.problem}" for node in nodes if node not in fit]
    if device == "cuda" or (device is None and any(node.gpus for node in nodes)):
        unfit += [f"{node.name} is left out: it has no GPU" for node in fit if not node.gpus]
        fit, device = [node for node in fit if node.gpus], "cuda"
    else:
        device = "cpu"
        unfit += [
            f"{node.name} is left out: Ray hands out no CPU there" for node in fit if not node.cpus
        ]
        fit = [node for node in fit if node.cpus]
    if not fit:
        said = "; ".join(unfit) or "it has no nodes"
        raise MachineError(f"the Ray cluster has no node for trials: {said}", hint=STATUS)
    kinds: dict[tuple[str, str], list[Node]] = {}
    for node in fit:
        kinds.setdefault(_kind(node, device), []).append(node)
    most = max(counts or (1,))
    best = max(
        kinds,
        key=lambda kind: (
            _widest(kinds[kind]) >= most,
            _all_gpus(kinds[kind]),
            len(kinds[kind]),
        ),
    )
    chosen = kinds.pop(best)
    if device == "cpu":
        pick = max(chosen, key=lambda node: _of(node).host_memory_total_bytes)
    else:
        _refuse_wide(counts or (1,), chosen)
        pick = max(chosen, key=lambda node: node.gpus)
    others = [
        f"{len(left)} node{'s' * (len(left) != 1)} with {_kind_words(kind)} left out: a study is "
        f"of one kind, here {_kind_words(best)}"
        for kind, left in kinds.items()
    ]
    return Chosen(tuple(chosen), _of(pick), (_used(chosen, device), *unfit, *others))


def alike_nodes(nodes: Sequence[Node], like: Node, device: Device) -> tuple[Node, ...]:
    """The nodes that can run trials, and are of the kind of another."""
    return tuple(
        node
        for node in nodes
        if node.problem is None
        and (node.gpus if device == "cuda" else node.cpus)
        and _kind(node, device) == _kind(like, device)
    )


class Demand(NamedTuple):
    """What a trial takes of one node."""

    gpus: int
    cpus: float
    memory_bytes: int
    whole_node: bool
    """Whether nothing else of ours runs beside it: on the CPU, and with states in host memory."""

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray is asked for, by its names."""
        asked = {"GPU": self.gpus, "CPU": self.cpus, "memory": self.memory_bytes}
        return {name: value for name, value in asked.items() if value}


def demand_of(spec: TrialSpec) -> Demand:
    """What a trial takes, of whichever node."""
    on_gpus = spec.device == "cuda"
    return Demand(
        gpus=spec.layout.gpus if on_gpus else 0,
        cpus=float(spec.layout.gpus),
        memory_bytes=host_bytes(spec),
        whole_node=not on_gpus or is_alone(spec),
    )


class Wanted(NamedTuple):
    """What Ray is asked for, and on which nodes."""

    demand: Demand
    first: str
    """The node on which the trial leaves the others the most room."""
    any_of: tuple[str, ...]
    """The nodes that will do where others use the first one."""


class Placement:
    """Which trials of ours are where, and where there is room for another.

    Others may use the cluster too: Ray queues a trial then, whatever this says. Not thread-safe.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = tuple(nodes)
        self._taken: list[Wanted] = []

    def has_room(self, demand: Demand) -> bool:
        """Whether a trial would start beside those that run."""
        return any(self._is_free(node, demand) for node in self._able(demand))

    def take(self, demand: Demand, *, avoided: frozenset[str] = frozenset()) -> Wanted:
        """Note that a trial starts; it is put on an ``avoided`` node where there is no other.

        Raises MachineError where no node could ever hold it.
        """
        able = self._able(demand)
        if not able:
            raise self._too_much(demand)
        able = [node for node in able if node.node_id not in avoided] or able
        free = [node for node in able if self._is_free(node, demand)] or able
        first = min(free, key=lambda node: (self._gpus_left(node), node.cpus, node.node_id))
        if demand.whole_node:
            free = [node for node in free if (node.gpus, node.cpus) == (first.gpus, first.cpus)]
            gpus = first.gpus if demand.gpus else 0
            demand = demand._replace(gpus=gpus, cpus=demand.cpus if gpus else first.cpus)
        demand = demand._replace(cpus=min(demand.cpus, *(node.cpus for node in free)))
        self._taken.append(Wanted(demand, first.node_id, tuple(node.node_id for node in free)))
        return self._taken[-1]

    def leave(self, wanted: Wanted) -> None:
        """Note that a trial has ended."""
        if wanted in self._taken:
            self._taken.remove(wanted)

    def _able(self, demand: Demand) -> list[Node]:
        """The nodes that could hold a trial if nothing else ran there."""
        return [
            node
            for node in self.nodes
            if node.gpus >= demand.gpus and node.memory_bytes >= demand.memory_bytes
        ]

    def _is_free(self, node: Node, demand: Demand) -> bool:
        here = self._on(node)
        if any(other.whole_node for other in here) or (here and demand.whole_node):
            return False
        taken_bytes = sum(other.memory_bytes for other in here)
        is_held = node.memory_bytes >= taken_bytes + demand.memory_bytes
        return is_held and self._gpus_left(node) >= demand.gpus

    def _gpus_left(self, node: Node) -> int:
        return node.gpus - sum(other.gpus for other in self._on(node))

    def _on(self, node: Node) -> list[Demand]:
        return [taken.demand for taken in self._taken if taken.first == node.node_id]

    def _too_much(self, demand: Demand) -> MachineError:
        if not self.nodes:
            return MachineError("no node of the Ray cluster is left", hint=STATUS)
        most_gpus = max(node.gpus for node in self.nodes)
        most_bytes = max(node.memory_bytes for node in self.nodes)
        if most_gpus < demand.gpus:
            asked, there = f"{demand.gpus} GPUs", f"{most_gpus}"
        else:
            asked = f"{format_bytes(demand.memory_bytes)} of host memory"
            there = format_bytes(most_bytes)
        return MachineError(
            f"a trial takes {asked}, and no node of the Ray cluster has more than {there}",
            hint=STATUS,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _NodeOccupant(Occupant):
    """What a trial takes of a node."""

    wanted: Wanted


class RayRunner(SeveralAtOnce[_NodeOccupant]):
    """Runs trials on a cluster's nodes; logs and what lies beside them come back to this machine.

    On the CPU a node has one trial at a time. On GPUs small trials share a node; one that keeps
    states in host memory has a node of its own. Host memory that ran out beside others says
    nothing: such a trial is launched once more, with a node of its own.
    """

    def __init__(
        self,
        cluster: RayCluster,
        nodes: tuple[Node, ...],
        request: Request,
        *,
        log_directory: Path,
        log_layout: LogLayout = "rung",
        most_trials: int | None = None,
        launched_by: str = LAUNCHED_BY,
    ) -> None:
        """``nodes`` are those of one kind, as ``choose`` gives them. ``launched_by`` makes, on the
        node, the launcher of the ``request``.
        """
        super().__init__(most_trials)
        self._cluster = cluster
        self._request, self._launched_by = request, launched_by
        self._log_directory = log_directory
        self._log_layout: LogLayout = log_layout
        self._placement = Placement(nodes)
        self._like = nodes[0]
        self._lost_on: defaultdict[str, set[str]] = defaultdict(set)
        """Nodes on which a trial was lost, by its key."""
        self._has_lost_nodes = False
        """Whether a node was lost since they were read."""

    def submit(self, launch: Launch, *, on_phase: OnPhase = unheard) -> Future[TrialResult]:
        """Start a trial, as ``Runner`` says; where others use the cluster it waits for them."""
        if self._has_lost_nodes:  # others may have joined
            self._has_lost_nodes = False
            nodes = alike_nodes(self._cluster.read_nodes(), self._like, launch.spec.device)
            with self._changed:
                self._placement.nodes = nodes
        return super().submit(launch, on_phase=on_phase)

    def _has_room(self, spec: TrialSpec) -> bool:
        most = self._most_trials
        if most is not None and len(self._running) >= most:
            return False
        return self._placement.has_room(demand_of(spec))

    def _place(self, spec: TrialSpec) -> _NodeOccupant:
        return _NodeOccupant(spec=spec, wanted=self._wanted(demand_of(spec), spec))

    def _wanted(self, demand: Demand, spec: TrialSpec) -> Wanted:
        return self._placement.take(demand, avoided=frozenset(self._lost_on[spec.key]))

    def _launched(self, launch: Launch, place: _NodeOccupant, on_phase: OnPhase) -> TrialResult:
        began = time.monotonic()
        try:
            result = self._held(launch, place, on_phase)
            demand = place.wanted.demand
            if not demand.whole_node and blames_the_host(result, launch.spec):
                with self._changed:
                    self._placement.leave(place.wanted)
                    place.wanted = self._wanted(demand._replace(whole_node=True), launch.spec)
                result = self._held(with_time_left(launch, began), place, on_phase)
            return result
        finally:
            with self._changed:
                self._placement.leave(place.wanted)

    def _held(self, launch: Launch, place: _NodeOccupant, on_phase: OnPhase) -> TrialResult:
        """Run a trial on a node, whose log is new."""
        path = log_path_of(self._log_directory, launch.spec, self._log_layout)
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_log(path) as log:
            trial = NodeTrial(
                launch=launch,
                request=self._request,
                launched_by=self._launched_by,
                log_path=log.name,
                bundle=place.wanted.demand.bundle,
                first=place.wanted.first,
                any_of=place.wanted.any_of,
            )
        report = self._cluster.run(trial, place, on_phase)
        if report.result is None:
            raise RuntimeError(f"on a node of the Ray cluster: {report.error}")
        if report.lost_on is not None:
            self._lost_on[launch.spec.key].add(report.lost_on)
        if report.has_lost_node:
            with self._changed:
                nodes = self._placement.nodes
                self._placement.nodes = tuple(n for n in nodes if n.node_id != report.lost_on)
                self._has_lost_nodes = True
        return report.result


@lru_cache(maxsize=1)
def _read_nodes(address: str, needs: str) -> tuple[Node, ...]:
    return RayCluster(address, from_json(needs, Needs)).read_nodes()


def leave() -> None:
    """Forget the nodes that were read between a plan and its answer."""
    _read_nodes.cache_clear()


def nodes_of(request: Request) -> Chosen:
    """The nodes that a request means, of its cluster.

    Raises MachineError where there is no cluster, or no node of it can run the trials.
    """
    if request.prediction == "trace":
        raise UsageError(
            "`--prediction trace` traces for a GPU of this machine, and trials run on others",
            hint="use `--prediction formula`",
        )
    cluster = _cluster_of(request)
    nodes = _read_nodes(cluster.address, to_json(cluster.needs))
    chosen = choose(nodes, request.device, request.gpus)
    return chosen._replace(notes=(*chosen.notes, cluster.needs.model.way))


def runner_of(request: Request, log_layout: LogLayout) -> RayRunner:
    """The runner of a request's trials, on those nodes."""
    return RayRunner(
        _cluster_of(request),
        nodes_of(request).nodes,
        request,
        log_directory=Path(request.log_dir),
        log_layout=log_layout,
        most_trials=request.max_concurrent_trials,
    )


def _cluster_of(request: Request) -> RayCluster:
    needs = Needs(
        on_gpus=request.device != "cpu",
        model=model_files(Path(load_model(request.model).directory)),
        data_module=None if request.data is None else request.data.partition(":")[0],
        is_engine=request.trainer == OURS,
        program=program_of(request),
    )
    return cluster_at(request.address, needs)


def _of(node: Node) -> Machine:
    assert node.machine is not None  # noqa: S101 - a node without a problem was read
    return node.machine


def _kind(node: Node, device: Device) -> tuple[str, str]:
    """What has to be the same on every node of a study."""
    machine = _of(node)
    torch = machine.versions.get("torch", "")
    return ("" if device == "cpu" else machine.gpus[0].name), torch


def _widest(nodes: Sequence[Node]) -> int:
    return max(node.gpus for node in nodes)


def _all_gpus(nodes: Sequence[Node]) -> int:
    return sum(node.gpus for node in nodes)


def _kind_words(kind: tuple[str, str]) -> str:
    name, torch = kind
    return ", ".join(filter(None, (name and kind_name(name), torch and f"torch {torch}")))


def _refuse_wide(counts: Sequence[int], nodes: Sequence[Node]) -> None:
    """Raise UsageError for more GPUs than a node has: the ranks of a trial meet on one."""
    widest = _widest(nodes)
    if max(counts) > widest:
        works = " ".join(str(count) for count in counts if count <= widest) or str(widest)
        raise UsageError(
            f"{max(counts)} GPUs are asked for, a trial runs on one node, and a node of the Ray "
            f"cluster has {widest} at the most",
            hint=f"use `--gpus {works}`",
        )


def _used(nodes: Sequence[Node], device: Device) -> str:
    """What a search runs on, in a line."""
    many = f"{len(nodes)} node{'s' * (len(nodes) != 1)} of a Ray cluster"
    if device == "cpu":
        return f"trials run on {many}, one on each at a time"
    gpus = _all_gpus(nodes)
    name = kind_name(_of(nodes[0]).gpus[0].name)
    return f"trials run on {gpus} x {name} of {many}, each on one node"


if __name__ == "__main__":  # the nodes import what is sent to them by its own name
    ray_job.main()

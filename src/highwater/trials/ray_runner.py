"""RayRunner: run trials on the nodes of a Ray cluster, each on one node, side by side.

A trial that is lost with its node, or with the process that started it there, is CRASHED: that says
nothing about its length, and the trial is repeated on another node. This module imports no Ray:
each trial is a job (``python -m highwater.trials.ray_runner``) whose process runs ray_job.py. The
runner chooses each trial's node itself: Ray would spread small trials over all nodes, and leave no
node to a large one.
"""

import os
import socket
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Event
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
    Demand,
    Needs,
    Node,
    NodeTrial,
    RayOrder,
    RayReport,
    Wanted,
)
from highwater.trials.trial_process import LogLayout, log_path_of, new_log, private_folder
from highwater.units import MOST_SECONDS, format_bytes

_INSTALL = "`pip install '.[ray]'` in the checkout of highwater, in the version of the cluster"
_JOIN_S = 60.0
"""Longest time to join a cluster; a running one takes a second or two."""
_REACHED_S = 10.0


class RayCluster(NamedTuple):
    """A Ray cluster's address, and what trials need on its nodes."""

    address: str
    needs: Needs

    def read_nodes(self) -> tuple[Node, ...]:
        """Read all nodes that are alive."""
        job = self._job(
            timeout_s=_JOIN_S + READ_S,
            failure=f"the Ray cluster at {self.address} does not answer",
            hint=f"{STATUS}; {START}",
        )
        with private_folder(kind="ray-") as folder:
            return job.run(folder).nodes

    def run(self, trial: NodeTrial, ended: Event, on_phase: OnPhase) -> RayReport:
        """Run a trial on one node, and return its report."""
        job = self._job(
            trial,
            timeout_s=MOST_SECONDS,
            failure="the connection to the Ray cluster was lost",
            hint=f"{STATUS}; the same command goes on where it was",
        )
        with private_folder(kind="ray-") as folder:
            return job.run(folder, ended=ended, on_phase=on_phase)

    def _job(
        self, trial: NodeTrial | None = None, *, timeout_s: float, failure: str, hint: str
    ) -> Job[RayReport]:
        return Job(
            module="highwater.trials.ray_runner",
            order=RayOrder(address=self.address, needs=self.needs, trial=trial),
            report=RayReport,
            environment=os.environ,
            timeout_s=timeout_s,
            grace_s=END_S,
            first_phase=WAITS,
            failure=failure,
            hint=hint,
        )


def cluster_at(address: str | None, needs: Needs) -> RayCluster:
    """The cluster at ``address``; None: the one that Ray finds. Raises MachineError if Ray is
    missing or too old, or no cluster answers; UsageError for a malformed address.
    """
    address = address or os.environ.get("RAY_ADDRESS") or AUTO
    if address != AUTO:
        host, colon, port = address.rpartition(":")
        if "://" in address or not colon or not host or not port.isdecimal():
            raise UsageError(
                f"{address!r} is not the address of a Ray cluster, which is HOST:PORT of its head",
                hint="for example `--address 10.0.0.1:6379`, on a machine of the cluster; "
                "`ray status` there says whether it runs",
            )
        try:  # where nobody listens Ray would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), _REACHED_S).close()
        except (OSError, OverflowError) as error:
            raise MachineError(
                f"no Ray cluster answers at {address}: {error}",
                hint=f"{START}; `--address HOST:6379` joins another's",
            ) from error
    installed = versions_of(["ray"]).get("ray")
    if installed is None:
        raise MachineError("`--runner ray` needs ray, which is not installed", hint=_INSTALL)
    if release_of(installed) < OLDEST["ray"]:
        oldest = ".".join(map(str, OLDEST["ray"]))
        raise MachineError(
            f"ray {installed} is too old: {oldest} is the first that works", hint=_INSTALL
        )
    return RayCluster(address, needs)


class Chosen(NamedTuple):
    """The nodes of a cluster that a search uses, and notes on the others."""

    nodes: tuple[Node, ...]
    machine: Machine
    """Machine that a trial may count on: the node's with the most GPUs, or the most memory."""
    notes: tuple[str, ...]
    """Where trials run, and which nodes are left out, and why."""


def choose(nodes: Sequence[Node], device: Device | None, counts: Sequence[int] | None) -> Chosen:
    """Choose the nodes of one kind: a study does not mix kinds of GPUs or versions of torch.

    A kind with a node that has the requested number of GPUs is preferred, then the kind with the
    most GPUs. Raises MachineError if no node can run a trial, UsageError for a count that no node
    has: all ranks of a trial run on one node.
    """
    is_cpu = device == "cpu" or (device is None and not any(node.gpus for node in nodes))
    device = "cpu" if is_cpu else "cuda"
    left_out: list[str] = []
    kinds: dict[tuple[str, str], list[Node]] = {}
    for node in sorted(nodes, key=lambda node: node.problem is None):
        lack = node.lack(device)
        if lack is None:
            kinds.setdefault(node.kind(device), []).append(node)
        else:
            left_out.append(f"{node.name} is left out: {lack}")
    if not kinds:
        said = "; ".join(left_out) or "it has no nodes"
        raise MachineError(f"the Ray cluster has no node for trials: {said}", hint=STATUS)
    most = max(counts or (1,))
    widest = {kind: max(node.gpus for node in alike) for kind, alike in kinds.items()}
    gpus = {kind: sum(node.gpus for node in alike) for kind, alike in kinds.items()}
    best = max(kinds, key=lambda kind: (widest[kind] >= most, gpus[kind], len(kinds[kind])))
    chosen = kinds.pop(best)
    used = f"{len(chosen)} node{'s' * (len(chosen) != 1)} of a Ray cluster"
    if is_cpu:
        pick = max(chosen, key=lambda node: node.read.host_memory_total_bytes)
        used = f"trials run on {used}, one on each at a time"
    elif most > widest[best]:
        fit = [str(count) for count in counts or () if count <= widest[best]]
        raise UsageError(
            f"{most} GPUs are asked for, a trial runs on one node, and a node of the Ray cluster "
            f"has {widest[best]} at the most",
            hint=f"use `--gpus {' '.join(fit) or widest[best]}`",
        )
    else:
        pick = max(chosen, key=lambda node: node.gpus)
        used = f"trials run on {gpus[best]} x {kind_name(best[0])} of {used}, each on one node"
    others = [
        f"{len(alike)} node{'s' * (len(alike) != 1)} with {_kind_words(kind)} left out: a study is "
        f"of one kind, here {_kind_words(best)}"
        for kind, alike in kinds.items()
    ]
    return Chosen(tuple(chosen), pick.read, (used, *left_out, *others))


def _kind_words(kind: tuple[str, str]) -> str:
    name, torch = kind
    return ", ".join(filter(None, (name and kind_name(name), torch and f"torch {torch}")))


def demand_of(spec: TrialSpec) -> Demand:
    """Resources that a trial takes on its node."""
    on_gpus = spec.device == "cuda"
    return Demand(
        gpus=spec.layout.gpus if on_gpus else 0,
        cpus=float(spec.layout.gpus),
        memory_bytes=host_bytes(spec),
        whole_node=not on_gpus or is_alone(spec),
    )


class Placement:
    """Which nodes have room, as far as our own trials use them. Not thread-safe."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = tuple(nodes)
        self._taken: list[Wanted] = []

    def has_room(self, demand: Demand) -> bool:
        """True if a trial would start now, beside the running ones."""
        return any(self._is_free(node, demand) for node in self._able(demand))

    def take(self, demand: Demand, *, avoided: Collection[str] = ()) -> Wanted:
        """Reserve a node for a trial, none of ``avoided`` if possible; MachineError: none can."""
        able = self._able(demand)
        if not able:
            raise self._too_much(demand)
        able = [node for node in able if node.node_id not in avoided] or able
        free = [node for node in able if self._is_free(node, demand)] or able
        first = min(free, key=lambda node: (self._gpus_left(node), node.cpus, node.node_id))
        cpus = demand.cpus
        if demand.whole_node:
            free = [node for node in free if (node.gpus, node.cpus) == (first.gpus, first.cpus)]
            cpus = cpus if demand.gpus else first.cpus
            demand = demand.replace(gpus=first.gpus if demand.gpus else 0)
        demand = demand.replace(cpus=min(cpus, *(node.cpus for node in free)))
        any_of = tuple(node.node_id for node in free)
        self._taken.append(Wanted(demand=demand, first=first.node_id, any_of=any_of))
        return self._taken[-1]

    def leave(self, wanted: Wanted) -> None:
        """Release the reservation of a trial that has ended."""
        self._taken = [taken for taken in self._taken if taken is not wanted]

    def _able(self, demand: Demand) -> list[Node]:
        """The nodes that could run a trial if they were empty."""
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
        most = max(node.gpus for node in self.nodes)
        asked, there = f"{demand.gpus} GPUs", str(most)
        if most >= demand.gpus:
            asked = f"{format_bytes(demand.memory_bytes)} of host memory"
            there = format_bytes(max(node.memory_bytes for node in self.nodes))
        return MachineError(
            f"a trial takes {asked}, and no node of the Ray cluster has more than {there}",
            hint=STATUS,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _NodeOccupant(Occupant):
    """A running trial and its reservation on a node."""

    wanted: Wanted


class RayRunner(SeveralAtOnce[_NodeOccupant]):
    """Runs trials on a cluster's nodes; their logs and the files beside them are copied back.

    On the CPU a node has one trial at a time. On GPUs small trials share a node; one that keeps
    tensors in host memory has a node of its own. A trial that runs out of host memory beside others
    proves nothing: it is launched once more, alone on a node.
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
        """``nodes`` are of one kind; ``launched_by`` makes ``request``'s launcher on a node."""
        super().__init__(most_trials)
        self._cluster, self._request, self._launched_by = cluster, request, launched_by
        self._log_directory = log_directory
        self._log_layout: LogLayout = log_layout
        self._placement = Placement(nodes)
        self._like = nodes[0]
        self._lost_on: defaultdict[str, set[str]] = defaultdict(set)
        """Ids of the nodes on which a trial was lost, by the trial's key."""
        self._has_lost_nodes = False
        """True if a node was lost since the nodes were read."""

    def submit(self, launch: Launch, *, on_phase: OnPhase = unheard) -> Future[TrialResult]:
        """Start a trial, as ``Runner.submit``; it waits while other users occupy the cluster."""
        if self._has_lost_nodes:  # new nodes may have joined
            self._has_lost_nodes = False
            nodes, device = self._cluster.read_nodes(), launch.spec.device
            fit = [node for node in nodes if node.lack(device) is None]
            kind = self._like.kind(device)
            with self._changed:
                self._placement.nodes = tuple(node for node in fit if node.kind(device) == kind)
        return super().submit(launch, on_phase=on_phase)

    def _has_room(self, spec: TrialSpec) -> bool:
        most = self._most_trials
        is_free = most is None or len(self._running) < most
        return is_free and self._placement.has_room(demand_of(spec))

    def _place(self, spec: TrialSpec) -> _NodeOccupant:
        wanted = self._placement.take(demand_of(spec), avoided=self._lost_on[spec.key])
        return _NodeOccupant(spec=spec, wanted=wanted)

    def _launched(self, launch: Launch, place: _NodeOccupant, on_phase: OnPhase) -> TrialResult:
        began, spec = time.monotonic(), launch.spec
        try:
            result = self._run_on_node(launch, place, on_phase)
            demand = place.wanted.demand
            if not demand.whole_node and blames_the_host(result, spec):
                alone, avoided = demand.replace(whole_node=True), self._lost_on[spec.key]
                with self._changed:
                    self._placement.leave(place.wanted)
                    place.wanted = self._placement.take(alone, avoided=avoided)
                result = self._run_on_node(with_time_left(launch, began), place, on_phase)
            return result
        finally:
            with self._changed:
                self._placement.leave(place.wanted)

    def _run_on_node(self, launch: Launch, place: _NodeOccupant, on_phase: OnPhase) -> TrialResult:
        """Run a trial on a node, with a new log."""
        path = log_path_of(self._log_directory, launch.spec, self._log_layout)
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_log(path) as log:
            trial = NodeTrial(
                launch=launch,
                request=self._request,
                launched_by=self._launched_by,
                log_path=log.name,
                wanted=place.wanted,
            )
        report = self._cluster.run(trial, place.ended, on_phase)
        if report.result is None:
            raise RuntimeError(f"on a node of the Ray cluster: {report.error}")
        if report.lost_on is not None:
            self._lost_on[launch.spec.key].add(report.lost_on)
        if report.has_lost_node:
            with self._changed:
                left = (node for node in self._placement.nodes if node.node_id != report.lost_on)
                self._placement.nodes, self._has_lost_nodes = tuple(left), True
        return report.result


@lru_cache(maxsize=1)
def _read_nodes(address: str, needs: str) -> tuple[Node, ...]:
    return RayCluster(address, from_json(needs, Needs)).read_nodes()


def leave() -> None:
    """Forget the nodes that were read for a request, so that the next request reads them again."""
    _read_nodes.cache_clear()


def nodes_of(request: Request) -> Chosen:
    """The nodes on which a request's trials run; MachineError if no cluster or node can do so."""
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
    """The runner of a request's trials on its nodes."""
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


if __name__ == "__main__":  # the nodes import what they are sent by this module's own name
    ray_job.main()

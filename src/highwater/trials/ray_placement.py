"""Placement: which nodes of a Ray cluster trials run on, and what each takes there. Pure: what was
read of the nodes comes in, and nothing is asked of Ray.
"""

from collections.abc import Sequence
from typing import NamedTuple

from highwater.errors import MachineError, UsageError
from highwater.nouns.codec import Record
from highwater.nouns.hardware import Machine, kind_name
from highwater.nouns.trial import Device, TrialSpec
from highwater.trials.local import host_bytes, is_alone
from highwater.units import format_bytes

_SHOWN = 8
"""Digits of a node's id that are shown."""
STATUS = "`ray status` shows the cluster"


class Node(Record, frozen=True, kw_only=True):
    """One node of a cluster: what Ray hands out of it, and what is there."""

    node_id: str
    cpus: float
    gpus: int
    memory_bytes: int
    """Host memory that Ray hands out; it keeps some for its object store."""
    machine: Machine | None = None
    """What a process on the node read; its GPUs are those that Ray hands out. None: it could not
    be read."""
    problem: str | None = None
    """Why no trial can run on it; None where one can."""

    @property
    def name(self) -> str:
        """What it is called in a message; Ray's own commands show the same digits first."""
        return f"node {self.node_id[:_SHOWN]}"


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
    fit = [
        node
        for node in nodes
        if node.problem is None and (node.gpus if device == "cuda" else node.cpus)
    ]
    return tuple(node for node in fit if _kind(node, device) == _kind(like, device))


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

    def __init__(self, nodes: Sequence[Node], *, most_trials: int | None = None) -> None:
        """``most_trials`` bounds the trials that run at a time; None: as many as there is room
        for.
        """
        self.nodes = tuple(nodes)
        self._most_trials = most_trials
        self._taken: dict[int, tuple[str, Demand]] = {}

    def has_room(self, demand: Demand) -> bool:
        """Whether a trial would start beside those that run; true where none does."""
        if not self._taken:
            return True
        if self._most_trials is not None and len(self._taken) >= self._most_trials:
            return False
        return any(self._is_free(node, demand) for node in self._able(demand))

    def take(self, trial: int, demand: Demand, *, avoided: frozenset[str] = frozenset()) -> Wanted:
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
            asked = demand._replace(gpus=gpus, cpus=demand.cpus if gpus else first.cpus)
        else:
            asked = demand
        asked = asked._replace(cpus=min(asked.cpus, *(node.cpus for node in free)))
        self._taken[trial] = first.node_id, asked
        return Wanted(asked, first.node_id, tuple(node.node_id for node in free))

    def placed(self, trial: int, node_id: str) -> None:
        """Note where Ray has put a trial."""
        self._taken[trial] = node_id, self._taken[trial][1]

    def leave(self, trial: int) -> None:
        """Note that a trial has ended."""
        del self._taken[trial]

    def beside(self, trial: int) -> frozenset[int]:
        """The other trials on a trial's node."""
        place = self._taken[trial][0]
        return frozenset(
            other for other, (node_id, _) in self._taken.items() if node_id == place
        ) - {trial}

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
        return [demand for node_id, demand in self._taken.values() if node_id == node.node_id]

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

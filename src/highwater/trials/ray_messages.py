"""Messages between the control plane and the process that drives a Ray cluster: what it is told to
do, and what it tells.
"""

from typing import NamedTuple

from highwater.nouns.protocols import Launch
from highwater.trials.inputs import ModelFiles
from highwater.trials.ray_node import LauncherIn, Needs, TrialEnd
from highwater.trials.ray_placement import Node, Wanted


class Join(NamedTuple):
    """Join the cluster at an address."""

    address: str


class Joined(NamedTuple):
    """The cluster was joined, or why not."""

    refusal: str | None = None


class ReadNodes(NamedTuple):
    """Read every node that is not among these."""

    needs: Needs
    but_not: frozenset[str] = frozenset()


class NodesRead(NamedTuple):
    """The nodes that were read, and the ids of all that are alive."""

    nodes: tuple[Node, ...]
    alive: frozenset[str]


class Start(NamedTuple):
    """Start a trial."""

    trial: int
    wanted: Wanted
    launcher_in: LauncherIn
    launch: Launch
    model: ModelFiles


class End(NamedTuple):
    """End a trial at once."""

    trial: int


class Placed(NamedTuple):
    """A trial has its node."""

    trial: int
    node_id: str


class Runs(NamedTuple):
    """A trial runs: what it is doing, and what its log has got since."""

    trial: int
    phase: str
    log: bytes


class Ended(NamedTuple):
    """A trial has ended, with all its processes."""

    trial: int
    end: TrialEnd


class Lost(NamedTuple):
    """A trial was lost with the process that held it."""

    trial: int
    node_id: str | None
    reason: str
    is_node: bool
    """Whether its node is gone."""

"""The driver of a Ray cluster: a process of its own, the only one that imports Ray.

What Ray prints, its handlers of signals, and a crash of its native code stay in it. It is told what
to do, and tells what happens, through one socket (ray_runner.py holds the other end). When that
closes, because whoever held it has ended, even by kill -9, this process ends, and Ray ends with it
every process that was started for it on any node.

Run as ``python -P -m highwater.trials.ray_driver FILE_DESCRIPTOR``.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from highwater.nouns.environment import allocator_environment
from highwater.nouns.settings import Allocator
from highwater.trials.ray_node import (
    FORGOTTEN_S,
    End,
    Ended,
    Join,
    Joined,
    Lost,
    NodeReading,
    NodesRead,
    Placed,
    ReadNodes,
    Runs,
    Start,
    TrialEnd,
    TrialOnNode,
    read_node,
)
from highwater.trials.ray_placement import Node, Wanted

_ASKED_S = 0.5
"""Seconds between two questions to a trial."""
_FIRST_CHOICE_S = 5.0
"""Seconds that a trial waits for the node that suits best; then any will do."""
_ANSWER_S = 10.0
"""Bound on the time of one answer; a busy node is asked again."""
_SILENT_S = FORGOTTEN_S / 2
"""Seconds after which a node that does not answer is taken for lost. Ray itself takes about 20 by
its defaults: five health checks, 3 s apart."""
_READ_S = 120.0
"""Bound on the time until a node was read: Ray brings the package there, and torch is asked."""
_MEMORY_MONITOR = "RAY_memory_usage_threshold"
"""A variable that Ray names where it ended a process because its node's memory was full."""
_END_S = 40.0
"""Bound on the time until a trial that is told to end has: the reaper has 30 s."""


def main() -> None:
    """Serve whoever holds the other end of the socket, until it closes."""
    connection = Connection(int(sys.argv[1]))
    sys.stdout = sys.stderr  # where Ray talks
    driver = _Driver(connection)
    try:
        while True:
            driver.hear(connection.recv())
    except EOFError:
        os._exit(0)  # Ray ends what was started for this process


class _Driver:
    """Does what it hears; a thread for each trial."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._ends: dict[int, threading.Event] = {}

    def hear(self, asked: object) -> None:
        """Do what is asked, here or in a thread."""
        match asked:
            case Join():
                self.say(_join(asked.address))
            case ReadNodes():
                self.say(_read_nodes(asked))
            case Start():
                ended = self._ends[asked.trial] = threading.Event()
                words = (asked, ended, self.say)
                threading.Thread(target=_hold, args=words, daemon=True).start()
            case End():
                self._ends[asked.trial].set()
            case _:
                raise TypeError(f"{asked!r} is nothing to do")

    def say(self, said: object) -> None:
        """Tell the other end."""
        with self._sending:
            self._connection.send(said)


def _join(address: str) -> Joined:
    import ray

    package = str(Path(__file__).resolve().parents[1])
    environment = {"py_modules": [package], "excludes": ["**/__pycache__"]}
    try:
        ray.init(
            address=address,
            runtime_env=environment,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # noqa: BLE001 - Ray has no common one for this
        return Joined(_first_line(error))
    return Joined()


def _read_nodes(asked: ReadNodes) -> NodesRead:
    """Start a process on each new node that reads it, all at once."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    import ray

    alive = {each["NodeID"]: each["Resources"] for each in ray.nodes() if each["Alive"]}
    reading: dict[str, Any] = {}
    for node_id, resources in alive.items():
        if node_id in asked.but_not:
            continue
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        read = ray.remote(read_node).options(num_cpus=0, scheduling_strategy=there, max_retries=1)
        reading[node_id] = read.remote(int(resources.get("GPU", 0)), asked.needs)
    deadline = time.monotonic() + _READ_S
    return NodesRead(
        tuple(_node(node_id, alive[node_id], ref, deadline) for node_id, ref in reading.items()),
        frozenset(alive),
    )


def _node(node_id: str, resources: dict[str, float], ref: Any, deadline: float) -> Node:
    import ray

    machine, problem = None, None
    try:
        found: NodeReading = ray.get(ref, timeout=max(1.0, deadline - time.monotonic()))
        machine, problem = found
    except Exception as error:  # noqa: BLE001 - what a process far away could not even import
        problem = f"it cannot be read: {_first_line(error)}"
    return Node(
        node_id=node_id,
        cpus=resources.get("CPU", 0.0),
        gpus=int(resources.get("GPU", 0)),
        memory_bytes=int(resources.get("memory", 0)),
        machine=machine,
        problem=problem,
    )


def _hold(asked: Start, ended: threading.Event, say: Callable[[object], None]) -> None:
    """Hold one trial from its place to its end."""
    from ray.exceptions import RayError
    from ray.util import remove_placement_group

    held = _HeldTrial(asked, ended, say)
    try:
        say(held.run())
    except RayError as error:
        say(held.lost(error))
    except Exception as error:  # noqa: BLE001 - the edge of a process
        say(Ended(asked.trial, TrialEnd(error=repr(error))))
    finally:
        if held.group is not None:
            remove_placement_group(held.group)


class _HeldTrial:
    """A trial on the cluster, seen from here."""

    def __init__(self, asked: Start, ended: threading.Event, say: Callable[[object], None]) -> None:
        self._asked = asked
        self._ended = ended
        self._say = say
        self.group: Any = None
        """The placement group that holds its part of a node."""
        self._node_id: str | None = None

    def run(self) -> Ended:
        """Wait for a place, run the trial there, and tell what it is doing.

        Raises RayError where it was lost.
        """
        trial = self._asked.trial
        if not self._wait_for_place():
            return Ended(trial, TrialEnd())
        actor = self._actor()
        try:
            actor.run.remote(self._asked.launcher_in, self._asked.launch, self._asked.model)
            return Ended(trial, self._follow(actor))
        finally:
            import ray

            ray.kill(actor)

    def lost(self, error: Exception) -> Lost:
        """How the trial was lost; whether with its node, Ray knows."""
        is_node = self._node_id not in _alive()
        return Lost(self._asked.trial, self._node_id, loss_reason(error), is_node)

    def _wait_for_place(self) -> bool:
        """Wait until Ray has reserved a part of one node; false where the trial is ended first."""
        from ray.exceptions import NodeDiedError
        from ray.util import placement_group_table, remove_placement_group

        wanted = self._asked.wanted
        self.group = _group(wanted, (wanted.first,))
        until = time.monotonic() + _FIRST_CHOICE_S
        while not self.group.wait(_ASKED_S):
            if self._ended.is_set():
                return False
            self._say(Runs(self._asked.trial, "waiting for its place on a node", b""))
            if not _alive() & {wanted.first, *wanted.any_of}:
                raise NodeDiedError("every node that could hold the trial is gone")
            if time.monotonic() > until:
                remove_placement_group(self.group)
                self.group = _group(wanted, wanted.any_of)
                until = float("inf")
        nodes = placement_group_table(self.group)["bundles_to_node_id"]
        self._node_id = str(nodes[0])
        self._say(Placed(self._asked.trial, self._node_id))
        return True

    def _actor(self) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        import ray

        demand, settings = self._asked.wanted.demand, self._asked.launch.spec.settings
        there = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=0)
        made = ray.remote(TrialOnNode).options(
            num_cpus=demand.cpus,
            num_gpus=demand.gpus,
            memory=demand.memory_bytes,
            max_concurrency=4,  # it runs, tells, and is told to end
            max_restarts=0,
            scheduling_strategy=there,
            runtime_env={"env_vars": _environment(settings.allocator)},
        )
        return made.remote()

    def _follow(self, actor: Any) -> TrialEnd:
        """Tell what the trial is doing, and end it when told; returns its end."""
        from ray.exceptions import ActorUnavailableError, GetTimeoutError

        import ray

        known_bytes, heard_at, told_to_end_at = 0, time.monotonic(), None
        while True:
            if self._ended.is_set() and told_to_end_at is None:
                told_to_end_at = time.monotonic()
                actor.end.remote()
            try:
                told: Any = ray.get(actor.tell.remote(known_bytes), timeout=_ANSWER_S)
            except (ActorUnavailableError, GetTimeoutError):
                # It may be back, or Ray finds out that its node is gone.
                if time.monotonic() - heard_at > _SILENT_S:
                    raise
                if told_to_end_at is not None and time.monotonic() - told_to_end_at > _END_S:
                    return TrialEnd()
                time.sleep(_ASKED_S)
                continue
            heard_at = time.monotonic()
            known_bytes += len(told.log)
            self._say(Runs(self._asked.trial, told.phase, told.log))
            if told.end is not None:
                return told.end
            if told_to_end_at is not None and time.monotonic() - told_to_end_at > _END_S:
                return TrialEnd()
            self._ended.wait(_ASKED_S) if told_to_end_at is None else time.sleep(_ASKED_S)


def _environment(allocator: Allocator) -> dict[str, str]:
    """Variables that are there before the process of a trial starts.

    Of Ray's, that it leaves the children of a process that it ends alone: it would kill the reaper
    with -9, and orphan what a trial has started elsewhere. The reaper ends all that by itself.
    """
    return {
        **allocator_environment(allocator),
        "RAY_kill_child_processes_on_worker_exit": "0",
    }


def _alive() -> set[str]:
    """The ids of the nodes that Ray takes for alive."""
    import ray

    return {each["NodeID"] for each in ray.nodes() if each["Alive"]}


def _group(wanted: Wanted, node_ids: tuple[str, ...]) -> Any:
    """A placement group of one bundle: all of a trial is on one of these nodes."""
    from ray.util import placement_group

    chosen = {"ray.io/node-id": f"in({','.join(node_ids)})"}
    return placement_group(
        [wanted.demand.bundle], strategy="STRICT_PACK", bundle_label_selector=[chosen]
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def loss_reason(error: BaseException) -> str:
    """Why a trial was lost, in a line."""
    text = str(error).strip() or repr(error)
    if _MEMORY_MONITOR in text:
        return "the node's memory was full, and Ray's memory monitor ended what ran there"
    # Why an actor died comes after its name and its number.
    return text.splitlines()[-1].partition(" Some common causes")[0]


if __name__ == "__main__":
    main()

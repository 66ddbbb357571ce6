"""A Ray cluster of several nodes on this machine, on the loopback interface alone: Ray's own
simulation, in a process of its own, so that a test holds no Ray and nothing of one is left.

Run as ``python local_cluster.py CPUS...``: a node for each number, besides a head that has none.
Prints its address and the ids of the nodes as JSON; then ``kill N`` on stdin kills the N-th node,
``add CPUS`` adds one, each answered by a line; it ends with its stdin.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from highwater.units import GIB, MIB

NODE_BYTES = 4 * GIB
"""Host memory that a node hands out."""
ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
"""Ray takes 127.0.0.1 for its address then, as it does where firewalls would ask, and tells
nobody about it."""
_HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}
"""A node that is gone is found out within seconds, not within 20."""


@dataclass
class LocalCluster:
    """A running cluster."""

    process: subprocess.Popen[str]
    address: str
    nodes: list[str]
    """Ids of the nodes, in their order; the head's is not among them."""

    def kill(self, number: int) -> None:
        """Kill a node with -9, as a machine that loses its power."""
        self._told(f"kill {number}")

    def add(self, cpus: int) -> None:
        """Add a node."""
        self.nodes.append(self._told(f"add {cpus}"))

    def _told(self, words: str) -> str:
        _pipe(self.process.stdin).write(f"{words}\n")
        _pipe(self.process.stdin).flush()
        return json.loads(_pipe(self.process.stdout).readline())


@contextmanager
def local_cluster(*cpus: int) -> Iterator[LocalCluster]:
    """A cluster with a node for each number of CPUs."""
    process = subprocess.Popen(
        [sys.executable, __file__, *map(str, cpus)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | ON_LOOPBACK,
    )
    try:
        told = json.loads(_pipe(process.stdout).readline())
        yield LocalCluster(process, told["address"], told["nodes"])
    finally:
        _pipe(process.stdin).close()
        process.wait(60)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def main() -> None:
    talk, sys.stdout = sys.stdout, sys.stderr
    # A socket's path has 107 characters at the most: no folder of a test's.
    folder = os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="hw-ray-", dir="/tmp")
    from ray.cluster_utils import Cluster

    common = {
        "node_ip_address": "127.0.0.1",
        "include_dashboard": False,
        "object_store_memory": 80 * MIB,
    }
    head = {**common, "num_cpus": 0, "memory": MIB, "_system_config": _HEALTH}
    cluster = Cluster(initialize_head=True, head_node_args=head)

    def add(cpus: int):
        return cluster.add_node(num_cpus=cpus, memory=NODE_BYTES, **common)

    def say(value: object) -> None:
        print(json.dumps(value), file=talk, flush=True)

    try:
        nodes = [add(int(cpus)) for cpus in sys.argv[1:]]
        say({"address": cluster.address, "nodes": [node.node_id for node in nodes]})
        for line in sys.stdin:
            word, number = line.split()
            if word == "kill":
                cluster.remove_node(nodes[int(number)], allow_graceful=False)
                say(None)
            else:
                nodes.append(add(int(number)))
                say(nodes[-1].node_id)
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

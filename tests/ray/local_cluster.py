"""A Ray cluster of several nodes on this machine, on the loopback interface alone: Ray's own
simulation, in a process of its own, so that a test holds no Ray and nothing of one is left.

Run as ``python local_cluster.py CPUS[:GPUS]...``: a node for each, besides a head that has none.
The GPUs are Ray's bookkeeping: none has to be there.
Prints its address; then such a line on stdin adds a node, and is answered by one; it ends with its
stdin.
"""

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

NODE_BYTES = 8 * GIB
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
    process: subprocess.Popen[str]
    address: str

    def add(self, node: str) -> None:
        _pipe(self.process.stdin).write(f"{node}\n")
        _pipe(self.process.stdin).flush()
        _pipe(self.process.stdout).readline()


@contextmanager
def local_cluster(*nodes: str) -> Iterator[LocalCluster]:
    process = subprocess.Popen(
        [sys.executable, __file__, *nodes],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | ON_LOOPBACK,
    )
    try:
        yield LocalCluster(process, _pipe(process.stdout).readline().strip())
    finally:
        _pipe(process.stdin).close()
        process.wait(60)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def main() -> None:
    if any(":" in node for node in sys.argv[1:]):
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hands out no more than are visible
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

    def add(node: str) -> None:
        cpus, _, gpus = node.strip().partition(":")
        cluster.add_node(num_cpus=int(cpus), num_gpus=int(gpus or 0), memory=NODE_BYTES, **common)

    try:
        for node in sys.argv[1:]:
            add(node)
        print(cluster.address, file=talk, flush=True)
        for line in sys.stdin:
            add(line)
            print("added", file=talk, flush=True)
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

"""What ``srun`` does: a process on each machine, which is told its number and every signal.

``python -P -m srun WAY MACHINE... -- COMMAND...``: with the way ``kills`` the others are ended
where one fails, as with ``--kill-on-bad-exit``. A machine is a name, or a name and the interface of
its network namespace: ``NAME:INTERFACE``.
"""

import ctypes
import os
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path

from highwater.trials import ranks

_CLONE_NEWUTS = 0x4000000
_CLONE_NEWNET = 0x40000000


def main() -> int:
    at = sys.argv.index("--")
    way, *machines = sys.argv[1:at]
    tasks: list[ranks.subprocess.Popen[bytes]] = []

    def forward(number: int, _: object) -> None:
        for task in tasks:
            if task.poll() is None:
                task.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    for number, machine in enumerate(machines):
        name, _, interface = machine.partition(":")
        told = {"SLURM_PROCID": str(number), "SLURM_NTASKS": str(len(machines))}
        told |= {"GLOO_SOCKET_IFNAME": interface or "lo"}
        told |= dict(pair.split("=") for pair in os.environ.get("SRUN_SETS", "").split())
        tasks.append(
            ranks.started(
                sys.argv[at + 1 :],
                environment=os.environ | told,
                stdin=None,
                prepare=partial(be_on, name) if interface else None,
            )
        )
    while any(task.poll() is None for task in tasks):
        if way == "kills" and any(task.poll() for task in tasks):
            forward(signal.SIGTERM, None)
        time.sleep(0.05)
    return max(abs(task.returncode) for task in tasks)


def be_on(name: str) -> None:
    """Have this process be in the network of a namespace, on a host of its name."""
    libc = ctypes.CDLL(None, use_errno=True)
    network = os.open(Path("/run/netns", name), os.O_RDONLY)
    if libc.setns(network, _CLONE_NEWNET) or libc.unshare(_CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), f"this process cannot be on {name}")
    os.close(network)
    socket.sethostname(name)


if __name__ == "__main__":
    sys.exit(main())

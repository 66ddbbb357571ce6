"""Starts a script on several processes of this machine, one for each GPU: ``python -m
highwater.engine.ranks --nproc 2 loop.py``.

They meet through a file in a folder that only their user can read, so that nobody listens for them
on a port. The first that fails ends the others, and its status is this command's.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

from highwater.nouns.environment import STORE_VARIABLE

_PAUSE_S = 0.05
_GRACE_S = 5.0
"""Time that a process has to end once it is told to."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the script on all ranks; returns the first status that is not 0."""
    parser = argparse.ArgumentParser(prog="python -m highwater.engine.ranks", description=__doc__)
    parser.add_argument("--nproc", type=int, required=True, help="processes, one for each GPU")
    parser.add_argument("script", help="the Python file that each of them runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    asked = parser.parse_args(words)
    if asked.nproc < 1:
        parser.error(f"--nproc is {asked.nproc}, and has to be 1 or more")
    signal.signal(signal.SIGTERM, _leave)
    with tempfile.TemporaryDirectory(prefix="highwater-ranks-") as folder, ExitStack() as ending:
        command = [sys.executable, asked.script, *asked.arguments]
        ranks: list[subprocess.Popen[bytes]] = []
        ending.callback(_end, ranks)
        for rank in range(asked.nproc):
            variables = _variables(rank, asked.nproc, Path(folder, "store"))
            ranks.append(subprocess.Popen(command, env=os.environ | variables))
        return _status(ranks)


def _variables(rank: int, ranks: int, store: Path) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    variables = {name: str(value) for name, value in own.items()}
    return variables | {STORE_VARIABLE: str(store), "OMP_NUM_THREADS": threads}


def _status(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """The first status that is not 0, or 0 once all have ended."""
    while True:
        statuses = [rank.poll() for rank in ranks]
        failed = [status for status in statuses if status]
        if failed:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in statuses:
            return 0
        time.sleep(_PAUSE_S)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End those that still run: one that failed has left them waiting."""
    for rank in ranks:
        rank.terminate()
    until = time.monotonic() + _GRACE_S
    for rank in ranks:
        try:
            rank.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def _leave(number: int, _: object) -> NoReturn:
    """End as the shell tells of a signal, with all that has to be tidied up."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())

"""Starts a script on several processes of this machine, one for each GPU: ``python -m
highwater.engine.ranks --nproc 2 loop.py``.

They meet through a file in a folder that only their user can read, so that nobody listens for them
on a port. The first that fails ends the others, and its status is this command's.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import NoReturn

_GRACE_S = 5.0
"""Seconds that a process has to end once it is told to."""


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Become the reaper of the script's ranks, which exits with the first status that is not 0."""
    parser = argparse.ArgumentParser(prog="python -m highwater.engine.ranks", description=__doc__)
    parser.add_argument("--nproc", type=int, required=True, help="processes, one for each GPU")
    parser.add_argument("script", help="the Python file that each of them runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    asked = parser.parse_args(words)
    if asked.nproc < 1:
        parser.error(f"--nproc is {asked.nproc}, and has to be 1 or more")
    ranks, cores = str(asked.nproc), len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // asked.nproc)))
    folder = tempfile.mkdtemp(prefix="highwater-ranks-")
    # Options and the share of ranks: trials/reaper.py. The reaper lives as long as its ranks,
    # even after the shell that started it is gone.
    reaper = [sys.executable, "-P", "-m", "highwater.trials.reaper", "0", "--remove", folder]
    reaper += ["--grace-s", str(_GRACE_S), "--output", "plain"]
    reaper += ["--ranks", json.dumps({"count": asked.nproc, "folder": folder})]
    os.execve(  # noqa: S606 -- words, and no shell
        sys.executable,
        [*reaper, sys.executable, asked.script, *asked.arguments],
        os.environ | {"LOCAL_WORLD_SIZE": ranks, "OMP_NUM_THREADS": threads},
    )


if __name__ == "__main__":
    main()

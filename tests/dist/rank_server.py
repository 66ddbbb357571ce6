"""Starts the processes of a group by forking them from this one, which has imported torch,
transformers and the engine: as many seconds of imports for every process that a test wants.

Started by ``rank_groups.py``. Each line of stdin is a group as JSON: a script, its words, how many
processes, the file that they meet by, and the one that gets what they print; each line of stdout
says in JSON how they ended, by rank. Where one fails, the others are ended: they wait for it.
"""

import gc
import json
import os
import runpy
import signal
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from highwater.engine.models import build
from highwater.engine.tracer import trinity_step
from highwater.engine.training import checkpoint, trial
from highwater.nouns.environment import STORE_VARIABLE

IMPORTED = (
    *(safetensors.torch, torch, transformers, build, trinity_step, checkpoint, trial),
    *(AutoModelForCausalLM, AutoModelForSequenceClassification),
)
"""What the scripts import: none of their processes has to."""


def serve() -> None:
    """Start one group after the other until stdin ends."""
    assert threading.active_count() == 1, "a thread would be missing in every child"
    gc.freeze()
    for line in sys.stdin:
        group = json.loads(line)
        ranks: dict[int, int] = {}
        for rank in range(group["processes"]):
            child = os.fork()
            if child == 0:
                _become(rank, group)
            ranks[child] = rank
        sys.stdout.write(f"{json.dumps(_ended(ranks))}\n")
        sys.stdout.flush()


def _ended(ranks: dict[int, int]) -> dict[int, int]:
    """Wait for all; exit statuses by rank."""
    statuses: dict[int, int] = {}
    while len(statuses) < len(ranks):
        child, status = os.wait()
        statuses[ranks[child]] = os.waitstatus_to_exitcode(status)
        if status:
            for other, rank in ranks.items():
                if rank not in statuses:
                    with suppress(ProcessLookupError):
                        os.kill(other, signal.SIGKILL)
    return statuses


def _become(rank: int, group: dict[str, Any]) -> None:
    """Be a rank of a group: never returns."""
    status = 1
    try:
        with Path(group["log"]).open("ab") as log, Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(group["processes"]),
            "LOCAL_WORLD_SIZE": str(group["processes"]),
            "GLOO_SOCKET_IFNAME": "lo",
            STORE_VARIABLE: group["store"],
        }
        sys.argv = [group["script"], *group["words"]]
        folder = Path(group["script"]).parent
        sys.path[:0] = [str(folder), str(folder.parent)]
        runpy.run_path(group["script"], run_name="__main__")
        status = 0
    except BaseException:  # noqa: BLE001 -- the edge of the process, as an interpreter has it
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()

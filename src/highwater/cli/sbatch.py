"""``highwater find --print-sbatch``: the same search as a job of Slurm.

The command runs on the first machine, and starts the ranks of all of them by ``srun``. Before its
time is up the job is told to end, and a job that is submitted again goes on where the study
stopped. Source: sbatch(1), srun(1) of Slurm.
"""

import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from highwater.errors import UsageError
from highwater.nouns.request import Request

_USUAL_S = 4 * 3600
"""Time of a job where nobody bounds the search: what is not found then is found by the next one."""
_START_S = 600
"""Time besides the search's own: machines come one after another, and trials end in order."""
_WARNED_S = 120
_NOT_OF_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


def sbatch_script(request: Request, words: Sequence[str]) -> str:
    """The script of a job that types ``words``, a ``highwater find``.

    Raises UsageError where nobody says how many GPUs a machine has, and for a word with a line end
    in it.
    """
    words = _in_the_job(request, words)
    for word in words:
        if len(f"{word}.".splitlines()) > 1:
            raise UsageError(
                f"a job of Slurm has its command in one line, and {word!r} has several",
                hint="name a file without a line end, or `--config find.yaml` with what it says",
            )
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(request))]
    return "\n".join(
        (
            *lines,
            "",
            "# Finished trials are kept in the study: submit this again, and it goes on.",
            f"exec {shlex.join(words)}",
        )
    )


def _options(request: Request) -> list[str]:
    name = _NOT_OF_A_NAME.sub("-", request.model.rstrip("/").rpartition("/")[2])
    options = [f"--job-name=highwater-{name}"]
    options += [f"--nodes={request.nodes}", "--ntasks-per-node=1"]
    if request.device != "cpu":
        options.append(f"--gpus-per-node={_gpus_of_a_node(request)}")
    minutes = math.ceil((_START_S + (request.budget_s or _USUAL_S)) / 60)
    options.append(f"--time={minutes // 60:02d}:{minutes % 60:02d}:00")
    options.append(f"--signal=B:TERM@{_WARNED_S}")
    return [*options, "--output=highwater-%j.log"]  # Slurm makes no directory for it


def _gpus_of_a_node(request: Request) -> int:
    if request.gpus is None:
        raise UsageError(
            "a job of Slurm asks for a number of GPUs, and none is named",
            hint=f"use `--gpus {8 * request.nodes}`",
        )
    return math.ceil(max(request.gpus) / request.nodes)


def _in_the_job(request: Request, words: Sequence[str]) -> list[str]:
    """The words without the one that only says what to print, and with what starts ranks."""
    kept = [word for word in words if word != "--print-sbatch"]
    if request.nodes > 1 and request.launcher is None:
        one_each = f"--nodes {request.nodes} --ntasks-per-node 1"
        kept += ["--launcher", f"srun {one_each} --kill-on-bad-exit"]
    if request.nodes > 1 and request.rendezvous is None:
        kept += ["--rendezvous", str(Path(request.log_dir, "rendezvous", "ranks"))]
    return kept

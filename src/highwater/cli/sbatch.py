"""``highwater find --print-sbatch``: the same search as a job of Slurm.

Each machine runs the same command; Slurm says which of them it is. Before its time is up the job is
told to end, and a job that is submitted again goes on where the study stopped. Source: sbatch(1),
srun(1) of Slurm.
"""

import math
import re
import shlex
from collections.abc import Sequence

from highwater.errors import UsageError
from highwater.nouns.request import Request

_USUAL_S = 4 * 3600
"""Time of a job where nobody bounds the search: what is not found then is found by the next one."""
_START_S = 600
"""Time besides the search's own: machines come one after another, and trials end in order."""
_WARNED_S = 120
_NOT_OF_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_NOT_IN_A_JOB = ("--print-sbatch", "--node-rank", "--rendezvous")


def sbatch_script(request: Request, words: Sequence[str]) -> str:
    """The script of a job that types ``words``, a ``highwater find``, on every machine.

    Raises UsageError where nobody says how many GPUs a machine has, and for a word with a line end
    in it.
    """
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
            f"srun --kill-on-bad-exit=1 {shlex.join(_in_the_job(words))}",
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
    options.append(f"--signal=TERM@{_WARNED_S}")
    return [*options, "--output=highwater-%j.log"]  # Slurm makes no directory for it


def _gpus_of_a_node(request: Request) -> int:
    if request.gpus is None:
        raise UsageError(
            "a job of Slurm asks for a number of GPUs, and none is named",
            hint=f"use `--gpus {8 * request.nodes}`",
        )
    return math.ceil(max(request.gpus) / request.nodes)


def _in_the_job(words: Sequence[str]) -> list[str]:
    """The words without those that only say what to print, or which machine this one is."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        name, _, value = word.partition("=")
        if name not in _NOT_IN_A_JOB:
            kept.append(word)
        elif name != "--print-sbatch" and not value:
            next(rest, None)
    return kept

"""A job as both planes know it: an order in JSON, and the report, or the refusal, that is left.

``python -m MODULE ORDER REPORT`` is the process of a job, which ``trials/job.py`` starts: ORDER is
read, REPORT written, in a folder that is the job's alone.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from highwater.errors import HighwaterError, MachineError
from highwater.nouns.codec import Record, from_json

PHASE_FILE = "phase"
"""Where a job, or the first rank of a trial, says in words what it is doing, while it runs."""
REFUSED_FILE = "refused.json"
Order = TypeVar("Order", bound=Record)


class Refused(Record, frozen=True, kw_only=True):
    """Why a job has no report, as a user is told."""

    problem: str
    hint: str
    is_machine: bool = False
    """Whether the machine refuses, and not what was asked."""


def serve(kind: type[Order], work: Callable[[Order, Path], Record]) -> None:
    """Be the process of a job: do the ``work`` that its order says, in the folder of its report,
    and leave what that returns, or the HighwaterError that it raises.
    """
    order, report = map(Path, sys.argv[1:3])
    try:
        left = work(from_json(order.read_bytes(), kind), report.parent)
    except HighwaterError as error:
        report = report.with_name(REFUSED_FILE)
        is_machine = isinstance(error, MachineError)
        left = Refused(problem=error.problem, hint=error.hint, is_machine=is_machine)
    leave(report, msgspec.json.encode(left))


def tell_phase(folder: Path, phase: str) -> None:
    """Leave word of what a job does, for whoever waits. Nothing depends on it."""
    with suppress(OSError):
        leave(folder / PHASE_FILE, phase.encode())


def leave(path: Path, content: bytes) -> None:
    """Write a file whole, or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    partial.replace(path)

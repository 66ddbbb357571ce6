"""Runner and Launcher: whatever runs trials, and whatever makes the processes of one; and a job as
both planes know it: an order in JSON, and the report, or the refusal, that is left.

``python -m MODULE ORDER REPORT`` is the process of a job, which ``trials/job.py`` starts: ORDER is
read, REPORT written, in a folder that is the job's alone.
"""

import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Protocol, TypeVar

import msgspec

from highwater.errors import HighwaterError, MachineError, UsageError
from highwater.nouns.codec import Record, from_json
from highwater.nouns.files import write_whole
from highwater.nouns.trial import TrialResult, TrialSpec

TOLD_S = 0.5
"""Seconds after which whoever waits for a trial is told again what it is doing."""
OnPhase = Callable[[str], None]
"""Hears about twice a second what the first rank of a trial is doing: ``step 1 of 2``."""


def unheard(phase: str) -> None:
    """Listen to no phase."""


class Launch(Record, frozen=True, kw_only=True):
    """One launch of one trial."""

    spec: TrialSpec
    attempt: int = 1
    repeat: int = 0
    """Number of the repeat: above 0 the same trial once more, to confirm it."""
    timeout_s: float | None = None
    """Longest time from launch to exit; None: what the launcher gives to any."""


class TrialEndedError(Exception):
    """A trial was ended because nobody waits for it any more; it has no result."""


class Launcher(Protocol):
    """Makes the processes of one trial, and classifies how they ended."""

    def launch(
        self, launch: Launch, *, gpus: tuple[str, ...] | None, ended: Event, on_phase: OnPhase
    ) -> TrialResult:
        """Run a trial to its end; blocks until every process of it is gone. Threads may call it
        side by side. ``gpus`` are the entries of ``CUDA_VISIBLE_DEVICES`` that the trial shall see;
        None: what this process sees. When ``ended`` is set the processes are ended at once, and
        TrialEndedError is raised. Raises MachineError when no trial can run at all, and UsageError
        for what the trainer cannot do.
        """
        ...


class Runner(Protocol):
    """Runs trials, several at once where there is room. One thread asks it."""

    def has_room(self, spec: TrialSpec) -> bool:
        """Whether a trial would start now, beside those that run; true where none does."""
        ...

    def submit(self, launch: Launch, *, on_phase: OnPhase = unheard) -> Future[TrialResult]:
        """Start a trial for which there is room; ``on_phase`` is called from another thread. The
        future has what ``Launcher.launch`` returns or raises.
        """
        ...

    def close(self) -> None:
        """End whatever runs, and return when no process of it is left."""
        ...


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

    def error(self) -> HighwaterError:
        """The error again."""
        return (MachineError if self.is_machine else UsageError)(self.problem, hint=self.hint)


def refused(error: HighwaterError) -> Refused:
    """An error for the user, as it crosses processes."""
    is_machine = isinstance(error, MachineError)
    return Refused(problem=error.problem, hint=error.hint, is_machine=is_machine)


def serve(kind: type[Order], work: Callable[[Order, Path], Record]) -> None:
    """Be the process of a job: do the ``work`` that its order says, in the folder of its report,
    and leave what that returns, or the HighwaterError that it raises.
    """
    order, report = map(Path, sys.argv[1:3])
    try:
        left = work(from_json(order.read_bytes(), kind), report.parent)
    except HighwaterError as error:
        report, left = report.with_name(REFUSED_FILE), refused(error)
    write_whole(report, msgspec.json.encode(left))


def tell_phase(folder: Path, phase: str) -> None:
    """Leave word of what a job does, for whoever waits. Nothing depends on it."""
    with suppress(OSError):
        write_whole(folder / PHASE_FILE, phase.encode())

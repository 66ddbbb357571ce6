"""Runner and Launcher: whatever runs trials, and whatever makes the processes of one.

A machine, a cluster, a simulation and a recorded study are interchangeable, and so are the trainers
that they start.
"""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Event
from typing import Protocol

from highwater.nouns.codec import Record
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
        side by side.

        ``gpus`` are the entries of ``CUDA_VISIBLE_DEVICES`` that the trial shall see; None: what
        this process sees. When ``ended`` is set the processes are ended at once, and
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
        """Start a trial for which there is room; ``on_phase`` is called from another thread.

        The future has what ``Launcher.launch`` returns or raises.
        """
        ...

    def close(self) -> None:
        """End whatever runs, and return when no process of it is left."""
        ...

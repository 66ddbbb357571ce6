"""The progress of a training: a bar with what is left on a terminal, a line now and then
elsewhere.
"""

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from highwater.spec.training import TrainingProgress, TrainingSpec
from highwater.units import format_seconds

_LINE_S = 10.0
"""Seconds between two lines where there is no terminal."""


@contextmanager
def training_progress(
    spec: TrainingSpec, *, done_steps: int
) -> Generator[Callable[[TrainingProgress], None]]:
    """Show a training while it runs; yields who hears where it is."""
    if not sys.stderr.isatty():
        yield _Lines(done_steps).hear
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("starting", total=spec.steps, completed=done_steps)

        def hear(said: TrainingProgress) -> None:
            bar.update(task, description=_short(said), completed=max(said.step, done_steps))

        yield hear


class _Lines:
    """A line for each new phase, and now and then one of a training."""

    def __init__(self, done_steps: int) -> None:
        self._done_steps = done_steps
        self._phase = ""
        self._said_at = 0.0
        self._step = done_steps

    def hear(self, said: TrainingProgress) -> None:
        now = time.monotonic()
        is_new = said.phase not in (self._phase, "training")
        is_due = said.step > self._step and now - self._said_at >= _LINE_S
        if is_new or is_due:
            self._said_at, self._step = now, said.step
            sys.stderr.write(f"{_line(said, self._done_steps)}\n")
            sys.stderr.flush()
        self._phase = said.phase


def _short(said: TrainingProgress) -> str:
    """What stands before a bar: short, so that the bar has room at 80 columns."""
    if said.phase != "training" or said.loss is None:
        return said.phase
    rate = f", {said.tokens / said.seconds:,.0f} tokens/s" if said.seconds else ""
    return f"loss {said.loss:.3f}{rate}"


def _line(said: TrainingProgress, done_steps: int) -> str:
    if said.phase != "training" or said.loss is None:
        return f"{said.phase} after step {said.step}" if said.step else said.phase
    steps = said.step - done_steps
    left = ""
    if steps > 0 and said.seconds:
        left = f", about {format_seconds(said.seconds / steps * (said.steps - said.step))} left"
    return f"step {said.step} of {said.steps}: {_short(said)}{left}"

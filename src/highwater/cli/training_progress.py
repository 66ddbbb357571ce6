"""The progress of a training: a bar with what is left on a terminal, a line now and then
elsewhere.
"""

import math
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

import msgspec

from highwater.cli.console import talk
from highwater.nouns.training import TrainingProgress, TrainingSpec
from highwater.units import format_seconds

_LINE_S = 10.0
"""Seconds between two lines where there is no terminal."""
_BAR_COLUMNS = 19
"""Columns of a bar that is still one, of the time that is left and of what is between them: beside
what stands before it, and two numbers of steps.
"""


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

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
    )
    task = bar.add_task("starting", total=spec.steps, completed=done_steps)

    def hear(said: TrainingProgress) -> None:
        described = _short(said, most=console.width - _BAR_COLUMNS - 2 * len(str(spec.steps)))
        bar.update(task, description=described, completed=max(said.step, done_steps))

    bar.start()
    try:
        yield hear
    finally:
        with suppress(OSError):  # of a terminal that has closed
            bar.stop()


class _Lines:
    """A line for each new phase and for each evaluation, and now and then one of a training."""

    def __init__(self, done_steps: int) -> None:
        self._done_steps = done_steps
        self._phase = ""
        self._said_at = 0.0
        self._step = done_steps
        self._evaluation_step: int | None = None

    def hear(self, said: TrainingProgress) -> None:
        now = time.monotonic()
        if said.evaluation_step not in (None, self._evaluation_step):
            self._evaluation_step = said.evaluation_step
            talk(_evaluation_line(said))
        is_new = said.phase not in (self._phase, "training")
        is_due = said.step > self._step and now - self._said_at >= _LINE_S
        if is_new or is_due:
            self._said_at, self._step = now, said.step
            talk(_line(said, self._done_steps))
        self._phase = said.phase


def _short(said: TrainingProgress, *, most: int) -> str:
    """What stands before a bar, in at most ``most`` columns: as many figures as there is room for,
    each whole.
    """
    if said.phase != "training" or said.loss is None:
        return said.phase
    text, *others = _figures(said)
    for figure in others:
        if len(f"{text}, {figure}") <= most:
            text = f"{text}, {figure}"
    return text


def _figures(said: TrainingProgress) -> list[str]:
    """What is said of the last step, the most telling first."""
    figures = [f"loss {said.loss:.3f}"]
    if said.evaluation_loss is not None:
        figures.append(f"held-out {said.evaluation_loss:.3f}")
    if said.seconds:
        figures.append(f"{said.tokens / said.seconds:,.0f} tokens/s")
    return figures


def _evaluation_line(said: TrainingProgress) -> str:
    when = f"after step {said.evaluation_step}" if said.evaluation_step else "before the first step"
    return f"held-out loss {said.evaluation_loss:.3f} {when}"


def _line(said: TrainingProgress, done_steps: int) -> str:
    if said.phase != "training" or said.loss is None:
        return f"{said.phase} after step {said.step}" if said.step else said.phase
    steps = said.step - done_steps
    left = ""
    if steps > 0 and said.seconds:
        left_s = math.ceil(said.seconds / steps * (said.steps - said.step))
        left = (
            f", about {left_s} s left" if left_s < 60 else f", about {format_seconds(left_s)} left"
        )
    figures = ", ".join(_figures(msgspec.structs.replace(said, evaluation_loss=None)))
    return f"step {said.step} of {said.steps}: {figures}{left}"

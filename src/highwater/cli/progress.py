"""Progress of a search or a training: live on a terminal, else a line now and then."""

import math
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from textwrap import shorten

from highwater.cli import console
from highwater.cli.console import talk
from highwater.nouns.plan import Plan
from highwater.nouns.settings import short_settings
from highwater.nouns.study import RANK_WORDS, Cell, CellAnswer, Question
from highwater.nouns.training import TrainingProgress, TrainingSpec
from highwater.nouns.trial import Outcome, TrialResult, TrialSpec
from highwater.pages.study_answer import proven_lengths, provenance
from highwater.pages.study_commands import TRIED, request_line
from highwater.pages.table import TextTable, table_of, terminal_table
from highwater.pages.text import plain
from highwater.search.budget import outlook
from highwater.search.cell_outcomes import (
    CellAnswered,
    SearchEvent,
    TrialFinished,
    TrialRuns,
    TrialStarted,
)
from highwater.search.proof import trial_s
from highwater.units import format_bytes, format_seconds, format_tokens

_RECENT = 4
"""Number of last trials that the time left is averaged over: they are more like those to come."""
_TOLD_WITHIN = 2
"""Longest length whose trial's time is estimated, in multiples of the longest recent fit."""

_SHOWN_AFTER_S = 2.0
"""Seconds after which a trial that runs gets a line of its own on a terminal."""
_SPARSE_S = 60.0
"""Seconds between lines about a trial that runs, in a log or a pipe."""
_REASON_WIDTH = 100
"""Characters of a reason in a line about a trial, at most; the final table has the whole reason."""


@contextmanager
def shown(planned: Plan) -> Generator[Callable[[SearchEvent], None]]:
    """Show a search, live on a terminal, else by lines. Yields the function that hears events."""
    state = Progress(planned.question, planned.timeout_s)
    if not sys.stderr.isatty():

        def say(event: SearchEvent) -> None:
            state.hear(event)
            line = state.sparse_line(event)
            if line:
                console.talk(line)

        yield say
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    def drawn() -> Text:
        return Text(
            terminal_table(state.table(), width=console.width(sys.stderr)),
            no_wrap=True,
            overflow="ignore",
        )

    with Live(
        console=Console(stderr=True), get_renderable=drawn, refresh_per_second=2, transient=True
    ):
        yield state.hear


@dataclass(slots=True)
class _Running:
    length_tokens: int
    started_at: float
    said_at: float
    expected_s: float | None
    """Predicted seconds of the trial; None: unknown."""
    phase: str = "starting"


class Progress:
    """What a search has done so far in each cell; ``hear`` takes an event."""

    def __init__(
        self,
        question: Question,
        timeout_s: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``timeout_s``: seconds that a full trial may take."""
        self._question = question
        self._clock = clock
        self._trials: dict[Cell, int] = dict.fromkeys(question.cells, 0)
        self._states: dict[Cell, str] = dict.fromkeys(question.cells, "waiting")
        self._fits: dict[Cell, int] = {}
        self._timed: list[tuple[int, float]] = []
        """Length and seconds of each trial that fit: others do not tell how long a fit takes."""
        self._length_tokens = 0
        """Length of the trial that last started, or ended."""
        self._running: dict[Cell, _Running] = {}
        """The running trial of each cell that has one."""
        self._trials_left = 0
        """Trials expected after the running ones."""
        self._unanswered = set(question.cells)
        cells = outlook(question, timeout_s)
        self._cells_s = {each.cell: each.expected_s for each in cells}
        """Seconds that each unanswered cell is expected to take; None: unknown."""
        self._cell_began_at: dict[Cell, float] = {}
        self._has_named_log = False

    def hear(self, event: SearchEvent) -> None:
        """Update the progress with one event of the search."""
        match event:
            case TrialStarted():
                self._start(event)
            case TrialRuns():
                if event.cell in self._running:
                    self._running[event.cell].phase = plain(event.phase)
            case TrialFinished():
                self._finish(event)
            case CellAnswered():
                self._states[event.answer.cell] = f"done: {self._answered(event.answer)}"
                self._cells_s.pop(event.answer.cell, None)
                self._unanswered.discard(event.answer.cell)

    def _start(self, event: TrialStarted) -> None:
        now, length_tokens = self._clock(), event.spec.length_tokens
        self._cell_began_at.setdefault(event.cell, now)
        self._running[event.cell] = _Running(
            length_tokens=length_tokens,
            started_at=now,
            said_at=now,
            expected_s=trial_s(self._question, event.spec),
        )
        self._length_tokens = length_tokens
        self._trials_left = event.trials_left
        self._states[event.cell] = f"trying {format_tokens(length_tokens)}{_again(event)}"

    def _finish(self, event: TrialFinished) -> None:
        length_tokens, outcome = event.spec.length_tokens, event.result.outcome
        if self._running.pop(event.cell, None) is None:
            self._trials_left = max(0, self._trials_left - 1)
        self._trials[event.cell] += 1
        self._length_tokens = length_tokens
        if outcome is Outcome.FIT:
            self._timed.append((length_tokens, event.result.wall_s))
            self._fits[event.cell] = max(length_tokens, self._fits.get(event.cell, 0))
        recorded = ", recorded" if event.is_recorded else ""
        self._states[event.cell] = f"{format_tokens(length_tokens)}: {_WORDS[outcome]}{recorded}"

    @property
    def left_s(self) -> float | None:
        """Estimated seconds left, the running trials included; None if unknown.

        By prediction if the GPU's rates are known; else the mean of the last trials that fit, each
        scaled to the current length, as time is at least linear in it; None for a much longer
        length. The number of concurrent trials is assumed to stay the same.
        """
        at_once = max(1, len(self._running))
        if self._cells_s and None not in self._cells_s.values():
            return sum(map(self._cell_left_s, self._cells_s)) / at_once
        recent = [(length, wall_s) for length, wall_s in self._timed[-_RECENT:] if wall_s > 0]
        trials = self._trials_left + len(self._running)
        if (
            not recent
            or not trials
            or not self._unanswered
            or self._length_tokens > _TOLD_WITHIN * max(length for length, _ in recent)
        ):
            return None
        scaled_s = [wall_s * max(1.0, self._length_tokens / length) for length, wall_s in recent]
        now = self._clock()
        ran_s = sum(now - each.started_at for each in self._running.values())
        return max(0.0, trials * sum(scaled_s) / len(scaled_s) - ran_s) / at_once

    def _cell_left_s(self, cell: Cell) -> float:
        expected_s, began_at = self._cells_s[cell] or 0.0, self._cell_began_at.get(cell)
        return expected_s if began_at is None else max(0.0, expected_s - self._clock() + began_at)

    @property
    def running(self) -> tuple[str, ...]:
        """``98,304 tokens: 35 s of about 1m 20s, step 1 of 2``, for each trial running for 2 s."""
        device, is_one = self._question.device, len(self._running) == 1
        return tuple(
            f"{'' if is_one else f'{cell.label_on(device)}: '}{self._running_line(each)}"
            for cell, each in self._running.items()
            if self._clock() - each.started_at >= _SHOWN_AFTER_S
        )

    def _running_line(self, trial: _Running) -> str:
        took_s = round(self._clock() - trial.started_at)
        expected_s = trial.expected_s
        of = "" if expected_s is None else f" of about {format_seconds(expected_s)}"
        took = f"{took_s} s" if took_s < 60 else format_seconds(float(took_s))
        return f"{format_tokens(trial.length_tokens)} tokens: {took}{of}, {trial.phase}"

    def sparse_line(self, event: SearchEvent) -> str:
        """A line for a log or a pipe; for events of a running trial empty, except once a minute."""
        if isinstance(event, TrialRuns):
            trial = self._running.get(event.cell)
            if trial is None or self._clock() - trial.said_at < _SPARSE_S:
                return ""
            trial.said_at = self._clock()
        return self.line(event)

    def line(self, event: SearchEvent) -> str:
        """One line about an event, for a log or a pipe."""
        cell = event.answer.cell if isinstance(event, CellAnswered) else event.cell
        name, trial = cell.label_on(self._question.device), self._running.get(cell)
        match event:
            case TrialStarted():
                expected_s = None if trial is None else trial.expected_s
                takes = "" if expected_s is None else f"about {format_seconds(expected_s)}"
                told = ", ".join(filter(None, (takes, self._left())))
                left = f" ({told})" if told else ""
                return (
                    f"{name}: trying {format_tokens(event.spec.length_tokens)} "
                    f"tokens{_again(event)}{left}"
                )
            case TrialRuns():
                return f"{name}: {'' if trial is None else self._running_line(trial)}"
            case TrialFinished():
                recorded = "recorded: " if event.is_recorded else ""
                log = self._log_of(event.result)
                return f"{name}: {recorded}{_ended(event.spec, event.result)}{log}"
            case CellAnswered():
                return f"{name}: {self._answered(event.answer, 'capacity ', ' tokens')}"

    def table(self) -> TextTable:
        """A table of the current state of every cell."""
        return table_of(
            f"{plain(self._question.model.name)}, {provenance(self._question)}",
            self._question.cells,
            ("settings", lambda cell: short_settings(cell.settings)),
            (RANK_WORDS[self._question.device][1], "layout.gpus"),
            ("Ulysses", "layout.sharing"),
            ("now", lambda cell: self._states[cell]),
            ("longest that fit", lambda cell: format_tokens(self._fits.get(cell))),
            ("trials", lambda cell: str(self._trials[cell])),
            footnotes=filter(None, (*self.running, self._left())),
        )

    def _log_of(self, result: TrialResult) -> str:
        """Text naming the log with the whole error of the first trial that ran out of memory."""
        if self._has_named_log or not result.outcome.is_memory or result.log_path is None:
            return ""
        self._has_named_log = True
        return f"; the whole message is in {plain(result.log_path)}, others beside it"

    def _answered(self, answer: CellAnswer, before: str = "", unit: str = "") -> str:
        """A cell's capacity and memory-only length as text; ``≥`` if no longer one failed."""
        if not answer.reach_tokens:
            return "no answer" if answer.reach_tokens is None else "nothing fits"
        trained, memory_only = proven_lengths(self._question, answer)
        said = [f"{before}{trained}{unit}"] if answer.capacity_tokens else []
        return ", ".join(said if answer.memory_only is None else [*said, memory_only])

    def _left(self) -> str:
        left_s = self.left_s
        return "" if left_s is None else f"about {format_seconds(max(10, round(left_s, -1)))} left"


_WORDS = {
    Outcome.FIT: "fit",
    Outcome.MEMORY_ONLY_FIT: "fit, memory-only",
    Outcome.OUT_OF_MEMORY: "ran out of memory",
    Outcome.HOST_OUT_OF_MEMORY: "ran out of host memory",
    Outcome.TIMEOUT: "timed out",
    Outcome.CRASHED: "crashed",
}
"""Outcomes in a sentence."""


def _again(event: TrialStarted) -> str:
    attempt = ", memory-only" if event.spec.is_memory_only else ""
    attempt += f", attempt {event.attempt}" if event.attempt > 1 else ""
    return f"{attempt}, to confirm" if event.repeat else attempt


def _ended(spec: TrialSpec, result: TrialResult) -> str:
    """Text of an end: ``8,192 tokens ran out of memory in 12 s, 78.10 GiB at the peak: why``."""
    is_told = not spec.is_memory_only or result.outcome is Outcome.MEMORY_ONLY_FIT
    kind = "" if is_told else " (memory-only)"
    took = f" in {format_seconds(result.wall_s)}" if result.wall_s else ""
    bytes_ = result.peak_reserved_bytes
    sampled = "" if spec.foreign is None else ", sampled"
    peak = "" if bytes_ is None else f", {format_bytes(bytes_)} at the peak{sampled}"
    is_fit = result.outcome.is_fit
    reason = "" if is_fit else f": {_why(spec, result)}"
    length = format_tokens(spec.length_tokens)
    return f"{length} tokens{kind} {_WORDS[result.outcome]}{took}{peak}{reason}"


def _why(spec: TrialSpec, result: TrialResult) -> str:
    """Why a trial did not fit, in a line: the request without room, and where, or the reason."""
    if result.outcome.is_memory:
        told = request_line(result, spec.settings, spec.layout)
        if told is not None:
            return told.partition(";")[0]
        asked = TRIED.search(result.reason)
        if asked is not None:
            return f"no room for {asked[1]}"
    return shorten(plain(result.reason), _REASON_WIDTH)


_LINE_S = 10.0
"""Seconds between two lines where there is no terminal."""
_BAR_COLUMNS = 19
"""Columns for the bar, the time left and the blanks between; the description and two numbers of
steps need more."""


@contextmanager
def training_progress(
    spec: TrainingSpec, *, done_steps: int
) -> Generator[Callable[[TrainingProgress], None]]:
    """Show a training while it runs. Yields the function that takes its progress."""
    if not sys.stderr.isatty():
        yield _Lines(done_steps).hear
        return
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=None),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(compact=True),
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
        with suppress(OSError):  # the terminal may have closed
            bar.stop()


class _Lines:
    """Print a line for each new phase and evaluation, and every 10 s one for a training's steps."""

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
            step = said.evaluation_step
            when = f"after step {step}" if step else "before the first step"
            talk(f"held-out loss {said.evaluation_loss:.3f} {when}")
        is_new = said.phase not in (self._phase, "training")
        is_due = said.step > self._step and now - self._said_at >= _LINE_S
        if is_new or is_due:
            self._said_at, self._step = now, said.step
            talk(_line(said, self._done_steps))
        self._phase = said.phase


def _short(said: TrainingProgress, *, most: int) -> str:
    """The text before a progress bar, in at most ``most`` columns: as many figures as fit."""
    if said.phase != "training" or said.loss is None:
        return said.phase
    text, *others = _figures(said, said.evaluation_loss)
    for figure in others:
        if len(f"{text}, {figure}") <= most:
            text = f"{text}, {figure}"
    return text


def _figures(said: TrainingProgress, held_out: float | None = None) -> list[str]:
    """Texts for the figures of the last training step, the most important first."""
    figures = [f"loss {said.loss:.3f}"]
    figures += [] if held_out is None else [f"held-out {held_out:.3f}"]
    figures += [f"{said.tokens / said.seconds:,.0f} tokens/s"] if said.seconds else []
    return figures


def _line(said: TrainingProgress, done_steps: int) -> str:
    if said.phase != "training" or said.loss is None:
        return f"{said.phase} after step {said.step}" if said.step else said.phase
    steps = said.step - done_steps
    left = ""
    if steps > 0 and said.seconds:
        left_s = math.ceil(said.seconds / steps * (said.steps - said.step))
        left = f", about {f'{left_s} s' if left_s < 60 else format_seconds(left_s)} left"
    return f"step {said.step} of {said.steps}: {', '.join(_figures(said))}{left}"

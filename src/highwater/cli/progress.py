"""Progress of a search: what each cell has tried, and how long the rest may take. Data and text;
console.py draws it.
"""

import time
from collections.abc import Callable
from textwrap import shorten

from highwater.pages.study.capacity_figures import capacity_text, memory_only_text, provenance
from highwater.pages.text import plain
from highwater.pages.text_table import TextTable
from highwater.search.cell_search import CellAnswered, SearchEvent, TrialFinished, TrialStarted
from highwater.spec.study import RANK_WORDS, Cell, CellAnswer, Question
from highwater.spec.trial import Outcome, TrialResult, TrialSpec
from highwater.units import format_bytes, format_seconds, format_tokens

_RECENT = 4
"""Trials that the estimate of the time left is averaged over: later ones are more like those to
come."""
_TOLD_WITHIN = 2
"""Times the longest of the recent lengths that fit: of trials longer than this nobody knows how
long they take."""

_REASON_WIDTH = 100
"""Characters of a reason in a line about a trial, at most; the final table has the whole reason."""


class Progress:
    """Hears the events of a search; knows where each cell stands."""

    def __init__(self, question: Question, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._question = question
        self._clock = clock
        self._trials: dict[Cell, int] = dict.fromkeys(question.cells, 0)
        self._states: dict[Cell, str] = dict.fromkeys(question.cells, "waiting")
        self._fits: dict[Cell, int] = {}
        self._timed: list[tuple[int, float]] = []
        """Length and seconds of each trial that fit: one that ran out of memory tells nothing about
        those."""
        self._length_tokens = 0
        """Length of the trial that runs, or of the last one."""
        self._started_at: float | None = None
        self._trials_left = 0
        self._is_recorded = False
        """Whether the last trial that finished had not started: a resumed study had its result."""

    def hear(self, event: SearchEvent) -> None:
        """Take in one event."""
        match event:
            case TrialStarted():
                self._started_at = self._clock()
                self._length_tokens = event.spec.length_tokens
                self._trials_left = event.trials_left + 1
                self._states[event.cell] = (
                    f"trying {format_tokens(event.spec.length_tokens)}{_again(event)}"
                )
            case TrialFinished():
                self._is_recorded = self._started_at is None
                self._started_at = None
                self._trials_left = max(0, self._trials_left - 1)
                self._trials[event.cell] += 1
                self._length_tokens = event.spec.length_tokens
                if event.result.outcome is Outcome.FIT:
                    self._timed.append((event.spec.length_tokens, event.result.wall_s))
                    self._fits[event.cell] = max(
                        event.spec.length_tokens, self._fits.get(event.cell, 0)
                    )
                recorded = ", recorded" if self._is_recorded else ""
                self._states[event.cell] = (
                    f"{format_tokens(event.spec.length_tokens)}: "
                    f"{words(event.result.outcome)}{recorded}"
                )
            case CellAnswered():
                self._states[event.answer.cell] = f"done: {self._answered(event.answer, '')}"

    @property
    def left_s(self) -> float | None:
        """Estimated seconds left, the running trial included; None while no trial of about this
        length has told.

        From what the last trials that fit took, each scaled up to the present length: a trial's
        time is at least linear in it.
        """
        recent = [(length, wall_s) for length, wall_s in self._timed[-_RECENT:] if wall_s > 0]
        if (
            not recent
            or not self._trials_left
            or self._length_tokens > _TOLD_WITHIN * max(length for length, _ in recent)
        ):
            return None
        scaled_s = [wall_s * max(1.0, self._length_tokens / length) for length, wall_s in recent]
        running_s = self._clock() - self._started_at if self._started_at is not None else 0.0
        return max(0.0, self._trials_left * sum(scaled_s) / len(scaled_s) - running_s)

    def line(self, event: SearchEvent) -> str:
        """One line about an event, for a log or a pipe."""
        cell = event.answer.cell if isinstance(event, CellAnswered) else event.cell
        name = cell.label_on(self._question.device)
        match event:
            case TrialStarted():
                left = f" ({self._left()})" if self._left() else ""
                return (
                    f"{name}: trying {format_tokens(event.spec.length_tokens)} "
                    f"tokens{_again(event)}{left}"
                )
            case TrialFinished():
                recorded = "recorded: " if self._is_recorded else ""
                return f"{name}: {recorded}{_ended(event.spec, event.result)}"
            case CellAnswered():
                return f"{name}: capacity {self._answered(event.answer, ' tokens')}"

    def table(self) -> TextTable:
        """A table of where every cell stands now."""
        left = self._left()
        return TextTable(
            title=f"{plain(self._question.model.name)}, {provenance(self._question)}",
            columns=(
                "rung",
                RANK_WORDS[self._question.device][1],
                "SP",
                "now",
                "longest that fit",
                "trials",
            ),
            rows=tuple(
                (
                    cell.settings.label,
                    str(cell.layout.gpus),
                    cell.layout.sharing,
                    self._states[cell],
                    format_tokens(self._fits.get(cell)),
                    str(self._trials[cell]),
                )
                for cell in self._question.cells
            ),
            footnotes=(left,) if left else (),
        )

    def _answered(self, answer: CellAnswer, unit: str) -> str:
        """The capacity, and what a memory-only proof adds to it."""
        memory_only = memory_only_text(self._question, answer, none="")
        return f"{capacity_text(self._question, answer)}{unit}" + (
            f", {memory_only}" if memory_only else ""
        )

    def _left(self) -> str:
        left_s = self.left_s
        return "" if left_s is None else f"about {format_seconds(max(10, round(left_s, -1)))} left"


def words(outcome: Outcome) -> str:
    """An outcome in a sentence: ``fit``, ``ran out of memory``, ..."""
    return {
        Outcome.FIT: "fit",
        Outcome.MEMORY_ONLY_FIT: "fit, memory-only",
        Outcome.OUT_OF_MEMORY: "ran out of memory",
        Outcome.HOST_OUT_OF_MEMORY: "ran out of host memory",
        Outcome.TIMEOUT: "timed out",
        Outcome.CRASHED: "crashed",
    }[outcome]


def _again(event: TrialStarted) -> str:
    attempt = ", memory-only" if event.spec.is_memory_only else ""
    attempt += f", attempt {event.attempt}" if event.attempt > 1 else ""
    return f"{attempt}, to confirm" if event.repeat else attempt


def _ended(spec: TrialSpec, result: TrialResult) -> str:
    """``8,192 tokens ran out of memory in 12 s, 78.10 GiB at the peak: why``."""
    is_told = not spec.is_memory_only or result.outcome is Outcome.MEMORY_ONLY_FIT
    kind = "" if is_told else " (memory-only)"
    took = f" in {format_seconds(result.wall_s)}" if result.wall_s else ""
    bytes_ = result.peak_reserved_bytes
    peak = "" if bytes_ is None else f", {format_bytes(bytes_)} at the peak"
    is_fit = result.outcome.is_fit
    reason = "" if is_fit else f": {shorten(plain(result.reason), _REASON_WIDTH)}"
    length = format_tokens(spec.length_tokens)
    return f"{length} tokens{kind} {words(result.outcome)}{took}{peak}{reason}"

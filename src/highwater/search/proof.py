"""Time of full trials: whether a length can be proven by a full trial before the time limit.

Before the first trial the time is predicted from the GPU's rates, if known; then from the cell's
full trials. If rates are unknown, any length may be tried until a full trial has ended.
"""

from collections.abc import Callable

from highwater.model.held_bytes import host_state_bytes, step_flops
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell, Question
from highwater.nouns.trial import Outcome, TrialResult, TrialSpec
from highwater.speed import predicted_step
from highwater.units import format_seconds

LAUNCH_S = 20.0
"""Seconds from launch to first step: 12 to 25 in the trials of docs/results/find."""
_HOST_FILLED_BYTES_PER_S = 2e9
"""Bytes per second that a rank writes to host memory before its first step: 28 to 75 s there."""
_RAN_OUT_STEPS = 0.2
"""Steps done when memory runs out: mostly it does in the first micro-batch."""


def trial_s(question: Question, spec: TrialSpec) -> float | None:
    """Predict the seconds of a whole trial, launch and steps, if it fits. None if unknown: for a
    GPU of unknown speed, on the CPU, with the user's own data, or for another trainer.
    """
    step_s = step_time_s(question, spec)
    return None if step_s is None else _launch_s(question, spec) + spec.steps * step_s


def ran_out_s(question: Question, spec: TrialSpec) -> float | None:
    """Predict the seconds until a trial that does not fit has ended; None as for ``trial_s``."""
    step_s = step_time_s(question, spec)
    return None if step_s is None else _launch_s(question, spec) + _RAN_OUT_STEPS * step_s


def step_time_s(question: Question, spec: TrialSpec) -> float | None:
    """Predict the seconds of one step of a trial; None as for ``trial_s``."""
    if spec.device != "cuda" or spec.data is not None or spec.foreign is not None:
        return None
    predicted = predicted_step(
        question.model.shape,
        spec.settings,
        spec.layout,
        length_tokens=spec.length_tokens,
        device_name=question.device_name,
        micro_batches=spec.micro_batches,
        attention_depth=spec.attention_depth,
    )
    return None if predicted is None else predicted.time_s


def _launch_s(question: Question, spec: TrialSpec) -> float:
    on_host = host_state_bytes(question.model.shape, spec.settings, layout=spec.layout)
    return LAUNCH_S + on_host / spec.layout.gpus / _HOST_FILLED_BYTES_PER_S


FULL_SHARE = 0.9
"""Share of the time limit that a full trial may take: a forecast is a few per cent off."""
TOLD_WITHIN = 8
"""Longest length predicted from a trial, in multiples of its own: short steps are overhead."""
WORTH = 1.1
"""Another full trial is run only if it reaches this multiple of the longest trained in full."""


def full_trials(question: Question, cell: Cell, timeout_s: float | None) -> "FullTrials | None":
    """Expected times of a cell's full trials; None if nothing is known of its GPU's speed."""
    if timeout_s is None:
        return None
    found = FullTrials(question, cell, timeout_s)
    return found if question.proof == "memory" or found.foresees else None


class FullTrials:
    """How long full trials of one cell take: as predicted, corrected by those that ended."""

    def __init__(self, question: Question, cell: Cell, timeout_s: float) -> None:
        """``timeout_s``: seconds that a trial may take, from launch to exit."""
        self._question = question
        self._cell = cell
        self._timeout_s = timeout_s
        self._limit_s = timeout_s * (FULL_SHARE if question.proof == "memory" else 1.0)
        self._longest: tuple[int, TrialResult] | None = None
        self._late_tokens: int | None = None
        self._out_tokens: int | None = None

    @property
    def foresees(self) -> bool:
        """True if times are predicted even before a full trial has ended."""
        return self._predicted_step_s(self._question.grid.length(1)) is not None

    def tell(self, length_tokens: int, result: TrialResult) -> None:
        """Record how a full trial ended."""
        if result.outcome is Outcome.TIMEOUT:
            self._late_tokens = min(length_tokens, self._late_tokens or length_tokens)
        if result.outcome.is_memory:
            self._out_tokens = min(length_tokens, self._out_tokens or length_tokens)
        told = result.outcome is Outcome.FIT and result.step_time_s is not None
        if told and (self._longest is None or length_tokens > self._longest[0]):
            self._longest = length_tokens, result

    def exceeds(self, length_tokens: int) -> bool:
        """True if a full trial of this length ran out of time, or is expected to."""
        if self._late_tokens is not None and length_tokens >= self._late_tokens:
            return True
        expected_s = self.expected_s(length_tokens)
        return expected_s is not None and expected_s > self._limit_s

    def why_not(self, length_tokens: int) -> str:
        """Reason why a full trial that would exceed the time limit is not started."""
        takes_s, limit = self.expected_s(length_tokens), format_seconds(self._timeout_s)
        return f"{format_seconds(takes_s)} expected in full, and a trial may take {limit}"

    def expected_s(self, length_tokens: int) -> float | None:
        """Seconds that a full trial of this length would take; None if unknown. After a full trial,
        its steps are scaled by predicted times, or else model FLOPs; the rest is unchanged.
        """
        if self._longest is None:
            return trial_s(self._question, self._question.trial(self._cell, length_tokens))
        known_tokens, result = self._longest
        # A longer trial ended in time. But a recorded one may have had a longer limit than now.
        if length_tokens <= known_tokens and result.wall_s <= self._timeout_s:
            return 0.0
        steps_s = self._question.steps * (result.step_time_s or 0.0)
        growth = self._weight(length_tokens) / self._weight(known_tokens)
        return max(0.0, result.wall_s - steps_s) + steps_s * growth

    def next_index(self, fits: int, length: Callable[[int], int]) -> int | None:
        """Return the longest index up to ``fits`` whose full trial should end in time, below any
        that ran out of memory; None if that trial would prove too little.
        """
        if self._longest is None and not self.foresees:
            return None
        known_tokens = 0 if self._longest is None else self._longest[0]
        low = self.longest(0, fits, length)
        if not low or length(low) <= known_tokens:
            return None
        return low if low == fits or length(low) >= WORTH * known_tokens else None

    def longest(self, low: int, high: int, length: Callable[[int], int]) -> int:
        """Longest index up to ``high`` whose full trial should end in time, else ``low``."""
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._is_open(length(middle)) else (low, middle - 1)
        return low

    def _is_open(self, length_tokens: int) -> bool:
        known_tokens = 0 if self._longest is None else self._longest[0]
        is_below = self._out_tokens is None or length_tokens < self._out_tokens
        is_told = self.foresees or length_tokens <= TOLD_WITHIN * known_tokens
        return is_below and is_told and not self.exceeds(length_tokens)

    def _weight(self, length_tokens: int) -> float:
        """Return the relative duration of a step; only ratios within a cell count."""
        predicted_s = self._predicted_step_s(length_tokens)
        if predicted_s is not None:
            return predicted_s
        shape = self._question.model.shape
        return step_flops(shape, length_tokens=length_tokens, sequences=1, settings=Settings())

    def _predicted_step_s(self, length_tokens: int) -> float | None:
        return step_time_s(self._question, self._question.trial(self._cell, length_tokens))

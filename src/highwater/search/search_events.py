"""Events of a search, for whoever shows and records them: trials that start, run and end, and cells
that are answered.
"""

from dataclasses import dataclass

from highwater.nouns.study import Cell, CellAnswer
from highwater.nouns.trial import TrialResult, TrialSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStarted:
    """A trial is about to be launched."""

    cell: Cell
    spec: TrialSpec
    attempt: int
    repeat: int
    trials_left: int
    """About how many more trials the whole question takes after this one and those that run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFinished:
    """A trial has ended."""

    cell: Cell
    spec: TrialSpec
    attempt: int
    repeat: int
    result: TrialResult
    is_recorded: bool = False
    """Whether a study had its result, and nothing was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellAnswered:
    """A cell is finished."""

    answer: CellAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRuns:
    """A trial is running; told about twice a second."""

    cell: Cell
    spec: TrialSpec
    phase: str
    """What its first rank is doing: ``step 1 of 2``."""


SearchEvent = TrialStarted | TrialRuns | TrialFinished | CellAnswered

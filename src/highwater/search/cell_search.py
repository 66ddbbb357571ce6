"""Search of one cell: decide which trial comes next, and how often it is launched.

The order of trials depends only on the question and on the results: same results, same search.

With the proof ``memory``, a length whose full trial timed out, or is expected to, gets a
memory-only trial instead; once the edge is known, full trials go up to the longest length that ends
in time. If a trial's time cannot be predicted, a cell begins with a full trial of the shortest
length. With the proof ``full``, lengths that would time out are left out: the cell begins with the
longest length that is expected to end in time, and the answer names time as its limit.

All recorded results of a study are used before any new trial runs, except that first full trial,
in whatever order they were found (docs/decisions/026).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from highwater.nouns.corpus import least_packed, pieces
from highwater.nouns.study import Cell, CellAnswer, Past, Question
from highwater.nouns.trial import Outcome, TrialResult, TrialSpec
from highwater.search.bracket import Bracket
from highwater.search.cell_outcomes import MAX_ATTEMPTS, CellOutcomes, WantedTrial, recorded_trials
from highwater.search.proof import full_trials, ran_out_s

_MOST_FULL_TRIALS = 4
"""Full trials at most after the edge is known; each corrects the expected time of the next."""
_NEAR = 4
"""Grid steps by which a trial may be moved to a length that takes far less time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTrial:
    """A trial that a search is about to launch, with the number of the attempt."""

    cell: Cell
    spec: TrialSpec
    attempt: int
    repeat: int
    after_edge: bool
    """True if the cell already has its answer without this trial."""


MayStart = Callable[[NextTrial], bool]
"""True if a trial may start: it has a recorded result, or there is time for it."""


class CellSearch:
    """Search of one cell's longest length: ``ask`` says what to try, ``tell`` takes the result."""

    def __init__(
        self,
        question: Question,
        cell: Cell,
        first: int | None,
        known: Past,
        may_start: MayStart,
        timeout_s: float | None = None,
        *,
        begins_shortest: bool = False,
    ) -> None:
        """``first``: grid index to begin with, None for the shortest length. ``known``: recorded
        trials of the cell. ``timeout_s``: seconds that a full trial may take, None for no limit.
        ``begins_shortest``: try the shortest length before ``first``.
        """
        self.cell = cell
        self._question = question
        size = question.size_of(cell)
        self._bracket = Bracket(
            *(size, first, question.method),
            least_packed=least_packed(question, cell, size),
            tiled_from=question.tiled_from(cell),
        )
        self._outcomes = CellOutcomes(question, cell, self._bracket)
        self._recorded = recorded_trials(question, known)
        """Recorded trials that have not been used yet, in their order."""
        self._may_start = may_start
        self.has_no_time = False
        """True if the search ended because a trial at the edge was not allowed to start."""
        self._by_memory = question.proof == "memory"
        self._first = first
        self._limit_s = timeout_s if question.timeout_s is None else question.timeout_s
        self._full_trials = full_trials(question, cell, self._limit_s)
        nobody_knows = self._full_trials is not None and not self._full_trials.foresees
        self._begins_in_full = begins_shortest or nobody_knows
        """True if the next trial is a full one of the shortest length."""
        self._asked: WantedTrial | None = None
        """The trial that was asked for last and has not ended yet."""
        self._attempt = 1

    def ask(self) -> NextTrial | None:
        """Return the next launch, the same until ``tell``; None if answered or out of time."""
        if self._asked is None:
            asked = self._next_of_all()
            if asked is None:
                return None
            self._asked, self._attempt = asked, 1
        return self._as_launched(self._asked, attempt=self._attempt)

    def tell(self, result: TrialResult) -> None:
        """Record the result of the launch; a trial that proves nothing about memory is repeated."""
        asked = self._asked
        assert asked is not None, "nobody asked"  # noqa: S101
        self._outcomes.launches += 1
        # A trial that ran out of time would only take the whole limit once more.
        is_late = result.outcome is Outcome.TIMEOUT
        is_last = result.outcome.tells or self._attempt == MAX_ATTEMPTS or is_late
        if not is_last and self._may_start(self._as_launched(asked, attempt=self._attempt + 1)):
            self._attempt += 1
            return
        if not asked.memory_only and self._full_trials is not None:
            self._full_trials.tell(self._question.grid.length(asked.index), result)
        self._outcomes.take_in(asked, result)
        self._asked = None

    def give_up(self) -> None:
        """End this search: there is not enough time for its trial."""
        self._asked = None
        self.has_no_time = True

    @property
    def trials_left(self) -> int:
        """About how many more trials the cell takes; a lower bound."""
        return self._bracket.trials_left or len(self._confirmations_left())

    def _next_of_all(self) -> WantedTrial | None:
        if self.has_no_time:
            return None
        if self._outcomes.crashed is not None:
            # If the first full trial only crashed, the recorded trials still count.
            return self._recorded.pop(0) if self._recorded else None
        asked = self._next()
        if asked is None or asked.after_edge:
            return asked
        if not self._may_start(self._as_launched(asked, attempt=1)):
            self.has_no_time = True
            return None
        return asked

    def answer(self) -> CellAnswer:
        """The cell's answer as far as trials prove it."""
        return self._outcomes.answer()

    def _next(self) -> WantedTrial | None:
        """Return the next trial; None once the cell is answered. Every recorded trial is used
        before a new one starts (except the first full one) and before the cell is answered.
        """
        asked = self._wanted()
        recorded = None if asked is None else self._as_recorded(asked)
        if self._begins_in_full:
            self._begins_in_full = False
        elif recorded is None and self._recorded:
            asked = recorded = self._recorded[0]
        if recorded is None:
            return asked
        self._recorded.remove(recorded)
        return replace(recorded, after_edge=asked is not None and asked.after_edge)

    def _as_recorded(self, asked: WantedTrial) -> WantedTrial | None:
        """Return the recorded equal of a trial, or None; before the edge it may be memory-only."""
        in_full = self._begins_in_full or asked.after_edge
        place = (asked.index, asked.repeat)
        same = (each for each in self._recorded if (each.index, each.repeat) == place)
        return next((each for each in same if not (in_full and each.memory_only)), None)

    def _wanted(self) -> WantedTrial | None:
        """Return the trial that the bracket asks for, else a confirmation, else a full trial."""
        if self._begins_in_full and self._question.method == "bisect":
            return WantedTrial(1)
        index = self._bracket.ask() if self._by_memory else self._next_in_time()
        if index is not None:
            if self._takes_memory_only(index):
                index = self._near_in_pieces(index)
            return WantedTrial(index, memory_only=self._takes_memory_only(index))
        for index, repeat in self._confirmations_left():
            memory_only = index in self._outcomes.memory_only or self._takes_memory_only(index)
            return WantedTrial(index, repeat, memory_only=memory_only)
        return self._next_in_full() if self._by_memory else None

    def _next_in_time(self) -> int | None:
        """Return the bracket's index, or the longest below it whose full trial should end in time.
        If there is none, the lowest index above the fits is left out; but the first trial of a cell
        always runs, at index 1 if need be, so that no answer rests on a forecast alone.
        """
        index, full, length = self._bracket.ask(), self._full_trials, self._question.grid.length
        while index is not None and full is not None and not self._ends_in_time(index):
            fits = self._bracket.fits
            longest = full.longest(fits, index - 1, length)
            if longest > fits or not self._outcomes.launches:
                return max(longest, 1)
            for left in {fits + 1, index}:
                self._outcomes.leave_out(left, full.why_not(length(left)))
            index = self._bracket.ask()
        return index

    def _ends_in_time(self, index: int) -> bool:
        """True if a full trial would end in time: all its steps, or memory running out."""
        if not self._is_too_long(index):
            return True
        spec = self._spec_of(WantedTrial(index))
        fails_s = ran_out_s(self._question, spec) if self._first and index > self._first else None
        return fails_s is not None and self._limit_s is not None and fails_s <= self._limit_s

    def _next_in_full(self) -> WantedTrial | None:
        """Return a full trial of a length proven memory-only, if it should end in time."""
        outcomes = self._outcomes
        if self._full_trials is None or outcomes.untold or outcomes.after_edge == _MOST_FULL_TRIALS:
            return None
        index = self._full_trials.next_index(self._bracket.fits, self._question.grid.length)
        if index is None:
            return None
        asked = WantedTrial(index, after_edge=True)
        return asked if self._may_start(self._as_launched(asked, attempt=1)) else None

    def _is_too_long(self, index: int) -> bool:
        """True if, by the full trials so far, a full trial of this length would time out."""
        full_trials, length_tokens = self._full_trials, self._question.grid.length(index)
        return full_trials is not None and full_trials.exceeds(length_tokens)

    def _takes_memory_only(self, index: int) -> bool:
        """True if a memory-only trial replaces a full one that would time out."""
        return self._by_memory and self._is_too_long(index)

    def _near_in_pieces(self, index: int) -> int:
        """Return ``index``, or a near one whose tokens divide into equal pieces: it is faster."""
        between = range(self._bracket.fits + 1, self._bracket.end)
        near = sorted(
            (each for each in between if abs(each - index) <= _NEAR),
            key=lambda each: abs(each - index),
        )
        for each in near:
            spec = self._spec_of(WantedTrial(each))
            if pieces(spec.length_tokens * spec.sequences, spec.device) is not None:
                return each
        return index

    def _confirmations_left(self) -> list[tuple[int, int]]:
        """Index and repeat of the trials that confirm the answer: at the edge, then above it."""
        fits, times = self._bracket.fits, self._question.confirm
        edge = [fits] if fits else []
        above = range(0)
        if self._bracket.is_proven:
            edge.append(fits + 1)
            above = range(fits + 2, min(fits + 1 + times, self._question.size_of(self.cell)) + 1)
        wanted = [(index, repeat) for repeat in range(1, times + 1) for index in edge]
        wanted += [(index, 0) for index in above]
        tried = {(index, repeat) for index, repeat, _ in self._outcomes.results}
        return [asked for asked in wanted if asked not in tried]

    def _spec_of(self, asked: WantedTrial) -> TrialSpec:
        length_tokens = self._question.grid.length(asked.index)
        return self._question.trial(self.cell, length_tokens, memory_only=asked.memory_only)

    def _as_launched(self, asked: WantedTrial, *, attempt: int) -> NextTrial:
        return NextTrial(
            cell=self.cell,
            spec=self._spec_of(asked),
            attempt=attempt,
            repeat=asked.repeat,
            after_edge=asked.after_edge,
        )

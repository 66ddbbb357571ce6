"""The search of one cell, asked and told: which trial comes next, and how often it is launched.

The order of trials depends only on the question and on the results: same results, same search.

With the proof ``memory`` a length whose full trial is expected to be late, or was, gets a
memory-only trial; when the edge is known, full trials go up to the longest length that they can
reach in time. Where nobody can predict the time of a trial, a cell begins with a full trial of the
shortest length. With the proof ``full`` a late length is left out: the cell begins with the longest
that is expected to end in time, and its answer says that time ended it.

What a study has recorded is taken before anything new is run but that first full trial, in whatever
order it was found (docs/decisions/026).
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
"""Full trials after the edge is known: each reaches further by the time of the one before."""
_NEAR = 4
"""Steps by which a trial may be moved to a length that takes far less time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTrial:
    """A trial that a search is about to start."""

    cell: Cell
    spec: TrialSpec
    attempt: int
    repeat: int
    after_edge: bool
    """Whether the cell is answered without it."""


MayStart = Callable[[NextTrial], bool]
"""Whether a trial may start: there is time for it, or it is recorded and takes none."""


class CellSearch:
    """The search of one cell: ``ask`` for its next trial, ``tell`` how it ended."""

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
        """``first`` is the index of the length to begin with, None for the shortest; ``known``
        what is recorded of the cell; ``timeout_s`` how long a full trial may take, None: no matter.
        ``begins_shortest``: the shortest comes before ``first``.
        """
        self.cell = cell
        self._question = question
        size = question.size_of(cell)
        packed = least_packed(question, cell, size)
        self._bracket = Bracket(size, first, question.method, least_packed=packed)
        self._outcomes = CellOutcomes(question, cell, self._bracket)
        self._recorded = recorded_trials(question, known)
        """Recorded trials that were not asked for yet, in their order."""
        self._may_start = may_start
        self.has_no_time = False
        """Whether the search ended because a trial at the edge was not to start."""
        self._by_memory = question.proof == "memory"
        self._first = first
        self._limit_s = timeout_s if question.timeout_s is None else question.timeout_s
        self._full_trials = full_trials(question, cell, self._limit_s)
        nobody_knows = self._full_trials is not None and not self._full_trials.foresees
        self._begins_in_full = begins_shortest or nobody_knows
        """Whether a full trial of the shortest length comes next."""
        self._asked: WantedTrial | None = None
        """The trial that was asked for last, and did not end yet."""
        self._attempt = 1

    def ask(self) -> NextTrial | None:
        """The next launch, the same until ``tell``; None when answered, or out of time."""
        if self._asked is None:
            asked = self._next_of_all()
            if asked is None:
                return None
            self._asked, self._attempt = asked, 1
        return self._as_launched(self._asked, attempt=self._attempt)

    def tell(self, result: TrialResult) -> None:
        """Take in the end of that launch; what says nothing about memory is launched again."""
        asked = self._asked
        assert asked is not None, "nobody asked"  # noqa: S101
        self._outcomes.launches += 1
        # One that ran out of time would take the whole limit once more.
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
        """End the search: the time for its trial was too short."""
        self._asked = None
        self.has_no_time = True

    @property
    def trials_left(self) -> int:
        """About how many trials the cell takes from now on, at the least."""
        return self._bracket.trials_left or len(self._confirmations_left())

    def _next_of_all(self) -> WantedTrial | None:
        if self.has_no_time:
            return None
        if self._outcomes.crashed is not None:
            # A first full trial that only crashed undoes nothing that is recorded.
            return self._recorded.pop(0) if self._recorded else None
        asked = self._next()
        if asked is None or asked.after_edge:
            return asked
        if not self._may_start(self._as_launched(asked, attempt=1)):
            self.has_no_time = True
            return None
        return asked

    def answer(self) -> CellAnswer:
        """The answer that the trials so far prove."""
        return self._outcomes.answer()

    def _next(self) -> WantedTrial | None:
        """The next trial; None when the cell is answered. Before a new one that is not the first in
        full, and before the end, all that is recorded is taken in.
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
        """The same trial as recorded; None without. Before the edge memory-only ones count."""
        in_full = self._begins_in_full or asked.after_edge
        place = (asked.index, asked.repeat)
        same = (each for each in self._recorded if (each.index, each.repeat) == place)
        return next((each for each in same if not (in_full and each.memory_only)), None)

    def _wanted(self) -> WantedTrial | None:
        """The trial that the bracket asks for, one that confirms its answer, or a full one."""
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
        """The index that the bracket asks for, or the longest below it whose full trial is expected
        to end in time. Where there is none the next above all that fit is left out; but the
        shortest is tried whatever is expected, so that no answer is a forecast alone.
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
        """Whether a full trial would end in time, by its steps or by running out of memory."""
        if not self._is_too_long(index):
            return True
        spec = self._spec_of(WantedTrial(index))
        fails_s = ran_out_s(self._question, spec) if self._first and index > self._first else None
        return fails_s is not None and self._limit_s is not None and fails_s <= self._limit_s

    def _next_in_full(self) -> WantedTrial | None:
        """A full trial of what memory-only trials proved, if it may be expected to end in time."""
        outcomes = self._outcomes
        if self._full_trials is None or outcomes.untold or outcomes.after_edge == _MOST_FULL_TRIALS:
            return None
        index = self._full_trials.next_index(self._bracket.fits, self._question.grid.length)
        if index is None:
            return None
        asked = WantedTrial(index, after_edge=True)
        return asked if self._may_start(self._as_launched(asked, attempt=1)) else None

    def _is_too_long(self, index: int) -> bool:
        """Whether full trials so far say that one of this length would not end in time."""
        full_trials, length_tokens = self._full_trials, self._question.grid.length(index)
        return full_trials is not None and full_trials.exceeds(length_tokens)

    def _takes_memory_only(self, index: int) -> bool:
        """Whether a memory-only trial takes the place of a full one that would be late."""
        return self._by_memory and self._is_too_long(index)

    def _near_in_pieces(self, index: int) -> int:
        """The index, or one beside it whose tokens can be cut into equal pieces: it is faster."""
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
        """Both sides of the edge again, then the lengths above it, as index and repeat."""
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

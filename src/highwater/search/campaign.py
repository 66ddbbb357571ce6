"""Campaign: answers a question cell by cell, by trials. It asks the bracket, runs the trial, tells the bracket.

An event is yielded before and after every trial and after every cell, so that whoever listens can show and record them.
The order of trials depends only on the question and on the results: the same results, the same campaign.

With the proof ``memory`` a cell begins with a full trial of the first length, by whose time the others are judged. A length
whose full trial would exceed the time limit, or did, gets a memory-only trial. When the edge is known, full trials go up to
the longest length that they can be expected to reach in time.

What a study has recorded of a cell is taken before anything new is run but that first full trial, also where it was found in
another order: under another time limit, or after the answer of an earlier cell that has changed since.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial

from highwater.search.bracket import Bracket
from highwater.search.guess import Guess, engine_guess
from highwater.search.ordering import carried_start, first_index
from highwater.search.proof import FullTrials
from highwater.spec.packing import least_packed, packed_tokens
from highwater.spec.protocols import Runner
from highwater.spec.study import Cell, CellAnswer, Limit, MemoryOnlyFit, Past, Question
from highwater.spec.trial import Outcome, TrialResult, TrialSpec
from highwater.units import format_bytes, format_tokens

MAX_ATTEMPTS = 3
"""Launches of a trial that ends without telling anything about memory."""
MAX_TIMEOUTS = 2
"""Of these, launches that may run out of time: each costs the whole limit."""
_MOST_FULL_TRIALS = 4
"""Full trials after the edge is known: each reaches further by the time of the one before."""
_TRIALS_OF_A_CELL = 4
"""Guess for a cell while none is finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStarted:
    """A trial is about to be launched."""

    cell: Cell
    spec: TrialSpec
    attempt: int
    repeat: int
    trials_left: int
    """About how many more trials the whole campaign takes after this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFinished:
    """A trial has ended."""

    cell: Cell
    spec: TrialSpec
    attempt: int
    repeat: int
    result: TrialResult


@dataclass(frozen=True, slots=True, kw_only=True)
class CellAnswered:
    """A cell is finished."""

    answer: CellAnswer


Event = TrialStarted | TrialFinished | CellAnswered


def campaign(
    question: Question,
    runner: Runner,
    *,
    guess: Guess = engine_guess,
    expected: Callable[[Cell], int | None] = lambda _: None,
    past: Callable[[Cell], Past] = lambda _: Past(),
) -> Iterator[Event]:
    """Answer every cell of ``question`` in its order; ends with the answer of the last one.

    ``guess`` is about the trainer that ``runner`` starts; ``expected`` the longest length in tokens that a cell is predicted to
    train with, 0 for none, None where nobody knows. Both order the trials and decide nothing. ``past`` is what is recorded of a
    cell, whose trials ``runner`` answers without running them.

    MachineError, KeyboardInterrupt and whatever else ``runner`` raises pass through.
    """
    finished: list[CellAnswer] = []
    for cell in question.cells:
        known = past(cell)
        if known.answer is not None:
            yield from _recorded_ends(cell, known)
            finished.append(known.answer)
        else:
            first = _first_index(question, cell, finished, guess, expected(cell))
            search = _CellSearch(question, cell, runner, finished, first, known)
            yield from search.run()
            finished.append(search.answer())
        yield CellAnswered(answer=finished[-1])


def _recorded_ends(cell: Cell, known: Past) -> Iterator[TrialFinished]:
    """The trials of a cell that is not searched again, for whoever listens."""
    for trial in known.trials:
        if trial.result is not None:
            yield TrialFinished(cell=cell, spec=trial.spec, attempt=trial.attempt, repeat=trial.repeat, result=trial.result)


def _first_index(
    question: Question, cell: Cell, finished: list[CellAnswer], guess: Guess, expected_tokens: int | None
) -> int | None:
    """Where the search of a cell begins; None for the shortest length."""
    if question.method == "linear":
        return carried_start(question, cell, finished)
    if expected_tokens is not None:
        return question.grid.index_at_most(expected_tokens)
    return first_index(question, cell, finished, guess)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A trial to run: where, for which time, and how."""

    index: int
    repeat: int = 0
    memory_only: bool = False
    after_edge: bool = False
    """The edge is known: this full trial only says how much of it is trained."""


def _recorded_trials(question: Question, known: Past) -> list[_Asked]:
    """Those that told, and where time counts those that ran out of no less than there is, as often as is allowed.

    Each stands here once, however often it was launched, and none of them needs another launch.
    """
    ends: dict[_Asked, dict[int, Outcome]] = {}
    for trial in known.trials:
        if trial.result is not None:
            index = question.grid.index_at_most(trial.spec.length_tokens)
            asked = _Asked(index, trial.repeat, memory_only=trial.spec.is_memory_only)
            ends.setdefault(asked, {})[trial.attempt] = trial.result.outcome

    def is_late(asked: _Asked) -> bool:
        found = [ends[asked].get(attempt) for attempt in range(1, MAX_ATTEMPTS + 1)]
        launched = found.index(None) if None in found else MAX_ATTEMPTS
        late = found[:launched].count(Outcome.TIMEOUT)
        has_ended = launched == MAX_ATTEMPTS or late >= _allowed_timeouts(question, asked)
        return question.timeout_s is not None and has_ended and found[launched - 1] is Outcome.TIMEOUT

    return [asked for asked, found in ends.items() if any(outcome.tells for outcome in found.values()) or is_late(asked)]


def _allowed_timeouts(question: Question, asked: _Asked) -> int:
    """Launches of a trial that may run out of time: one where a memory-only trial takes its place."""
    return 1 if question.proof == "memory" and not asked.memory_only else MAX_TIMEOUTS


class _CellSearch:
    """The search of one cell: its bracket, and what each trial said."""

    def __init__(
        self, question: Question, cell: Cell, runner: Runner, finished: list[CellAnswer], first: int | None, known: Past
    ) -> None:
        self._question = question
        self._cell = cell
        self._runner = runner
        self._finished = finished
        size = question.size_of(cell)
        self._bracket = Bracket(size, first, question.method, least_packed=least_packed(question, cell, size))
        self._recorded = _recorded_trials(question, known)
        """What is recorded and was not asked for yet, in its order."""
        self._results: dict[tuple[int, int, bool], TrialResult] = {}
        """By index, repeat, and whether it is memory-only: the last attempt of each."""
        self._trained: dict[int, TrialResult] = {}
        """By index: the first full trial that counts as a fit."""
        self._full_trials = FullTrials(question) if question.proof == "memory" else None
        self._begins_in_full = self._full_trials is not None
        self._memory_only: set[int] = set()
        """Indices whose results are of memory-only trials."""
        self._after_edge = 0
        self._untold: str | None = None
        """Why full trials after the edge ended before time did."""
        self._launches = 0
        self._crashed: int | None = None
        """The index whose trials crashed, each of them."""

    def run(self) -> Iterator[Event]:
        """Run trials until the cell has an answer, or a trial that only crashes."""
        while self._crashed is None and (asked := self._next()) is not None:
            result = yield from self._try(asked)
            if not asked.memory_only and self._full_trials is not None:
                self._full_trials.tell(self._question.grid.length(asked.index), result)
            self._take_in(asked, result)
        for asked in self._recorded:  # a first full trial that only crashed undoes nothing that is recorded
            self._take_in(asked, (yield from self._try(asked)))

    def _take_in(self, asked: _Asked, result: TrialResult) -> None:
        """What a trial says, for the bracket and for the answer."""
        index, fits = asked.index, self._question.counts_as_fit(result)
        if result.outcome is Outcome.FIT and fits:
            self._trained.setdefault(index, result)
        if asked.after_edge:
            self._after_edge += 1
            if not fits:
                self._untold = f"{self._tokens(index)} in full: {result.reason}"
                if result.outcome.tells:
                    self._bracket.tell(index, fits)  # against the memory-only fit: a contradiction, which is said
            return
        if result.outcome is Outcome.TIMEOUT and not asked.memory_only and self._full_trials is not None:
            return  # a memory-only trial of the same length comes next
        self._results[index, asked.repeat, asked.memory_only] = result
        if asked.memory_only:
            self._memory_only.add(index)
        if result.outcome is Outcome.CRASHED:
            self._crashed = index
        elif result.outcome is Outcome.TIMEOUT:
            self._bracket.tell_undecided(index)
        else:
            self._bracket.tell(index, fits)

    def answer(self) -> CellAnswer:
        """What the trials so far prove."""
        bracket, grid = self._bracket, self._question.grid
        limit, reason = self._limit()
        contradictions = self._contradictions()
        longest = max(self._trained, default=0)
        fit = self._trained.get(longest)
        capacity_tokens = 0 if bracket.is_proven and not bracket.fits else None
        return CellAnswer(
            cell=self._cell,
            capacity_tokens=grid.length(longest) if fit else capacity_tokens,
            does_not_fit_tokens=grid.length(bracket.fits + 1) if limit in ("memory", "host_memory") else None,
            limit=limit,
            reason=reason + self._unconfirmed() + (f"; {self._untold}" if self._untold else ""),
            trials=self._launches,
            monotone=not contradictions,
            contradictions=contradictions,
            peak_reserved_bytes=fit.peak_reserved_bytes if fit else None,
            headroom_bytes=fit.headroom_bytes if fit else None,
            tokens_per_s=fit.tokens_per_s if fit else None,
            mfu=fit.mfu if fit else None,
            memory_only=self._memory_only_fit() if bracket.fits > longest else None,
        )

    def _memory_only_fit(self) -> MemoryOnlyFit:
        """The longest fit, which is of a memory-only trial."""
        index = self._bracket.fits
        fit = next(result for result in self._results_at(index) if self._question.counts_as_fit(result))
        return MemoryOnlyFit(
            length_tokens=self._question.grid.length(index),
            peak_reserved_bytes=fit.peak_reserved_bytes,
            headroom_bytes=fit.headroom_bytes,
        )

    def _next(self) -> _Asked | None:
        """The next trial. Before a new one that is not the first in full, and before the end, all that is recorded is taken in."""
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

    def _as_recorded(self, asked: _Asked) -> _Asked | None:
        """The same trial as it was recorded: in full, or else memory-only where the edge is still to be found."""
        in_full = self._begins_in_full or asked.after_edge
        same = (each for each in self._recorded if (each.index, each.repeat) == (asked.index, asked.repeat))
        return next((each for each in same if not (in_full and each.memory_only)), None)

    def _wanted(self) -> _Asked | None:
        """What the bracket asks for, then what confirms its answer, then what is trained of it."""
        if self._begins_in_full and self._question.method == "bisect":
            return _Asked(1)
        index = self._bracket.ask()
        if index is not None:
            return _Asked(index, memory_only=self._is_too_long(index))
        for index, repeat in self._confirmations_left():
            return _Asked(index, repeat, memory_only=index in self._memory_only or self._is_too_long(index))
        return self._next_in_full()

    def _next_in_full(self) -> _Asked | None:
        """A full trial of what memory-only trials have proven, as long as it may be expected to end in time."""
        if self._full_trials is None or self._untold or self._after_edge == _MOST_FULL_TRIALS:
            return None
        index = self._full_trials.next_index(self._bracket.fits, self._question.grid.length)
        return None if index is None else _Asked(index, after_edge=True)

    def _is_too_long(self, index: int) -> bool:
        """The time of full trials so far says that one of this length would not end in time."""
        return self._full_trials is not None and self._full_trials.exceeds(self._question.grid.length(index))

    def _confirmations_left(self) -> list[tuple[int, int]]:
        """Both sides of the edge again, then the lengths above it. An edge that moves is confirmed anew."""
        fits, times = self._bracket.fits, self._question.confirm
        edge = [fits] if fits else []
        above = range(0)
        if self._bracket.is_proven:
            edge.append(fits + 1)
            above = range(fits + 2, min(fits + 1 + times, self._question.size_of(self._cell)) + 1)
        wanted = [(index, repeat) for repeat in range(1, times + 1) for index in edge] + [(index, 0) for index in above]
        tried = {(index, repeat) for index, repeat, _ in self._results}
        return [asked for asked in wanted if asked not in tried]

    def _try(self, asked: _Asked) -> Generator[Event, None, TrialResult]:
        """Launch a trial until an attempt tells whether the length fits, as often as is allowed; its last result."""
        cell, repeat, length_tokens = self._cell, asked.repeat, self._question.grid.length(asked.index)
        spec = self._question.trial(cell, length_tokens, memory_only=asked.memory_only)
        timeouts, attempt = 0, 1
        while True:
            yield TrialStarted(cell=cell, spec=spec, attempt=attempt, repeat=repeat, trials_left=self._trials_left())
            self._launches += 1
            result = self._runner.run(spec, attempt=attempt, repeat=repeat)
            yield TrialFinished(cell=cell, spec=spec, attempt=attempt, repeat=repeat, result=result)
            timeouts += result.outcome is Outcome.TIMEOUT
            if result.outcome.tells or attempt == MAX_ATTEMPTS or timeouts == _allowed_timeouts(self._question, asked):
                return result
            attempt += 1

    def _trials_left(self) -> int:
        here = self._bracket.trials_left or len(self._confirmations_left())
        done = [answer.trials for answer in self._finished]
        each = sum(done) / len(done) if done else _TRIALS_OF_A_CELL + 3 * self._question.confirm
        cells = len(self._question.cells) - len(done) - 1
        return max(0, here - 1) + round(cells * each)

    def _limit(self) -> tuple[Limit, str]:
        """What ended the search above the capacity, and why, in a line."""
        fits, end = self._bracket.fits, self._bracket.end
        if self._crashed is not None:
            crash = next(r for r in self._results_at(self._crashed) if r.outcome is Outcome.CRASHED)
            tokens = self._tokens(self._crashed)
            return "inconclusive", f"{tokens}: none of {MAX_ATTEMPTS} attempts told whether it fits; the last: {crash.reason}"
        if self._bracket.is_proven:
            no = next(r for r in self._results_at(end) if r.outcome.is_memory or self._lacks_headroom(r))
            return self._why_not(no, self._named(end))
        if end > self._question.size_of(self._cell):
            bound = "was to be tried" if end > self._question.grid.size else "the token budget holds"
            return "ceiling", f"{self._named(fits)} fit, the longest length that {bound}"
        timeout = next(r for r in self._results_at(end) if r.outcome is Outcome.TIMEOUT)
        return "time", f"{self._named(end)} took too long to tell: {timeout.reason}"

    def _unconfirmed(self) -> str:
        late = sum(result.outcome is Outcome.TIMEOUT for (_, repeat, _), result in self._results.items() if repeat)
        return f"; repeats that took too long to confirm it: {late}" if late else ""

    def _why_not(self, no: TrialResult, tokens: str) -> tuple[Limit, str]:
        """The limit, and the reason, of a trial that did not count as a fit."""
        if no.outcome is Outcome.HOST_OUT_OF_MEMORY:
            return "host_memory", f"{tokens}: host memory ran out: {no.reason}"
        if no.outcome is Outcome.OUT_OF_MEMORY:
            return "memory", f"{tokens}: memory ran out: {no.reason}"
        asked = format_bytes(self._question.margin_bytes)
        if no.headroom_bytes is None:
            return "memory", f"{tokens} fit with a headroom that could not be measured; {asked} is asked for"
        return "memory", f"{tokens} fit with {format_bytes(no.headroom_bytes)} of headroom; {asked} is asked for"

    def _lacks_headroom(self, result: TrialResult) -> bool:
        return result.outcome.tells and not result.outcome.is_memory and not self._question.counts_as_fit(result)

    def _contradictions(self) -> tuple[str, ...]:
        """Each observation that is not monotone, in words; that a length packs fewer tokens of a budget explains that it fits."""
        said: list[str] = []
        for pair in self._bracket.contradictions(partial(packed_tokens, self._question, self._cell)):
            if pair.failed_index == pair.fit_index:
                said.append(f"{self._tokens(pair.fit_index)} fit in one trial and not in another")
            else:
                said.append(f"{self._tokens(pair.failed_index)} did not fit, {self._tokens(pair.fit_index)} did")
        return tuple(said)

    def _results_at(self, index: int) -> list[TrialResult]:
        return [result for (tried, _, _), result in self._results.items() if tried == index]

    def _named(self, index: int) -> str:
        return f"{self._tokens(index)}{' (memory-only)' if index in self._memory_only else ''}"

    def _tokens(self, index: int) -> str:
        return f"{format_tokens(self._question.grid.length(index))} tokens"

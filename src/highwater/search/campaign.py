"""Campaign: answers a question cell by cell, by trials. It asks the bracket, runs the trial, tells the bracket.

An event is yielded before and after every trial and after every cell, so that whoever listens can show and record them.
The order of trials depends only on the question and on the results: the same results, the same campaign.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass

from highwater.search.bracket import Bracket
from highwater.search.guess import Guess, engine_guess
from highwater.search.ordering import carried_start, first_index
from highwater.spec.protocols import Runner
from highwater.spec.study import Cell, CellAnswer, Limit, Question
from highwater.spec.trial import Outcome, TrialResult, TrialSpec
from highwater.units import format_bytes, format_tokens

MAX_ATTEMPTS = 3
"""Launches of a trial that ends without telling anything about memory."""
MAX_TIMEOUTS = 2
"""Of these, launches that may run out of time: each costs the whole limit."""
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


def campaign(question: Question, runner: Runner, *, guess: Guess = engine_guess) -> Iterator[Event]:
    """Answer every cell of ``question`` in its order; ends with the answer of the last one.

    ``guess`` is about the trainer that ``runner`` starts: it orders the trials and decides nothing.

    MachineError, KeyboardInterrupt and whatever else ``runner`` raises pass through.
    """
    finished: list[CellAnswer] = []
    for cell in question.cells:
        search = _CellSearch(question, cell, runner, finished, guess)
        yield from search.run()
        finished.append(search.answer())
        yield CellAnswered(answer=finished[-1])


class _CellSearch:
    """The search of one cell: its bracket, and what each trial said."""

    def __init__(self, question: Question, cell: Cell, runner: Runner, finished: list[CellAnswer], guess: Guess) -> None:
        linear = question.method == "linear"
        first = carried_start(question, cell, finished) if linear else first_index(question, cell, finished, guess)
        self._question = question
        self._cell = cell
        self._runner = runner
        self._finished = finished
        self._bracket = Bracket(question.size_of(cell), first, question.method)
        self._results: dict[tuple[int, int], TrialResult] = {}
        """By index and repeat: the last attempt of each."""
        self._launches = 0
        self._crashed: int | None = None
        """The index whose trials crashed, each of them."""

    def run(self) -> Iterator[Event]:
        """Run trials until the cell has an answer, or a trial that only crashes."""
        while self._crashed is None and (asked := self._next()) is not None:
            index, repeat = asked
            result = yield from self._try(index, repeat)
            self._results[asked] = result
            if result.outcome is Outcome.CRASHED:
                self._crashed = index
            elif result.outcome is Outcome.TIMEOUT:
                self._bracket.tell_undecided(index)
            else:
                self._bracket.tell(index, self._counts_as_fit(result))

    def answer(self) -> CellAnswer:
        """What the trials so far prove."""
        bracket, grid = self._bracket, self._question.grid
        limit, reason = self._limit()
        contradictions = self._contradictions()
        fit = next((result for result in self._results_at(bracket.fits) if self._counts_as_fit(result)), None)
        capacity_tokens = 0 if bracket.is_proven else None
        return CellAnswer(
            cell=self._cell,
            capacity_tokens=grid.length(bracket.fits) if fit else capacity_tokens,
            does_not_fit_tokens=grid.length(bracket.fits + 1) if limit in ("memory", "host_memory") else None,
            limit=limit,
            reason=reason + self._unconfirmed(),
            trials=self._launches,
            monotone=not contradictions,
            contradictions=contradictions,
            peak_reserved_bytes=fit.peak_reserved_bytes if fit else None,
            headroom_bytes=fit.headroom_bytes if fit else None,
            tokens_per_s=fit.tokens_per_s if fit else None,
            mfu=fit.mfu if fit else None,
        )

    def _next(self) -> tuple[int, int] | None:
        """Index and repeat of the next trial: what the bracket asks for, then what confirms its answer."""
        index = self._bracket.ask()
        if index is not None:
            return index, 0
        return next(iter(self._confirmations_left()), None)

    def _confirmations_left(self) -> list[tuple[int, int]]:
        """Both sides of the edge again, then the lengths above it. An edge that moves is confirmed anew."""
        fits, times = self._bracket.fits, self._question.confirm
        edge = [fits] if fits else []
        above = range(0)
        if self._bracket.is_proven:
            edge.append(fits + 1)
            above = range(fits + 2, min(fits + 1 + times, self._question.size_of(self._cell)) + 1)
        wanted = [(index, repeat) for repeat in range(1, times + 1) for index in edge] + [(index, 0) for index in above]
        return [asked for asked in wanted if asked not in self._results]

    def _try(self, index: int, repeat: int) -> Generator[Event, None, TrialResult]:
        """Launch a trial until an attempt tells whether the length fits, as often as is allowed; its last result."""
        cell, spec = self._cell, self._question.trial(self._cell, self._question.grid.length(index))
        timeouts, attempt = 0, 1
        while True:
            yield TrialStarted(cell=cell, spec=spec, attempt=attempt, repeat=repeat, trials_left=self._trials_left())
            self._launches += 1
            result = self._runner.run(spec, attempt=attempt, repeat=repeat)
            yield TrialFinished(cell=cell, spec=spec, attempt=attempt, repeat=repeat, result=result)
            timeouts += result.outcome is Outcome.TIMEOUT
            told = result.outcome is Outcome.FIT or result.outcome.is_memory
            if told or attempt == MAX_ATTEMPTS or timeouts == MAX_TIMEOUTS:
                return result
            attempt += 1

    def _trials_left(self) -> int:
        here = self._bracket.trials_left or len(self._confirmations_left())
        done = [answer.trials for answer in self._finished]
        each = sum(done) / len(done) if done else _TRIALS_OF_A_CELL + 3 * self._question.confirm
        cells = len(self._question.cells) - len(done) - 1
        return max(0, here - 1) + round(cells * each)

    def _counts_as_fit(self, result: TrialResult) -> bool:
        """The trial fit, and with the headroom that is asked for; headroom that nobody measured is none."""
        margin_bytes = self._question.margin_bytes
        return result.outcome is Outcome.FIT and (margin_bytes == 0 or (result.headroom_bytes or 0) >= margin_bytes)

    def _limit(self) -> tuple[Limit, str]:
        """What ended the search above the capacity, and why, in a line."""
        fits, end = self._bracket.fits, self._bracket.end
        if self._crashed is not None:
            crash = next(r for r in self._results_at(self._crashed) if r.outcome is Outcome.CRASHED)
            tokens = self._tokens(self._crashed)
            return "inconclusive", f"{tokens}: none of {MAX_ATTEMPTS} attempts told whether it fits; the last: {crash.reason}"
        if self._bracket.is_proven:
            no = next(r for r in self._results_at(end) if r.outcome.is_memory or self._lacks_headroom(r))
            return self._why_not(no, self._tokens(end))
        if end > self._question.size_of(self._cell):
            bound = "was to be tried" if end > self._question.grid.size else "the token budget holds"
            return "ceiling", f"{self._tokens(fits)} fit, the longest length that {bound}"
        timeout = next(r for r in self._results_at(end) if r.outcome is Outcome.TIMEOUT)
        return "time", f"{self._tokens(end)} took too long to tell: {timeout.reason}"

    def _unconfirmed(self) -> str:
        late = sum(result.outcome is Outcome.TIMEOUT for (_, repeat), result in self._results.items() if repeat)
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
        return result.outcome is Outcome.FIT and not self._counts_as_fit(result)

    def _contradictions(self) -> tuple[str, ...]:
        """Each observation that is not monotone, in words."""
        said: list[str] = []
        for pair in self._bracket.contradictions:
            if pair.failed_index == pair.fit_index:
                said.append(f"{self._tokens(pair.fit_index)} fit in one trial and not in another")
            else:
                said.append(f"{self._tokens(pair.failed_index)} did not fit, {self._tokens(pair.fit_index)} did")
        return tuple(said)

    def _results_at(self, index: int) -> list[TrialResult]:
        return [result for (tried, _), result in self._results.items() if tried == index]

    def _tokens(self, index: int) -> str:
        return f"{format_tokens(self._question.grid.length(index))} tokens"

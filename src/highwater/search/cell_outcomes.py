"""Outcomes of one cell: results of its trials, recorded or new, as its bracket takes them; the
answer that they prove; and the events of a search, for progress displays and journals.
"""

from dataclasses import dataclass
from functools import partial

from highwater.nouns.corpus import packed_tokens
from highwater.nouns.study import Cell, CellAnswer, Limit, MemoryOnlyFit, Past, Question
from highwater.nouns.trial import Outcome, TrialResult, TrialSpec
from highwater.search.bracket import Bracket
from highwater.units import format_bytes, format_tokens

MAX_ATTEMPTS = 3
"""Launches of a trial before giving up, while each ends without telling whether the length fits."""


@dataclass(frozen=True, slots=True)
class WantedTrial:
    """A trial that the search of a cell wants: which length, full or memory-only, a repeat."""

    index: int
    repeat: int = 0
    memory_only: bool = False
    after_edge: bool = False
    """True for a full trial after the edge is known, run to see how much of it is trained."""


def recorded_trials(question: Question, known: Past) -> list[WantedTrial]:
    """Return the recorded trials that are not launched again: those that tell whether the length
    fits or, if the question has a time limit, timed out under at least that limit; each trial once.
    """
    ends: dict[WantedTrial, dict[int, Outcome]] = {}
    for trial in known.trials:
        if trial.result is not None:
            index = question.grid.index_at_most(trial.spec.length_tokens)
            asked = WantedTrial(index, trial.repeat, memory_only=trial.spec.is_memory_only)
            ends.setdefault(asked, {})[trial.attempt] = trial.result.outcome
    return [
        asked
        for asked, found in ends.items()
        if any(outcome.tells for outcome in found.values()) or _is_late(question, found)
    ]


def _is_late(question: Question, outcomes: dict[int, Outcome]) -> bool:
    """True if a launch ran out of time, and all launches before it have a recorded end."""
    ends = [outcomes.get(attempt) for attempt in range(1, MAX_ATTEMPTS + 1)]
    launched = ends.index(None) if None in ends else MAX_ATTEMPTS
    return question.timeout_s is not None and Outcome.TIMEOUT in ends[:launched]


class CellOutcomes:
    """What the trials of one cell have shown: the bracket, and the answer so far."""

    def __init__(self, question: Question, cell: Cell, bracket: Bracket) -> None:
        self._question = question
        self._cell = cell
        self._bracket = bracket
        self.results: dict[tuple[int, int, bool], TrialResult] = {}
        """Result of the last attempt, by index, repeat, and whether the trial was memory-only."""
        self._trained: dict[int, TrialResult] = {}
        """The first full trial that counts as a fit, by index."""
        self.memory_only: set[int] = set()
        """Indices that have results of memory-only trials."""
        self.after_edge = 0
        """Number of full trials run after the edge was known."""
        self.untold: str | None = None
        """Why full trials after the edge stopped before time was up; None while they go on."""
        self.launches = 0
        self._left_out: dict[int, str] = {}
        """Reason in words for each index that was not tried for lack of time."""
        self.crashed: int | None = None
        """Index at which every attempt crashed; None if there is none."""

    def take_in(self, asked: WantedTrial, result: TrialResult) -> None:
        """Add the final result of a trial to the bracket and to the answer."""
        index, fits = asked.index, self._question.counts_as_fit(result)
        is_late = result.outcome is Outcome.TIMEOUT
        if result.outcome is Outcome.FIT and fits:
            self._trained.setdefault(index, result)
        if asked.after_edge:
            self.after_edge += 1
            if not fits:
                self.untold = f"{self._tokens(index)} in full: {result.reason}"
                # It speaks against the memory-only fit: the answer reports a contradiction.
                if result.outcome.tells:
                    self._bracket.tell(index, fits)
            return
        if is_late and not asked.memory_only and self._question.proof == "memory":
            return  # a memory-only trial of the same length comes next
        self.results[index, asked.repeat, asked.memory_only] = result
        if asked.memory_only:
            self.memory_only.add(index)
        if result.outcome is Outcome.CRASHED:
            self.crashed = index
        elif is_late:
            self._bracket.tell_undecided(index)
        else:
            self._bracket.tell(index, fits)

    def leave_out(self, index: int, why: str) -> None:
        """Record that an index is not tried for lack of time."""
        self._left_out[index] = why
        self._bracket.tell_undecided(index)

    def answer(self) -> CellAnswer:
        """The cell's answer as far as trials prove it."""
        bracket, grid = self._bracket, self._question.grid
        limit, reason = self._limit()
        has_failed = limit in ("memory", "host_memory")
        contradictions = self._contradictions()
        longest = max(self._trained, default=0)
        fit = self._trained.get(longest)
        capacity_tokens = 0 if bracket.is_proven and not bracket.fits else None
        repeats = (result for (_, repeat, _), result in self.results.items() if repeat)
        late = sum(result.outcome is Outcome.TIMEOUT for result in repeats)
        reason += f"; repeats that took too long to confirm it: {late}" if late else ""
        return CellAnswer(
            cell=self._cell,
            capacity_tokens=grid.length(longest) if fit else capacity_tokens,
            does_not_fit_tokens=grid.length(bracket.fits + 1) if has_failed else None,
            limit=limit,
            reason=f"{reason}; {self.untold}" if self.untold else reason,
            trials=self.launches,
            monotone=not contradictions,
            contradictions=contradictions,
            peak_reserved_bytes=fit.peak_reserved_bytes if fit else None,
            headroom_bytes=fit.headroom_bytes if fit else None,
            tokens_per_s=fit.tokens_per_s if fit else None,
            mfu=fit.mfu if fit else None,
            memory_only=self._memory_only_fit() if bracket.fits > longest else None,
        )

    def _memory_only_fit(self) -> MemoryOnlyFit:
        """Return the longest fit, which a memory-only trial found."""
        index = self._bracket.fits
        fit = next(r for r in self._results_at(index) if self._question.counts_as_fit(r))
        return MemoryOnlyFit(
            length_tokens=self._question.grid.length(index),
            peak_reserved_bytes=fit.peak_reserved_bytes,
            headroom_bytes=fit.headroom_bytes,
        )

    def _limit(self) -> tuple[Limit, str]:
        """Return the kind of limit on the capacity, and the reason in one line."""
        fits, end = self._bracket.fits, self._bracket.end
        if self.crashed is not None:
            crash = next(r for r in self._results_at(self.crashed) if r.outcome is Outcome.CRASHED)
            untold = f"none of {MAX_ATTEMPTS} attempts told whether it fits"
            reason = f"{self._tokens(self.crashed)}: {untold}; the last: {crash.reason}"
            return "inconclusive", reason
        if self._bracket.is_proven:
            at_end = self._results_at(end)
            counts = self._question.counts_as_fit
            no = next(r for r in at_end if r.outcome.tells and not counts(r))
            return self._why_not(no, self._named(end))
        if end > self._question.size_of(self._cell):
            on_grid = end <= self._question.grid.size
            bound = "the token budget holds" if on_grid else "was to be tried"
            return "ceiling", f"{self._named(fits)} fit, the longest length that {bound}"
        timeouts = (r.reason for r in self._results_at(end) if r.outcome is Outcome.TIMEOUT)
        if (late := next(timeouts, None)) is not None:
            return "time", f"{self._named(end)} took too long to tell: {late}"
        return "time", f"{self._named(end)} were not tried: {self._left_out[end]}"

    def _why_not(self, no: TrialResult, tokens: str) -> tuple[Limit, str]:
        """Return the limit and the reason for a trial that did not count as a fit."""
        if no.outcome is Outcome.HOST_OUT_OF_MEMORY:
            return "host_memory", f"{tokens}: host memory ran out: {no.reason}"
        if no.outcome is Outcome.OUT_OF_MEMORY:
            return "memory", f"{tokens}: memory ran out: {no.reason}"
        had = "a headroom that could not be measured"
        if no.headroom_bytes is not None:
            had = f"{format_bytes(no.headroom_bytes)} of headroom"
        asked = format_bytes(self._question.margin_bytes)
        return "memory", f"{tokens} fit with {had}; {asked} is asked for"

    def _contradictions(self) -> tuple[str, ...]:
        """Contradictory trials, in words; with a token budget a longer length may pack less."""
        packed = partial(packed_tokens, self._question, self._cell)
        pairs = self._bracket.contradictions(packed)
        told = ((self._tokens(each.failed_index), self._tokens(each.fit_index)) for each in pairs)
        return tuple(
            f"{fit} fit in one trial and not in another"
            if failed == fit
            else f"{failed} did not fit, {fit} did"
            for failed, fit in told
        )

    def _results_at(self, index: int) -> list[TrialResult]:
        return [result for (tried, _, _), result in self.results.items() if tried == index]

    def _named(self, index: int) -> str:
        return f"{self._tokens(index)}{' (memory-only)' if index in self.memory_only else ''}"

    def _tokens(self, index: int) -> str:
        return f"{format_tokens(self._question.grid.length(index))} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStarted:
    """Event: a trial is about to be launched."""

    cell: Cell
    spec: TrialSpec
    attempt: int
    repeat: int
    trials_left: int
    """About how many more trials the question takes after this one and those running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFinished:
    """Event: a trial has ended."""

    cell: Cell
    spec: TrialSpec
    attempt: int
    repeat: int
    result: TrialResult
    is_recorded: bool = False
    """True if the result was read from the study and no trial was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellAnswered:
    """Event: the search of a cell has ended with an answer."""

    answer: CellAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRuns:
    """Event, about twice a second: a trial is running."""

    cell: Cell
    spec: TrialSpec
    phase: str
    """Current work of the trial's first rank, for example ``step 1 of 2``."""


SearchEvent = TrialStarted | TrialRuns | TrialFinished | CellAnswered

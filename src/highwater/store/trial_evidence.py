"""Whether the trials of a cell bear out its answer.

A study is a file: what it says was found is believed of its trials (docs/decisions/026). Everything
that an answer says of lengths and memory follows from results, whatever order they came in: the
longest length that fit, the next, which did not, what ended the search there, and the figures of
the trial at the capacity.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import msgspec

from highwater.errors import HighwaterError
from highwater.nouns.corpus import packed_tokens
from highwater.nouns.study import CellAnswer, MemoryOnlyFit, Question, RecordedTrial
from highwater.nouns.trial import Outcome, TrialResult
from highwater.units import format_tokens


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Two outcomes that no monotone law gives. ``failed_index`` did not fit; ``fit_index``, which
    takes no less, did.
    """

    failed_index: int
    fit_index: int


def contradictions(
    fit: Collection[int],
    failed: Collection[int],
    packed: Callable[[int], int] = lambda index: index,
) -> tuple[Contradiction, ...]:
    """Every index that did not fit beside one that speaks against it; lowest first. That is the
    closest at or above it that did fit, with no fewer packed tokens.
    """
    ordered = sorted(fit)
    found: list[Contradiction] = []
    for index in sorted(failed):
        above = (ordered[place] for place in range(bisect_left(ordered, index), len(ordered)))
        closest = next((other for other in above if packed(other) >= packed(index)), None)
        if closest is not None:
            found.append(Contradiction(index, closest))
    return tuple(found)


def unsupported(
    question: Question, answer: CellAnswer, trials: Iterable[RecordedTrial]
) -> str | None:
    """Why the trials of its cell do not bear out an answer; None when they do. The trials are those
    that were there when the answer was given, as they were then.
    """
    return next(_gaps(question, answer, _shown(question, answer, trials)), None)


@dataclass(slots=True)
class _Shown:
    """What the trials of a cell show, by index of the grid."""

    trained: dict[int, list[TrialResult]] = field(default_factory=dict[int, list[TrialResult]])
    """Full trials that count as a fit."""
    held: dict[int, list[TrialResult]] = field(default_factory=dict[int, list[TrialResult]])
    """Memory-only trials that count as a fit."""
    failed: dict[int, set[Outcome]] = field(default_factory=dict[int, set[Outcome]])
    """Outcomes of trials that told, and do not count as a fit."""
    crashed: bool = False
    launches: int = 0

    @property
    def reach(self) -> int:
        """The longest index that fit, by either proof; 0: none."""
        return max((*self.trained, *self.held), default=0)


def _shown(question: Question, answer: CellAnswer, trials: Iterable[RecordedTrial]) -> _Shown:
    """Read the trials of this very question; simulated ones show nothing where trials were run."""
    shown = _Shown()
    for trial in trials:
        index, result = question.grid.index_at_most(trial.spec.length_tokens), trial.result
        if result is None or not _is_asked(question, answer, trial, index):
            continue
        if result.simulated and not question.simulated:
            continue
        shown.launches += 1
        if not result.outcome.tells:
            shown.crashed |= result.outcome is not Outcome.TIMEOUT
        elif not question.counts_as_fit(result):
            shown.failed.setdefault(index, set()).add(result.outcome)
        elif result.outcome is Outcome.FIT:
            shown.trained.setdefault(index, []).append(result)
        else:
            shown.held.setdefault(index, []).append(result)
    return shown


def _is_asked(question: Question, answer: CellAnswer, trial: RecordedTrial, index: int) -> bool:
    """Whether the question asks this of a length of its grid, wherever model and files lay."""
    if index < 1 or question.grid.length(index) != trial.spec.length_tokens:
        return False
    try:
        asked = question.trial(
            answer.cell, trial.spec.length_tokens, memory_only=trial.spec.is_memory_only
        )
    except HighwaterError:  # a question that nobody could ask
        return False
    here = msgspec.structs.replace(
        trial.spec,
        model_directory=asked.model_directory,
        checkpoint_directory=None,
        statistics=None,
    )
    return here == asked and (not trial.spec.is_memory_only or question.proof == "memory")


def _gaps(question: Question, answer: CellAnswer, shown: _Shown) -> Iterator[str]:
    """Everything that an answer says and its trials do not, in words."""
    yield from _trained_gaps(question, answer, shown)
    yield from _memory_only_gaps(question, answer, shown)
    yield from _edge_gaps(question, answer, shown)
    if answer.monotone == bool(answer.contradictions):
        yield "it says both that outcomes are monotone and that they are not"
    # by memory a full trial below the longest that fit says what is trained, no more
    fit = {shown.reach} - {0} if question.proof == "memory" else {*shown.trained}
    packed = partial(packed_tokens, question, answer.cell)
    if answer.monotone and contradictions(fit, shown.failed, packed):
        yield "a shorter length did not fit where a longer one did, and it says nothing of that"
    if not 0 < answer.trials <= shown.launches:
        yield f"it says that it took {answer.trials} trials, and {shown.launches} ended"


def _trained_gaps(question: Question, answer: CellAnswer, shown: _Shown) -> Iterator[str]:
    """Gaps between the capacity with its figures and the full trials."""
    longest = max(shown.trained, default=0)
    tokens = question.grid.length(longest) if longest else None
    figures = (answer.peak_reserved_bytes, answer.headroom_bytes, answer.tokens_per_s, answer.mfu)
    if answer.capacity_tokens:
        if answer.capacity_tokens != tokens:
            said = f"{format_tokens(answer.capacity_tokens)} tokens"
            yield f"it says that {said} fit, and {_longest(tokens)}"
        elif figures not in [
            (r.peak_reserved_bytes, r.headroom_bytes, r.tokens_per_s, r.mfu)
            for r in shown.trained[longest]
        ]:
            yield f"its figures are those of no trial of {format_tokens(tokens)} tokens"
        return
    if longest:
        yield f"it says that no length fit, and {_longest(tokens)}"
    elif any(figure is not None for figure in figures):
        yield "it has figures of a length that fit, and none did"
    is_none = 1 in shown.failed and not shown.reach
    if not longest and (answer.capacity_tokens == 0) > is_none:
        yield "it says that nothing fits, and no trial of the shortest length says so"


def _longest(tokens: int | None) -> str:
    if tokens is None:
        return "no full trial did"
    return f"the longest that did in a full trial is {format_tokens(tokens)}"


def _memory_only_gaps(question: Question, answer: CellAnswer, shown: _Shown) -> Iterator[str]:
    """Gaps between the memory-only proof and the memory-only trials."""
    proof, longest = answer.memory_only, max(shown.held, default=0)
    is_beyond = longest > max(shown.trained, default=0)
    if proof is None:
        if is_beyond:
            held = f"{format_tokens(question.grid.length(longest))} tokens"
            yield f"it leaves out that {held} fit in a memory-only trial"
        return
    tokens = question.grid.length(longest) if is_beyond else None
    proofs = [
        MemoryOnlyFit(
            length_tokens=tokens,
            peak_reserved_bytes=r.peak_reserved_bytes,
            headroom_bytes=r.headroom_bytes,
        )
        for r in shown.held.get(longest, ())
        if tokens is not None
    ]
    if proof not in proofs:
        said = f"{format_tokens(proof.length_tokens)} tokens"
        yield f"no memory-only trial shows what it says of {said}"


def _edge_gaps(question: Question, answer: CellAnswer, shown: _Shown) -> Iterator[str]:
    """Gaps between what ended the search and the trials of the length above all that fit."""
    size, end = question.size_of(answer.cell), shown.reach + 1
    beyond = question.grid.length(end)
    ends = shown.failed.get(end, set[Outcome]())
    is_edge = answer.limit in ("memory", "host_memory")
    fails = answer.does_not_fit_tokens
    if fails != (beyond if is_edge else None):
        said = "nothing" if fails is None else f"{format_tokens(fails)} tokens"
        yield f"it says that {said} did not fit, and the next length is {format_tokens(beyond)}"
    elif answer.limit == "memory" and not ends - {Outcome.HOST_OUT_OF_MEMORY}:
        yield f"no trial of {format_tokens(beyond)} tokens ran out of memory"
    elif answer.limit == "host_memory" and Outcome.HOST_OUT_OF_MEMORY not in ends:
        yield f"no trial of {format_tokens(beyond)} tokens ran out of host memory"
    elif answer.limit == "ceiling" and shown.reach != size:
        longer = size - shown.reach
        yield f"it says that the longest length fit, and there are {longer} longer ones to try"
    elif answer.limit == "time" and ends:
        yield f"it says that time ended it, and a trial of {format_tokens(beyond)} tokens told"
    elif answer.limit == "inconclusive" and not shown.crashed:
        yield "it says that trials crashed, and none did"

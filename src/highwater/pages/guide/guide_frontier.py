"""The frontier of one place of a guide: from what ``recommend`` answers, or from a table."""

from collections.abc import Mapping, Sequence

from highwater.pages.frontier import Frontier, Point, Reach, first_that_reach
from highwater.spec.capacities import Capacity, in_order
from highwater.spec.recommendation import Candidate, Recommendation
from highwater.spec.settings_words import settings_in_words
from highwater.spec.study import Cell
from highwater.spec.trainer import predicted_traits

_Key = tuple[Cell, bool]


def asked_frontier(
    found: Sequence[Recommendation], *, trained: Mapping[Cell, int], is_cut: bool
) -> Frontier:
    """The frontier of everything that was asked, one recommendation for each length.

    ``trained`` are the longest lengths that trials trained in full. ``is_cut`` says that longer
    lengths were refused: none is offered then that memory alone would hold.
    """
    first = found[0]
    longest_asked = max(each.length_tokens for each in found)
    told: dict[_Key, list[tuple[int, Candidate]]] = {}
    for each in sorted(found, key=lambda each: each.length_tokens):
        for candidate in each.candidates:
            key = candidate.cell, candidate.is_lowered
            told.setdefault(key, []).append((each.length_tokens, candidate))
    ordered = sorted(told.values(), key=lambda own: own[0][1].order)
    most = longest_asked if is_cut else None
    return Frontier(
        rows=first_that_reach(_reach(own, trained, most) for own in ordered),
        native_length_tokens=first.native_length_tokens,
        device_bytes=first.device_bytes,
        shortest_tokens=min(each.length_tokens for each in found),
        longest_asked_tokens=longest_asked,
    )


def ends(found: Recommendation) -> tuple[int, ...]:
    """Lengths at which the simplest settings change: where a page's figures are wanted, too."""
    longest, kept = 0, list[int]()
    for candidate in found.candidates:
        if candidate.capacity_tokens > longest:
            longest = candidate.capacity_tokens
            kept.append(longest)
    return tuple(kept)


def table_frontier(own: Sequence[Capacity], lengths: Sequence[int]) -> Frontier:
    """The frontier that a table of the guide has by itself: lengths alone."""
    rows: dict[Cell, list[Capacity]] = {}
    for each in in_order(tuple(own)):
        rows.setdefault(each.cell, []).append(each)
    return Frontier(
        rows=first_that_reach(_of_capacities(cell, each) for cell, each in rows.items()),
        native_length_tokens=own[0].native_length_tokens,
        device_bytes=0,
        shortest_tokens=min(lengths),
        longest_asked_tokens=max(lengths),
        scales_positions=predicted_traits(own[0].trainer) is not None,
    )


def candidate_words(candidate: Candidate, *, is_scaled: bool) -> str:
    """The settings of a candidate, as one says them."""
    return settings_in_words(
        candidate.cell.settings,
        candidate.cell.layout,
        host_bytes=candidate.host_bytes,
        is_lowered=candidate.is_lowered,
        is_scaled=is_scaled,
    )


def _reach(
    own: Sequence[tuple[int, Candidate]], trained_in_full: Mapping[Cell, int], most: int | None
) -> Reach:
    """How far one cell reaches: by what is known of its end, and by every length that was asked."""
    fitting = [(tokens, each) for tokens, each in own if each.fits]
    known = [each for _, each in own]
    sure = [each.capacity_tokens for each in known if each.risk != "tight"]
    farthest = max(known, key=lambda each: each.capacity_tokens)
    reach, source = farthest.capacity_tokens, farthest.capacity_source
    if fitting and fitting[-1][0] > reach:
        reach, source = fitting[-1][0], fitting[-1][1].source
    if most is not None:
        reach = min(reach, most)
    trained = reach
    if any(each.is_memory_only for _, each in fitting):
        in_full = [tokens for tokens, each in fitting if not each.is_memory_only]
        trained = max(trained_in_full.get(known[-1].cell, 0), *in_full, 0)
    words = settings_in_words(
        known[-1].cell.settings, known[-1].cell.layout, is_lowered=known[-1].is_lowered
    )
    return Reach(
        cell=known[-1].cell,
        words=words,
        label=known[-1].label,
        trained_tokens=trained,
        reach_tokens=reach,
        fails_tokens=None,
        sure_tokens=max(sure, default=0),
        is_at_least=farthest.is_at_least or most == reach,
        source=source,
        points=tuple(_point(tokens, each) for tokens, each in fitting),
    )


def _point(length_tokens: int, candidate: Candidate) -> Point:
    step = candidate.step_time
    return Point(
        length_tokens=length_tokens,
        left_bytes=candidate.headroom_bytes,
        step_time_s=None if step is None else step.time_s,
        tokens_per_s=None if step is None else step.step_tokens / step.time_s,
        speed_source="" if step is None else step.source,
        risk=candidate.risk,
    )


def _of_capacities(cell: Cell, own: Sequence[Capacity]) -> Reach:
    trained = max((each.capacity_tokens for each in own if not each.is_memory_only), default=0)
    reach = max(each.capacity_tokens for each in own)
    beyond = [
        each.does_not_fit_tokens
        for each in own
        if each.does_not_fit_tokens is not None and each.does_not_fit_tokens > reach
    ]
    return Reach(
        cell=cell,
        words=settings_in_words(cell.settings, cell.layout),
        label=cell.label,
        trained_tokens=trained,
        reach_tokens=reach,
        fails_tokens=min(beyond, default=None),
        is_at_least=not beyond,
        source=own[0].source,
        points=(),
    )

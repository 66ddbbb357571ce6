"""Combinatorial cover: few cases in which every two (or three) values meet that can meet at all."""

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

from tables import deep

Case = dict[str, str]
Meeting = tuple[tuple[str, str], ...]
"""Values of different factors in one case."""
Box = Mapping[str, Sequence[str]]
"""Allowed values of every factor, each free of all others. What constrains them is said by which
boxes there are."""

CANDIDATES = 3
"""Cases made around the meeting next in turn; the one that has most others is taken."""


def in_pairs(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases with a value of each factor, in which every two values meet."""
    if deep(*factors):
        return list(product(*factors))
    box = {str(place): [*map(str, range(len(factor)))] for place, factor in enumerate(factors)}
    return [
        tuple(factor[int(case[str(place)])] for place, factor in enumerate(factors))
        for case in cover([box], strength=2, seed=0)
    ]


def cover(boxes: Sequence[Box], *, strength: int, seed: int) -> list[Case]:
    """Cases that lie in a box each and have every meeting of ``strength`` values that any box has;
    the same for the same seed.

    Source: Cohen et al., The AETG System, https://doi.org/10.1109/32.605761
    """
    chance = random.Random(seed)
    missing = {meeting: box for box in boxes for meeting in meetings(box, strength)}
    chosen: list[Case] = []
    while missing:
        wanted, box = chance.choice(list(missing.items()))
        made = [_around(wanted, box, missing, chance) for _ in range(CANDIDATES)]
        best = max(made, key=lambda case: len(missing.keys() & _of(case, strength)))
        chosen.append(best)
        for meeting in _of(best, strength):
            missing.pop(meeting, None)
    return chosen


def meetings(box: Box, strength: int) -> Iterable[Meeting]:
    for names in combinations(sorted(box), strength):
        for values in product(*(box[name] for name in names)):
            yield tuple(zip(names, values, strict=True))


def _of(case: Case, strength: int) -> set[Meeting]:
    return set(combinations(sorted(case.items()), strength))


def _around(wanted: Meeting, box: Box, missing: Mapping[Meeting, Box], draw: random.Random) -> Case:
    """A case with this meeting; other factors in turn take a value that has most meetings there."""
    case = dict(wanted)
    others = [name for name in box if name not in case]
    for name in draw.sample(others, len(others)):
        beside = list(combinations(case.items(), len(wanted) - 1))

        def meets(value: str, own: str = name, beside: list[Meeting] = beside) -> int:
            return sum(tuple(sorted((*those, (own, value)))) in missing for those in beside)

        case[name] = max(draw.sample(box[name], len(box[name])), key=meets)
    return case

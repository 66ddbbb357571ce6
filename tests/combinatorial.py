"""Combinatorial cover: few cases in which every two (or three) values of different factors meet
that can meet at all.
"""

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

CANDIDATES = 60
"""Random cases that have the meeting next in turn; the one that has most others is taken."""


def in_pairs(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases with a value of each factor, in which every two values meet; in `make test-all` all
    that there are.
    """
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
    """
    chance = random.Random(seed)
    missing = {meeting: box for box in boxes for meeting in meetings(box, strength)}
    chosen: list[Case] = []
    while missing:
        wanted, box = chance.choice(list(missing.items()))
        candidates = [_random(box, wanted, chance) for _ in range(CANDIDATES)]
        best = max(candidates, key=lambda case: len(missing.keys() & _of(case, strength)))
        chosen.append(best)
        for meeting in _of(best, strength):
            missing.pop(meeting, None)
    return chosen


def meetings(box: Box, strength: int) -> Iterable[Meeting]:
    """What cases of a box may have."""
    for names in combinations(sorted(box), strength):
        for values in product(*(box[name] for name in names)):
            yield tuple(zip(names, values, strict=True))


def _of(case: Case, strength: int) -> set[Meeting]:
    return set(combinations(sorted(case.items()), strength))


def _random(box: Box, wanted: Meeting, chance: random.Random) -> Case:
    return {name: chance.choice(values) for name, values in box.items()} | dict(wanted)

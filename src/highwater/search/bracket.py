"""Bracket: which index of the grid to try next, and what the outcomes so far prove.

It is pure ask and tell. The answer is always made of observed outcomes: ``fits`` fit, and
``fits + 1`` did not; or ``fits`` is 0 and neither index 1 nor ``least_packed`` fit; or nothing
above ``fits`` is left to try. A hint for the first index orders the trials and decides nothing.

Trials for a capacity at index n, where longer never takes less (``tests/unit/test_bracket.py``):

    without a hint       at most 2·log2(n) + 2, and 1 for n = 0: gallop 1, 2, 4, ... and bisect
                         (Bentley and Yao, 1976)
    with a hint up to n  no more than without
    with a longer hint   at most ``HINT_COST`` more, however wrong it is
    with n or n + 1      2, the fewest that prove an answer
    with least_packed    at most one more, also for n = 0

That is for ``bisect``, and for ``linear`` from a start that does not fit. From one that fits
``linear`` takes each index up to n + 1.
"""

from collections.abc import Callable

from highwater.nouns.study import Method
from highwater.store.trial_evidence import Contradiction, contradictions

HINT_COST = 3
"""Trials that a hint can cost (``_around_the_hint``), before the search starts from the bottom."""


class Bracket:
    """The longest index in 1..``size`` that fits, found one observed outcome at a time.

    ``first`` is the index to try first: a hint for ``bisect``, the carried start for ``linear``,
    which scans upwards from there. ``least_packed`` is the index that takes the least memory. A
    token budget makes it another than 1: nothing is said to fit nowhere before it was tried.

    Outcomes may be told in any order, more than once, and for indices that were never asked for.
    Where they are not monotone, all of them are kept: ``fits`` is the longest that fit, the search
    goes on until the next index above it is decided too, and ``contradictions`` lists what speaks
    against it.
    """

    def __init__(
        self,
        size: int,
        first: int | None = None,
        method: Method = "bisect",
        *,
        least_packed: int = 1,
    ) -> None:
        self._size = size
        self._first = min(max(first or 1, 1), size)
        self._method: Method = method
        self._least_packed = least_packed
        self._fit: set[int] = set()
        self._failed: set[int] = set()
        self._undecided: set[int] = set()

    def ask(self) -> int | None:
        """The index to try next; None when the outcomes make an answer."""
        if self.end == self.fits + 1:
            return self._least_packed if self._is_least_packed_open and not self._fit else None
        if self._is_scanning:
            return self.fits + 1 if self._fit else self._first
        return self._next_in_bisection()

    def tell(self, index: int, fits: bool) -> None:
        """Record that ``index`` fit, or that it did not."""
        (self._fit if fits else self._failed).add(index)

    def tell_undecided(self, index: int) -> None:
        """Record that no trial of ``index`` told in time: only ``least_packed`` is asked then."""
        self._undecided.add(index)

    @property
    def fits(self) -> int:
        """The longest index that fit; 0 when none has."""
        return max(self._fit, default=0)

    @property
    def end(self) -> int:
        """Lowest index above ``fits`` not worth a trial: failed, undecided, or off the grid."""
        closed = (i for i in self._failed | self._undecided if i > self.fits)
        return min(closed, default=self._size + 1)

    @property
    def does_not_fit(self) -> int | None:
        """The lowest index above ``fits`` that was seen not to fit."""
        return min((i for i in self._failed if i > self.fits), default=None)

    @property
    def is_proven(self) -> bool:
        """Whether neighbours were observed: ``fits`` fit, or is 0, and the one above did not."""
        return self.does_not_fit == self.fits + 1

    def contradictions(
        self, packed_tokens: Callable[[int], int] = lambda index: index
    ) -> tuple[Contradiction, ...]:
        """Indices that failed beside the closest from there on that fit, packed no less."""
        return contradictions(self._fit, self._failed, packed_tokens)

    @property
    def trials_left(self) -> int:
        """About how many more trials the answer takes; at least so many without an upper bound."""
        gap = self.end - self.fits - 1
        if gap <= 0:
            return 0 if self.ask() is None else 1
        if not self._is_scanning and self.end <= self._size:
            return gap.bit_length()
        return 2 if not self._fit else 1

    @property
    def _is_scanning(self) -> bool:
        """Whether a linear search still scans upwards from its start.

        A start that did not fit is no more than a hint that was too long. The published scan ends
        there and says that nothing fits. What does fit is as well found by bisection: an answer is
        a pair of neighbours that were tried, whichever were tried before.
        """
        if self._method == "bisect":
            return False
        if self._fit:
            return self._first in self._fit or self._first not in self._failed | self._undecided
        return self._first < self.end

    def _next_in_bisection(self) -> int:
        if self._is_least_packed_above:
            return self._least_packed
        for index in (*self._around_the_hint, self._least_packed):
            if self.fits < index < self.end:
                return index
        # Gallop away from the start; where a shorter length failed, what is above may pack as much.
        if self.end > self._size and not any(index < self.fits for index in self._failed):
            distance = self.fits - self._first + 1
            return min(self.fits + distance, self._size)
        middle = (self.fits + self.end) // 2
        return min(middle, max(2 * self.fits, 1))

    @property
    def _is_least_packed_open(self) -> bool:
        return (
            self._least_packed <= self._size
            and self._least_packed not in self._failed | self._fit | self._undecided
        )

    @property
    def _is_least_packed_above(self) -> bool:
        """Whether an untried index above one that failed takes the least memory.

        That index says the most. Where it fits, the answer is no lower, whatever fits below; where
        it does not, nothing is likely to, and index 1 proves it. So it goes with a carried start
        that fit where a token budget held it once, and now holds it twice.
        """
        return (
            not self._fit
            and self.does_not_fit == self.end
            and self.end < self._least_packed
            and self._is_least_packed_open
        )

    @property
    def _around_the_hint(self) -> tuple[int, ...]:
        """The hint, then ever further below it for as long as they fail. A good hint is a step or a
        few per cent off. One that is far above the capacity says nothing about it: the bisection
        then gallops from index 1, so that a wild hint costs these trials and no more.
        """
        first = self._first
        return (first, first - 1, first - max(2, first // 4))

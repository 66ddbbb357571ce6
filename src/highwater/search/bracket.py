"""Bracket: choose the next grid index to try, and say what the outcomes so far prove.

It is pure ask and tell. The answer is always made of observed outcomes: ``fits`` fit and
``fits + 1`` did not; or ``fits`` is 0 and neither index 1 nor ``least_packed`` fit; or nothing
above ``fits`` is left to try. A hint for the first index orders the trials and decides nothing.

Trials for a capacity at index n, if longer never takes less (``tests/unit/test_bracket.py``):

    without a hint       at most 2·log2(n) + 2, and 1 for n = 0: gallop 1, 2, 4, ... and bisect
                         (Bentley and Yao, 1976)
    with a hint up to n  no more than without
    with a longer hint   at most ``HINT_COST`` more, however wrong the hint is
    with n or n + 1      2, the fewest that prove an answer
    with least_packed    at most one more, also for n = 0; with tiled_from one more

These bounds hold for ``bisect``, and for ``linear`` from a start that does not fit. From a start
that fits, ``linear`` tries each index up to n + 1.
"""

from collections.abc import Callable

from highwater.nouns.study import Method
from highwater.store.lines import Contradiction, contradictions

HINT_COST = 3
"""Trials that a wrong hint costs before the search starts at index 1."""


class Bracket:
    """Search for the longest index in 1..``size`` that fits, one observed outcome at a time.

    ``first`` is the index to try first: a hint for ``bisect``, the carried start for ``linear``,
    which scans upwards from there. ``least_packed`` is the index that takes the least memory. With
    a token budget it may be above 1, and must also fail before the answer is that nothing fits.
    ``tiled_from`` is an index that may fit though some below it do not, 0 for none: a bisection
    that comes from above tries it before those.

    ``tell`` accepts outcomes in any order, repeated, and of indices that ``ask`` never returned. If
    they are not monotone, all are kept: ``fits`` is the longest index that fit, the search goes on
    until the next index above it is decided too, and ``contradictions`` lists the outcomes that
    contradict the answer.
    """

    def __init__(
        self,
        size: int,
        first: int | None = None,
        method: Method = "bisect",
        *,
        least_packed: int = 1,
        tiled_from: int = 0,
    ) -> None:
        self._size = size
        self._first = min(max(first or 1, 1), size)
        self._method: Method = method
        self._least_packed = least_packed
        self._tiled_from = tiled_from if tiled_from <= self._first else 0
        self._fit: set[int] = set()
        self._failed: set[int] = set()
        self._undecided: set[int] = set()

    def ask(self) -> int | None:
        """Index of the length to try next; None once the trials prove an answer."""
        if self.end == self.fits + 1:
            return self._least_packed if self._is_least_packed_open and not self._fit else None
        if self._is_scanning:
            return self.fits + 1 if self._fit else self._first
        return self._next_in_bisection()

    def tell(self, index: int, fits: bool) -> None:
        """Record whether ``index`` fit."""
        (self._fit if fits else self._failed).add(index)

    def tell_undecided(self, index: int) -> None:
        """Record that no trial of ``index`` ended in time; nothing longer is tried."""
        self._undecided.add(index)

    @property
    def fits(self) -> int:
        """The longest index that fit; 0 when none has."""
        return max(self._fit, default=0)

    @property
    def end(self) -> int:
        """Lowest index above ``fits`` that is not tried again: it failed, or is undecided."""
        closed = (i for i in self._failed | self._undecided if i > self.fits)
        return min(closed, default=self._size + 1)

    @property
    def does_not_fit(self) -> int | None:
        """The lowest index above ``fits`` that was seen not to fit; None if there is none."""
        return min((i for i in self._failed if i > self.fits), default=None)

    @property
    def is_proven(self) -> bool:
        """True if the edge is proven: ``fits`` fit, or is 0, and ``fits + 1`` did not fit."""
        return self.does_not_fit == self.fits + 1

    def contradictions(
        self, packed_tokens: Callable[[int], int] = lambda index: index
    ) -> tuple[Contradiction, ...]:
        """Pairs of a length that failed and a longer one that fit, with no fewer tokens a step."""
        return contradictions(self._fit, self._failed, packed_tokens)

    @property
    def trials_left(self) -> int:
        """Number of trials that the answer takes from now, about; a lower bound at first."""
        gap = self.end - self.fits - 1
        if gap <= 0:
            return 0 if self.ask() is None else 1
        if not self._is_scanning and self.end <= self._size:
            return gap.bit_length()
        return 2 if not self._fit else 1

    @property
    def _is_scanning(self) -> bool:
        """True while a linear search still scans upwards from its start.

        If the start does not fit, the published scan ends and reports that nothing fits; here the
        start was only a hint that was too long, and bisection continues below it, because an answer
        is a pair of neighbouring indices that were both tried, in any order.
        """
        if self._method == "bisect":
            return False
        if self._fit:
            return self._first in self._fit or self._first not in self._failed | self._undecided
        return self._first < self.end

    def _next_in_bisection(self) -> int:
        if self._is_least_packed_above:
            return self._least_packed
        # The hint, then further below while they fail: a good one is off by a step or a few per
        # cent. Far above the capacity it says nothing, and costs no more than these trials.
        first, tiled_from = self._first, self._tiled_from
        below = max(first - max(2, first // 4), tiled_from)
        for index in (first, first - 1, below, tiled_from, self._least_packed):
            if self.fits < index < self.end:
                return index
        # Gallop away from the start, unless a shorter length failed: longer ones may pack as much.
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
        """True if the index with the least memory is untried and lies above one that failed.

        Its trial tells the most. If it fits, the answer is at least as long; if it does not,
        probably nothing fits, and index 1 proves it. This happens when the carried start fit with
        one sequence in the token budget, and the budget now packs two.
        """
        return (
            not self._fit
            and self.does_not_fit == self.end
            and self.end < self._least_packed
            and self._is_least_packed_open
        )

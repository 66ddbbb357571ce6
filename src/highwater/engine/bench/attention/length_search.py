"""The lengths that a benchmark of attentions tries: doubling to the first that does not fit, then
bisection; or those that are named. Pure: who asks runs them.
"""

from collections.abc import Sequence

from highwater.nouns.attention_bench import PARTS_OF_A_DOUBLING

LEAST_TOKENS = 128
"""Length below which nothing is tried."""


class LengthSearch:
    """Asks for lengths, is told how they went, and ends at the longest that fits."""

    def __init__(self, *, start: int, most: int) -> None:
        """Begin with ``start`` tokens, a power of two for lengths that are friendly to one; try
        none beyond ``most``.
        """
        self._start, self._most = min(start, most), most
        self.fits: int | None = None
        """The longest that fits so far."""
        self.fails: int | None = None
        """The shortest that does not."""

    def ask(self) -> int | None:
        """The next length to try; None at the end."""
        if self.fits is None:
            return self._start if self.fails is None else self._shorter(self.fails)
        if self.fails is None:
            return None if self.fits == self._most else min(2 * self.fits, self._most)
        step = self._step(self.fits)
        middle = self.fits + (self.fails - self.fits) // (2 * step) * step
        return middle if self.fits < middle < self.fails else None

    def tell(self, length: int, *, fits: bool) -> None:
        """Take in how a length went."""
        if fits:
            self.fits = max(length, self.fits or 0)
        else:
            self.fails = min(length, self.fails or length)

    def _shorter(self, failed: int) -> int | None:
        return failed // 2 if failed // 2 >= LEAST_TOKENS else None

    @staticmethod
    def _step(fits: int) -> int:
        """An eighth of the doubling that a length is in."""
        return max(1, (1 << (fits.bit_length() - 1)) // PARTS_OF_A_DOUBLING)


class NamedLengths:
    """Asks for the lengths that are named, each once, whatever becomes of them."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._left = sorted(set(lengths))

    def ask(self) -> int | None:
        """The next length to try; None at the end."""
        return self._left.pop(0) if self._left else None

    def tell(self, length: int, *, fits: bool) -> None:
        """Whether a length fits changes nothing here."""

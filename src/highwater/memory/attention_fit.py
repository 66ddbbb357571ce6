"""What an attention needs of memory by its length, fitted to measured peaks, and the longest length
that some memory holds by it.

The formula is ``overhead + bytes per token * length + bytes per pair * length²``; the last term is
there only where two describe neither all peaks nor those of the last two doublings: what short
sequences take at once, a window or some rows, stops growing. All of it is predicted, except where
it was fitted.
"""

from collections.abc import Sequence
from itertools import combinations

from highwater.nouns.attention_bench import PARTS_OF_A_DOUBLING
from highwater.nouns.codec import Record

_WELL_DESCRIBED = 0.05
"""Largest relative error of a peak up to which overhead and bytes per token are the formula."""
_FAR = 4
"""Part of the longest length from which on peaks tell what is to come."""
_LONGEST_TOKENS = 1 << 34
LEAST_LENGTHS = 3
"""Lengths that tell a formula: through two of them there is always one."""
Solution = tuple[float, ...]


class MemoryFit(Record, frozen=True, kw_only=True):
    """Peak of a GPU by the length of a sequence, which all GPUs hold together."""

    overhead_bytes: float
    bytes_per_token: float
    bytes_per_pair: float
    """Of the square of the length; 0 where memory is linear in it."""
    points: int
    """Lengths that it was fitted to."""
    longest_tokens: int
    """The longest of them."""
    largest_error: float
    """Largest relative error of a measured peak."""

    def peak_bytes(self, length_tokens: int) -> float:
        """Bytes that are allocated at the peak."""
        return (
            self.overhead_bytes
            + self.bytes_per_token * length_tokens
            + self.bytes_per_pair * length_tokens**2
        )

    def longest_within(self, free_bytes: float) -> int:
        """The longest length whose peak is within so many bytes, rounded down to an eighth of its
        doubling; 0 where none is.
        """
        low, high = 0, _LONGEST_TOKENS
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.peak_bytes(middle) <= free_bytes else (low, middle)
        step = max(1, (1 << max(0, low.bit_length() - 1)) // PARTS_OF_A_DOUBLING)
        return low // step * step


def memory_fit(peaks: Sequence[tuple[int, int]]) -> MemoryFit | None:
    """The formula of these peaks, each a length and its bytes; None of fewer than three lengths.

    No term is below zero. Errors weigh as shares of their peaks.
    """
    if len({length for length, _ in peaks}) < LEAST_LENGTHS:
        return None
    longest = max(length for length, _ in peaks)
    far = [peak for peak in peaks if peak[0] * _FAR >= longest]
    for of in (peaks, far):
        linear = _best([(0, 1), (1,)], of)
        is_known = of is peaks or len({length for length, _ in of}) >= LEAST_LENGTHS
        if linear is not None and is_known and _largest_error(linear, of) <= _WELL_DESCRIBED:
            return _fit(linear, of)
    every = [powers for count in (1, 2, 3) for powers in combinations((0, 1, 2), count)]
    best = _best([powers for powers in every if len(powers) < len(peaks) or 2 not in powers], peaks)
    # bytes are above zero: one term alone is never below it
    return None if best is None else _fit(best, peaks)


def _fit(terms: Solution, peaks: Sequence[tuple[int, int]]) -> MemoryFit:
    return MemoryFit(
        overhead_bytes=terms[0],
        bytes_per_token=terms[1],
        bytes_per_pair=terms[2],
        points=len(peaks),
        longest_tokens=max(length for length, _ in peaks),
        largest_error=_largest_error(terms, peaks),
    )


def _best(
    candidates: Sequence[tuple[int, ...]], peaks: Sequence[tuple[int, int]]
) -> Solution | None:
    """Of these powers of the length those that describe the peaks best with no factor below 0."""
    solutions = [
        found for powers in candidates if (found := _solved(powers, peaks)) and min(found) >= 0
    ]
    return min(
        solutions, key=lambda each: sum(_error(each, peak) ** 2 for peak in peaks), default=None
    )


def _solved(powers: tuple[int, ...], peaks: Sequence[tuple[int, int]]) -> Solution | None:
    """Factors of each power up to the square, by least squares of relative errors."""
    rows = [[length**power / size for power in powers] for length, size in peaks]
    normal: list[list[float]] = [
        [
            *(sum(row[i] * row[j] for row in rows) for j in range(len(powers))),
            sum(r[i] for r in rows),
        ]
        for i in range(len(powers))
    ]
    for at in range(len(powers)):
        pivot = max(range(at, len(powers)), key=lambda each: abs(normal[each][at]))
        normal[at], normal[pivot] = normal[pivot], normal[at]
        if not normal[at][at]:
            return None
        for other in range(len(powers)):
            if other != at:
                factor = normal[other][at] / normal[at][at]
                normal[other] = [
                    a - factor * b for a, b in zip(normal[other], normal[at], strict=True)
                ]
    factors = {power: normal[at][-1] / normal[at][at] for at, power in enumerate(powers)}
    return tuple(factors.get(power, 0.0) for power in (0, 1, 2))


def _largest_error(terms: Solution, peaks: Sequence[tuple[int, int]]) -> float:
    return max(abs(_error(terms, peak)) for peak in peaks)


def _error(terms: Solution, peak: tuple[int, int]) -> float:
    length, size = peak
    return sum(term * length**power for power, term in enumerate(terms)) / size - 1

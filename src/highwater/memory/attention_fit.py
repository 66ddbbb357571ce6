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
Peak = tuple[int, int]
"""A length, and the bytes of its peak."""


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


def memory_fit(peaks: Sequence[Peak]) -> MemoryFit | None:
    """The formula of these peaks; None of fewer than three lengths.

    No term is below zero. Errors weigh as shares of their peaks.
    """
    if len({length for length, _ in peaks}) < LEAST_LENGTHS:
        return None
    longest = max(length for length, _ in peaks)
    for of in (peaks, [peak for peak in peaks if peak[0] * _FAR >= longest]):
        if len({length for length, _ in of}) >= LEAST_LENGTHS:
            line = _best([(0, 1), (1,)], of)
            if line is not None and line.largest_error <= _WELL_DESCRIBED:
                return line
    every = [powers for count in (1, 2, 3) for powers in combinations((0, 1, 2), count)]
    return _best([powers for powers in every if len(powers) < len(peaks) or 2 not in powers], peaks)


def _best(candidates: Sequence[tuple[int, ...]], peaks: Sequence[Peak]) -> MemoryFit | None:
    """Of these powers of the length those that describe the peaks best with no factor below 0."""
    fits: dict[float, MemoryFit] = {}
    for powers in candidates:
        factors = _factors(powers, peaks)
        if factors is None or min(factors) < 0:
            continue
        predicted = [sum(factors[i] * length**i for i in range(3)) for length, _ in peaks]
        errors = [each / size - 1 for each, (_, size) in zip(predicted, peaks, strict=True)]
        fits[sum(error**2 for error in errors)] = MemoryFit(
            overhead_bytes=factors[0],
            bytes_per_token=factors[1],
            bytes_per_pair=factors[2],
            points=len(peaks),
            longest_tokens=max(length for length, _ in peaks),
            largest_error=max(map(abs, errors)),
        )
    return fits[min(fits)] if fits else None


def _factors(powers: tuple[int, ...], peaks: Sequence[Peak]) -> list[float] | None:
    """Factors of each power up to the square, by least squares of relative errors; None where there
    are several such.
    """
    rows = [[length**power / size for power in powers] for length, size in peaks]
    each = range(len(powers))
    normal: list[list[float]] = [
        [*(sum(row[i] * row[j] for row in rows) for j in each), sum(row[i] for row in rows)]
        for i in each
    ]
    for at in each:
        pivot = max(each[at:], key=lambda row: abs(normal[row][at]))
        normal[at], normal[pivot] = normal[pivot], normal[at]
        if not normal[at][at]:
            return None
        for other in each:
            if other != at:
                factor = normal[other][at] / normal[at][at]
                pairs = zip(normal[other], normal[at], strict=True)
                normal[other] = [one - factor * two for one, two in pairs]
    factors = {power: normal[at][-1] / normal[at][at] for at, power in enumerate(powers)}
    return [factors.get(power, 0.0) + 0.0 for power in range(3)]  # 0, where it is -0

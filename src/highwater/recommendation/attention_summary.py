"""Conclusions from a benchmark of attentions: longest lengths, fitted memory, other GPUs, the gain
of sharing sequences, advice. Pure functions; ``pages/attention`` shows the results.
"""

from collections.abc import Iterator, Sequence
from statistics import fmean, linear_regression
from typing import Literal

from msgspec.structs import astuple

from highwater.memory.formula.constants import CONTEXT_BYTES
from highwater.memory.predictor import edge
from highwater.nouns.attention_bench import (
    IMPLEMENTATIONS,
    PARTS_OF_A_DOUBLING,
    AttentionBench,
    BenchResult,
    BenchRow,
    Direction,
    Entry,
)
from highwater.nouns.codec import Record
from highwater.nouns.hardware import gpu_catalog, lacking, runs_trials

Why = BenchResult | Literal["longest tried"]
_USE_CASES = ((16_384, 32_768), (32_768, 65_536), (65_536, 131_072), (131_072, None))
FAR = 64
"""Multiple of the longest measured length up to which lengths are predicted."""
_WELL_DESCRIBED = 0.05
"""Largest relative error of a peak with which a linear formula is taken."""
_LATE_PART = 4
"""Divisor of the longest length: if no line fits all peaks, those from there on are tried."""
_LONGEST_TOKENS = (1 << 34) - 1
LEAST_LENGTHS = 3
"""Fewest lengths that a formula is fitted to: through two of them one always goes."""


class MemoryFit(Record, frozen=True, kw_only=True):
    """Peak memory of a GPU as a polynomial of the length, fitted to measured peaks."""

    overhead_bytes: float
    bytes_per_token: float
    bytes_per_pair: float
    """Bytes for each square of the length; 0 if memory is linear in it."""
    points: int
    """Number of lengths that it was fitted to."""
    longest_tokens: int
    """The longest of them."""
    largest_error: float
    """Largest relative error of a measured peak."""

    def peak_bytes(self, length_tokens: int) -> float:
        """Bytes that are allocated at the peak, at this length."""
        line = self.overhead_bytes + self.bytes_per_token * length_tokens
        return line + self.bytes_per_pair * length_tokens**2

    def longest_within(self, free_bytes: float) -> int:
        """Longest length whose peak takes at most ``free_bytes``; 0 if none does."""
        longest = edge(None, _LONGEST_TOKENS, lambda tokens: self.peak_bytes(tokens) <= free_bytes)
        step = max(1, (1 << max(0, longest.bit_length() - 1)) // PARTS_OF_A_DOUBLING)
        return longest // step * step


class LongestLength(Entry, frozen=True, kw_only=True):
    """Longest length that one implementation, mode and direction ran to its end."""

    fits_tokens: int | None
    """None: no length did."""
    fails_tokens: int | None
    """The shortest length above it that did not; None: there is none."""
    why: Why
    """The reason why the search ended above it."""
    row: BenchRow | None
    """The measured case at that length."""

    @property
    def time_s(self) -> float:
        """Seconds of a pass at that length; 0 if there is no such length."""
        return (self.row and self.row.time_s) or 0.0


class MemoryEstimate(Entry, frozen=True, kw_only=True):
    """The polynomial that was fitted to one entry's peaks."""

    fit: MemoryFit
    reserved_ratio: float
    """Bytes reserved over bytes allocated, at the longest length; 1 on the CPU."""


class PredictedLongest(Entry, frozen=True, kw_only=True):
    """Longest length of one entry on another kind of GPU, predicted by memory alone."""

    gpu: str
    memory_bytes: int
    tokens: int
    is_least: bool
    """True if more is predicted, but too far past what was measured."""
    lacking: tuple[str, ...] = ()
    """Abilities that this kind lacks, and what was measured may need."""


class ScalingEfficiency(Entry, frozen=True, kw_only=True):
    """Speed and longest length of one entry on several GPUs, compared with one GPU."""

    gpus: int
    length_tokens: int
    speedup: float
    """Tokens a second over those of one GPU (``AttentionBench.order.alone``) at this length."""
    length_ratio: float | None
    """Longest length over one GPU's; None: one is unknown, or both were the longest tried."""

    @property
    def efficiency(self) -> float:
        """Speed-up divided by the number of GPUs: 1.0 is perfect."""
        return self.speedup / self.gpus


class UseCase(Record, frozen=True, kw_only=True):
    """A range of lengths, and the attentions that run through all of it."""

    from_tokens: int
    to_tokens: int | None
    """None: the range has no end."""
    exact: str | None
    """The fastest that computes the same as dense attention; None: none held the range."""
    sparse: str | None
    """The fastest that makes another model of it; None: none held the range."""


class AttentionSummary(Record, frozen=True, kw_only=True):
    """What one benchmark shows: the longest lengths, memory, scaling and what to use when."""

    longest: tuple[LongestLength, ...]
    estimates: tuple[MemoryEstimate, ...]
    predicted: tuple[PredictedLongest, ...]
    efficiencies: tuple[ScalingEfficiency, ...]
    use_cases: tuple[UseCase, ...]


def attention_summary(bench: AttentionBench) -> AttentionSummary:
    """Draw all conclusions from the measured figures."""
    by_entry = {entry: _longest(bench, entry) for entry in entries(bench)}
    longest, estimates = tuple(by_entry.values()), tuple(_estimates(bench))
    return AttentionSummary(
        longest=longest,
        estimates=estimates,
        predicted=tuple(_predicted(bench, estimates)),
        efficiencies=tuple(_efficiencies(bench, by_entry)),
        use_cases=tuple(_use_cases(bench, longest)),
    )


def contestants(longest: Sequence[LongestLength], direction: Direction) -> list[LongestLength]:
    """Entries that may be recommended: not the reference, and not DataParallel."""
    return [
        each
        for each in longest
        if each.direction == direction
        and each.mode != "data parallel"
        and each.implementation != "reference"
    ]


def entries(bench: AttentionBench) -> list[Entry]:
    """The measured pairs of implementation and mode, in order."""
    return list(dict.fromkeys(row.entry for row in bench.rows))


def rows_of(bench: AttentionBench, entry: Entry, *, batches: bool = False) -> list[BenchRow]:
    """Measured rows of one entry by length; ``batches``: also earlier files' of several a GPU."""
    rows = [
        row
        for row in bench.rows
        if row.entry == entry and (batches or row.batch == 1 or row.mode == "data parallel")
    ]
    return sorted(rows, key=lambda row: (_length(row), row.batch))


def times_s(bench: AttentionBench, entry: Entry) -> dict[int, float]:
    """Seconds of a pass of one entry, by the lengths that fit."""
    return {_length(row): row.time_s for row in rows_of(bench, entry) if row.time_s}


def _length(row: BenchRow) -> int:
    return row.length_tokens or 0


def _longest(bench: AttentionBench, entry: Entry) -> LongestLength:
    rows = rows_of(bench, entry)
    best = max((row for row in rows if row.fits), key=_length, default=None)
    fits = None if best is None else best.length_tokens
    first = next((row for row in rows if not row.fits and _length(row) > (fits or 0)), None)
    why: Why = "red" if rows[0].result == "red" else "longest tried"
    return LongestLength(
        *astuple(entry),
        fits_tokens=fits,
        fails_tokens=None if first is None else first.length_tokens,
        why=why if first is None else first.result,
        row=best,
    )


def _estimates(bench: AttentionBench) -> Iterator[MemoryEstimate]:
    for entry in entries(bench):
        if entry.mode == "data parallel":  # each GPU has what one has alone
            continue
        rows = [row for row in rows_of(bench, entry) if row.fits]
        peaks = [(_length(row), max(1, *row.peak_allocated_bytes)) for row in rows]
        if (fit := memory_fit(peaks)) is None:
            continue
        reserved = max(rows[-1].peak_reserved_bytes) / peaks[-1][1]
        yield MemoryEstimate(
            *astuple(entry),
            fit=fit,
            reserved_ratio=max(1.0, reserved) if bench.order.device == "cuda" else 1.0,
        )


def _predicted(
    bench: AttentionBench, estimates: Sequence[MemoryEstimate]
) -> Iterator[PredictedLongest]:
    """Longest lengths on other GPUs, less the CUDA context measured here, or else on H200s."""
    is_gpu = bench.order.device == "cuda"
    outside = bench.machine.outside_bytes if is_gpu else CONTEXT_BYTES["cuda"]
    for kind in gpu_catalog():
        if kind.usable_bytes is None or not runs_trials(kind.name):
            continue
        for each in estimates:
            free = (kind.usable_bytes - outside) / each.reserved_ratio
            tokens = each.fit.longest_within(free)
            farthest = FAR * each.fit.longest_tokens
            yield PredictedLongest(
                *astuple(each.entry),
                gpu=kind.name,
                memory_bytes=kind.usable_bytes,
                tokens=min(tokens, farthest),
                is_least=tokens > farthest,
                lacking=lacking(kind),
            )


def _efficiencies(
    bench: AttentionBench, longest: dict[Entry, LongestLength]
) -> Iterator[ScalingEfficiency]:
    for entry, own in longest.items():
        if entry.mode == "single":
            continue
        one = Entry(bench.order.alone(entry.implementation), "single", entry.direction)
        alone_s = times_s(bench, one)
        both = [row for row in rows_of(bench, entry) if row.time_s and _length(row) in alone_s]
        if not both:
            continue
        row, its = both[-1], longest[one]
        is_found = own.fits_tokens and not own.why == its.why == "longest tried"
        yield ScalingEfficiency(
            *astuple(entry),
            gpus=row.gpus,
            length_tokens=_length(row),
            speedup=row.batch * alone_s[_length(row)] / (row.time_s or 1.0),
            length_ratio=(own.fits_tokens or 0) / (its.fits_tokens or 1) if is_found else None,
        )


def _use_cases(bench: AttentionBench, longest: Sequence[LongestLength]) -> Iterator[UseCase]:
    """Use cases of training if that was measured, else of the forward pass."""
    direction = bench.order.directions[-1]
    for start, end in _USE_CASES:
        every, least = contestants(longest, direction), end or start + 1
        held = [each for each in every if (each.fits_tokens or 0) >= least]
        rows = [(each, IMPLEMENTATIONS[each.implementation]) for each in held]
        # a model that attends by a pattern, or in segments, is another one
        exact = [each for each, row in rows if row.pattern is None and not row.takes_segments]
        yield UseCase(
            from_tokens=start,
            to_tokens=end,
            exact=_fastest(bench, exact),
            sparse=_fastest(bench, [each for each in held if each not in exact]),
        )


def _fastest(bench: AttentionBench, found: Sequence[LongestLength]) -> str | None:
    """The fastest entry at the longest length that all have measured, on one GPU if any."""
    alone = [each for each in found if each.mode == "single"] or found
    if not alone:
        return None
    times = {each.implementation: times_s(bench, each.entry) for each in alone}
    common = max(set.intersection(*map(set, times.values())), default=None)
    if common is None:
        return max(alone, key=lambda each: each.fits_tokens or 0).implementation
    return min(times, key=lambda name: times[name][common])


def memory_fit(peaks: Sequence[tuple[int, int]]) -> MemoryFit | None:
    """Polynomial without a negative term through lengths and their peaks in bytes; None of fewer
    than three lengths.
    """
    longest = max((length for length, _ in peaks), default=0)
    late = [peak for peak in peaks if peak[0] * _LATE_PART >= longest]
    enough = [of for of in (peaks, late) if len({length for length, _ in of}) >= LEAST_LENGTHS]
    if not enough:
        return None
    lines = [_regression(of, -1) for of in enough]
    described = [line for line in lines if line.largest_error <= _WELL_DESCRIBED]
    others = [lines[0], *(_regression(of, 1) for of in enough)]
    return described[0] if described else min(others, key=lambda fit: fit.largest_error)


def _regression(peaks: Sequence[tuple[int, int]], power: Literal[-1, 1]) -> MemoryFit:
    """Fit a peak's bytes per token, by which short lengths count as much as long ones, to
    ``length**power``: the factor is the overhead where that is 1 / length, and the bytes per pair
    where it is the length. A negative term is left out.
    """
    per_token = [size / length for length, size in peaks]
    terms = [float(length) ** power for length, _ in peaks]
    factor, constant = linear_regression(terms, per_token)
    if factor < 0:
        factor, constant = 0.0, fmean(per_token)
    elif constant < 0:
        factor, constant = linear_regression(terms, per_token, proportional=True)
    fit = MemoryFit(
        overhead_bytes=factor if power == -1 else 0.0,
        bytes_per_token=constant,
        bytes_per_pair=factor if power == 1 else 0.0,
        points=len(peaks),
        longest_tokens=max(length for length, _ in peaks),
        largest_error=0.0,
    )
    errors = (abs(fit.peak_bytes(length) / size - 1) for length, size in peaks)
    return fit.replace(largest_error=max(errors))

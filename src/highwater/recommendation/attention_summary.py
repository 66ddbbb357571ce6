"""What follows from a benchmark of attentions: the longest lengths, the fit of memory, other GPUs,
what sharing brings, and what to use for which lengths. Pure: figures in, figures out;
``pages/attention_report`` shows them.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from highwater.memory.formula.constants import CONTEXT_BYTES
from highwater.memory.from_trials import MemoryFit, memory_fit
from highwater.nouns.attention_bench import (
    IMPLEMENTATIONS,
    AttentionBench,
    BenchRow,
    Direction,
    Entry,
    OfEntry,
)
from highwater.nouns.codec import Record
from highwater.nouns.hardware import gpu_catalog, lacking, runs_trials

Why = Literal["ran out of memory", "took too long", "crashed", "longest tried", "red"]
_USE_CASES = ((16_384, 32_768), (32_768, 65_536), (65_536, 131_072), (131_072, None))
FAR = 64
"""Times past the longest measured length that a prediction goes at the most."""


class LongestLength(OfEntry, frozen=True, kw_only=True):
    """The longest length that an implementation held."""

    gpus: int
    fits_tokens: int | None
    """None where none did."""
    fails_tokens: int | None
    """The shortest above it that did not."""
    why: Why
    """What ended it."""
    row: BenchRow | None
    """What it costs there."""

    @property
    def time_s(self) -> float:
        """Seconds of a pass there; 0 where there is none."""
        return (self.row and self.row.time_s) or 0.0


class MemoryEstimate(OfEntry, frozen=True, kw_only=True):
    """The formula of an implementation's memory."""

    fit: MemoryFit
    reserved_ratio: float
    """What the allocator reserved at the longest length, of what was allocated; 1 on the CPU."""


class PredictedLongest(OfEntry, frozen=True, kw_only=True):
    """Predicted: the longest length on another kind of GPU, by memory alone."""

    gpu: str
    memory_bytes: int
    gpus: int
    tokens: int
    is_least: bool
    """Whether more is predicted, so far past what was measured that nothing is said of it."""
    lacking: tuple[str, ...] = ()
    """What this kind has not, and what was measured may need."""


class ScalingEfficiency(OfEntry, frozen=True, kw_only=True):
    """What several GPUs bring over one."""

    gpus: int
    length_tokens: int
    speedup: float
    """Tokens a second, of one GPU's with dense attention, or the same one, at this length."""
    length_ratio: float | None
    """Its longest length over one GPU's; None where either is unknown, or both were cut off."""

    @property
    def efficiency(self) -> float:
        """Speed-up for each GPU."""
        return self.speedup / self.gpus


class UseCase(Record, frozen=True, kw_only=True):
    """A range of lengths, and what was measured to hold all of it: on one GPU where any does."""

    from_tokens: int
    to_tokens: int | None
    """None: as long as can be."""
    direction: Direction
    exact: str | None
    """The fastest that attends as dense attention does."""
    sparse: str | None
    """The fastest that makes it another model."""


class AttentionSummary(Record, frozen=True, kw_only=True):
    """All of it."""

    longest: tuple[LongestLength, ...]
    estimates: tuple[MemoryEstimate, ...]
    predicted: tuple[PredictedLongest, ...]
    efficiencies: tuple[ScalingEfficiency, ...]
    use_cases: tuple[UseCase, ...]


def attention_summary(bench: AttentionBench) -> AttentionSummary:
    """Everything that the measured figures tell."""
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
    """Those that lengths can be had by: neither the reference, nor DataParallel's copies."""
    return [
        each
        for each in longest
        if each.direction == direction
        and each.mode != "data parallel"
        and each.implementation != "reference"
    ]


def entries(bench: AttentionBench) -> list[Entry]:
    """What was measured, in its order."""
    return list(dict.fromkeys(row.entry for row in bench.rows))


def rows_of(bench: AttentionBench, entry: Entry, *, batches: bool = False) -> list[BenchRow]:
    """The rows of one, by length; ``batches``: those of several sequences on one GPU too."""
    rows = [
        row
        for row in bench.rows
        if row.entry == entry and (batches or row.batch == 1 or row.mode == "data parallel")
    ]
    return sorted(rows, key=lambda row: (_length(row), row.batch))


def times_s(bench: AttentionBench, entry: Entry) -> dict[int, float]:
    """Seconds of a pass, by the lengths that fit."""
    return {_length(row): row.time_s for row in rows_of(bench, entry) if row.time_s}


def _length(row: BenchRow) -> int:
    return row.length_tokens or 0


def _longest(bench: AttentionBench, entry: Entry) -> LongestLength:
    rows = rows_of(bench, entry)
    best = max((row for row in rows if row.fits), key=_length, default=None)
    fits = None if best is None else _length(best)
    above = [row for row in rows if not row.fits and _length(row) > (fits or 0)]
    first = min(above, key=_length, default=None)
    why: Why = "red" if any(row.result == "red" for row in rows) else "longest tried"
    if first is not None and first.result not in ("fits", "red"):
        why = first.result
    return LongestLength(
        **entry._asdict(),
        gpus=rows[0].gpus,
        fits_tokens=fits,
        fails_tokens=None if first is None else _length(first),
        why=why,
        row=best,
    )


def _estimates(bench: AttentionBench) -> Iterator[MemoryEstimate]:
    for entry in entries(bench):
        if entry.mode == "data parallel":  # each GPU has what one has alone
            continue
        rows = [row for row in rows_of(bench, entry) if row.fits]
        peaks = [max(1, *row.peak_allocated_bytes) for row in rows]
        fit = memory_fit([(_length(row), peak) for row, peak in zip(rows, peaks, strict=True)])
        if fit is None:
            continue
        reserved = max(rows[-1].peak_reserved_bytes) / peaks[-1]
        yield MemoryEstimate(
            **entry._asdict(),
            fit=fit,
            reserved_ratio=max(1.0, reserved) if bench.order.device == "cuda" else 1.0,
        )


def _predicted(
    bench: AttentionBench, estimates: Sequence[MemoryEstimate]
) -> Iterator[PredictedLongest]:
    """Other kinds of GPUs, with the context that was read here, or of a GPU elsewhere."""
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
                **each.entry._asdict(),
                gpu=kind.name,
                memory_bytes=kind.usable_bytes,
                gpus=1 if each.mode == "single" else bench.order.gpus,
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
            **entry._asdict(),
            gpus=row.gpus,
            length_tokens=_length(row),
            speedup=row.batch * alone_s[_length(row)] / (row.time_s or 1.0),
            length_ratio=(own.fits_tokens or 0) / (its.fits_tokens or 1) if is_found else None,
        )


def _use_cases(bench: AttentionBench, longest: Sequence[LongestLength]) -> Iterator[UseCase]:
    """For training where that was measured, else forward alone."""
    direction = bench.order.directions[-1]
    for start, end in _USE_CASES:
        every, least = contestants(longest, direction), end or start + 1
        held = [each for each in every if (each.fits_tokens or 0) >= least]
        exact = [each for each in held if not IMPLEMENTATIONS[each.implementation].changes_model]
        yield UseCase(
            from_tokens=start,
            to_tokens=end,
            direction=direction,
            exact=_fastest(bench, exact),
            sparse=_fastest(bench, [each for each in held if each not in exact]),
        )


def _fastest(bench: AttentionBench, found: Sequence[LongestLength]) -> str | None:
    """The fastest at the longest length that was measured of all of them, on one GPU if any."""
    alone = [each for each in found if each.mode == "single"] or found
    if not alone:
        return None
    times = [times_s(bench, each.entry) for each in alone]
    common = max(set(times[0]).intersection(*times), default=None)
    if common is None:
        return max(alone, key=lambda each: each.fits_tokens or 0).implementation
    return min(zip(alone, times, strict=True), key=lambda each: each[1][common])[0].implementation

"""What follows from a benchmark of attentions: the longest lengths, ratios to dense, the fit of
memory, other GPUs, what sharing brings, and what to use for which lengths. Pure: figures in,
figures out; ``pages/attention`` says them.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from highwater.memory.attention_fit import MemoryFit, memory_fit
from highwater.memory.formula.constants import CONTEXT_BYTES
from highwater.nouns.attention_bench import (
    IMPLEMENTATIONS,
    AttentionBench,
    BenchRow,
    Direction,
    Mode,
)
from highwater.nouns.codec import Record
from highwater.nouns.hardware import gpu_catalog, lacking, runs_trials

Why = Literal["ran out of memory", "took too long", "crashed", "longest tried", "red"]
_USE_CASES = ((16_384, 32_768), (32_768, 65_536), (65_536, 131_072), (131_072, None))
FAR = 64
"""Times past the longest measured length that a prediction goes at the most."""
_RINGS = (2, 4, 8)
"""GPUs that a sequence is shared among, where what this would bring is predicted."""


class Entry(NamedTuple):
    """What a line of the report is about."""

    implementation: str
    mode: Mode
    direction: Direction


class LongestLength(Record, frozen=True, kw_only=True):
    """The longest length that an implementation held."""

    implementation: str
    mode: Mode
    direction: Direction
    gpus: int
    fits_tokens: int | None
    """None where none did."""
    fails_tokens: int | None
    """The shortest above it that did not."""
    why: Why
    """What ended it."""
    row: BenchRow | None
    """What it costs there."""


class RatioToDense(Record, frozen=True, kw_only=True):
    """A case beside dense attention of the same direction, length and batch on one GPU."""

    implementation: str
    mode: Mode
    direction: Direction
    length_tokens: int
    batch: int
    speedup: float
    """Dense attention's time, of this one's: above 1 it is faster."""
    peak_ratio: float
    """Its peak allocated, of dense attention's."""


class MemoryEstimate(Record, frozen=True, kw_only=True):
    """The formula of an implementation's memory."""

    implementation: str
    mode: Mode
    direction: Direction
    fit: MemoryFit
    reserved_ratio: float
    """What the allocator reserved at the longest length, of what was allocated; 1 on the CPU."""


class PredictedLongest(Record, frozen=True, kw_only=True):
    """Predicted: the longest length on another kind of GPU, by memory alone."""

    gpu: str
    memory_bytes: int
    implementation: str
    mode: Mode
    direction: Direction
    gpus: int
    tokens: int
    is_least: bool
    """Whether more is predicted, so far past what was measured that nothing is said of it."""
    lacking: tuple[str, ...] = ()
    """What this kind has not, and what was measured may need."""


class ScalingEfficiency(Record, frozen=True, kw_only=True):
    """What several GPUs bring over one."""

    implementation: str
    mode: Mode
    direction: Direction
    gpus: int
    length_tokens: int
    speedup: float
    """Tokens a second, of one GPU's with dense attention, or the same one, at this length."""
    length_ratio: float | None
    """The longest length, of one GPU's; None where either was not found, or nothing longer was
    tried of both."""

    @property
    def efficiency(self) -> float:
        """Speed-up for each GPU."""
        return self.speedup / self.gpus


class AttentionChoice(Record, frozen=True, kw_only=True):
    """An implementation for a range of lengths."""

    implementation: str
    holds_tokens: int
    """Longest of the range that it holds."""
    is_measured: bool
    """Whether a length was measured that long; else it is predicted."""
    time_s: float | None
    """Measured at the range's end; None where that was not."""


class UseCase(Record, frozen=True, kw_only=True):
    """A range of lengths, and what holds it on one GPU."""

    from_tokens: int
    to_tokens: int | None
    """None: as long as can be."""
    direction: Direction
    exact: AttentionChoice | None
    """The fastest that attends as dense attention does."""
    sparse: AttentionChoice | None
    """The fastest that makes it another model."""
    shared: dict[str, int]
    """Predicted: the longest length of dense attention that so many GPUs hold together by a
    ring."""


class RecomputeGain(Record, frozen=True, kw_only=True):
    """What recomputing an attention in the backward pass would free, and cost."""

    implementation: str
    length_tokens: int
    freed_bytes: int
    peak_bytes: int
    added_time_share: float
    """A forward pass, of a forward and backward one."""


class BatchGain(Record, frozen=True, kw_only=True):
    """Tokens a second of several sequences, of one sequence's."""

    implementation: str
    direction: Direction
    length_tokens: int
    batch: int
    speedup: float


class AttentionSummary(Record, frozen=True, kw_only=True):
    """All of it."""

    longest: tuple[LongestLength, ...]
    ratios: tuple[RatioToDense, ...]
    estimates: tuple[MemoryEstimate, ...]
    predicted: tuple[PredictedLongest, ...]
    efficiencies: tuple[ScalingEfficiency, ...]
    use_cases: tuple[UseCase, ...]
    recompute: tuple[RecomputeGain, ...]
    batches: tuple[BatchGain, ...]


def attention_summary(bench: AttentionBench) -> AttentionSummary:
    """Everything that the measured figures tell."""
    longest = tuple(_longest(bench))
    estimates = tuple(_estimates(bench))
    return AttentionSummary(
        longest=longest,
        ratios=tuple(_ratios(bench)),
        estimates=estimates,
        predicted=tuple(_predicted(bench, estimates)),
        efficiencies=tuple(_efficiencies(bench, longest)),
        use_cases=tuple(_use_cases(bench, longest, estimates)),
        recompute=tuple(_recompute(bench)),
        batches=tuple(_batches(bench)),
    )


def entries(bench: AttentionBench) -> list[Entry]:
    """What was measured, in its order."""
    return list(
        dict.fromkeys(Entry(row.implementation, row.mode, row.direction) for row in bench.rows)
    )


def rows_of(bench: AttentionBench, entry: Entry, *, batches: bool = False) -> list[BenchRow]:
    """The rows of one, by length; ``batches``: those of several sequences on one GPU too."""
    rows = [
        row
        for row in bench.rows
        if Entry(row.implementation, row.mode, row.direction) == entry
        and (batches or row.batch == 1 or row.mode == "data parallel")
    ]
    return sorted(rows, key=lambda row: (row.length_tokens or 0, row.batch))


def peak_bytes(row: BenchRow) -> int:
    """Allocated at the peak, of the fullest GPU."""
    return max(row.peak_allocated_bytes, default=0)


def _longest(bench: AttentionBench) -> Iterator[LongestLength]:
    for entry in entries(bench):
        rows = rows_of(bench, entry)
        best = max((row for row in rows if row.fits), key=_length, default=None)
        fits = None if best is None else _length(best)
        above = [row for row in rows if not row.fits and _length(row) > (fits or 0)]
        first = min(above, key=_length, default=None)
        is_red = any(row.result == "red" for row in rows)
        why: Why = "red" if is_red else "longest tried"
        if first is not None and first.result not in ("fits", "red"):
            why = first.result
        yield LongestLength(
            implementation=entry.implementation,
            mode=entry.mode,
            direction=entry.direction,
            gpus=rows[0].gpus,
            fits_tokens=fits,
            fails_tokens=None if first is None else _length(first),
            why=why,
            row=best,
        )


def _length(row: BenchRow) -> int:
    return row.length_tokens or 0


def _dense_rows(bench: AttentionBench) -> dict[tuple[Direction, int, int], BenchRow]:
    return {
        (row.direction, _length(row), row.batch): row
        for row in bench.rows
        if row.fits and row.implementation == "dense" and row.mode == "single"
    }


def _ratios(bench: AttentionBench) -> Iterator[RatioToDense]:
    dense = _dense_rows(bench)
    for row in bench.rows:
        other = dense.get((row.direction, _length(row), row.batch))
        if other is None or not row.fits or not row.time_s or not other.time_s:
            continue
        if row is not other:
            yield RatioToDense(
                implementation=row.implementation,
                mode=row.mode,
                direction=row.direction,
                length_tokens=_length(row),
                batch=row.batch,
                speedup=other.time_s / row.time_s,
                peak_ratio=peak_bytes(row) / max(1, peak_bytes(other)),
            )


def _estimates(bench: AttentionBench) -> Iterator[MemoryEstimate]:
    for entry in entries(bench):
        if entry.mode == "data parallel":  # each GPU has what one has alone
            continue
        rows = [row for row in rows_of(bench, entry) if row.fits]
        fit = memory_fit([(_length(row), peak_bytes(row)) for row in rows])
        if fit is None:
            continue
        last = rows[-1]
        reserved = max(last.peak_reserved_bytes) / max(1, peak_bytes(last))
        yield MemoryEstimate(
            implementation=entry.implementation,
            mode=entry.mode,
            direction=entry.direction,
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
            tokens, farthest = each.fit.longest_within(free), FAR * each.fit.longest_tokens
            yield PredictedLongest(
                gpu=kind.name,
                memory_bytes=kind.usable_bytes,
                implementation=each.implementation,
                mode=each.mode,
                direction=each.direction,
                gpus=1 if each.mode == "single" else bench.order.gpus,
                tokens=min(tokens, farthest),
                is_least=tokens > farthest,
                lacking=lacking(kind),
            )


def _efficiencies(
    bench: AttentionBench, longest: Sequence[LongestLength]
) -> Iterator[ScalingEfficiency]:
    ends = {Entry(each.implementation, each.mode, each.direction): each for each in longest}
    for entry in entries(bench):
        if entry.mode == "single":
            continue
        one = Entry(bench.order.alone(entry.implementation), "single", entry.direction)
        times_s = {_length(row): row.time_s for row in rows_of(bench, one) if row.time_s}
        both = [row for row in rows_of(bench, entry) if row.time_s and _length(row) in times_s]
        if not both:
            continue
        row = both[-1]
        own, its = ends[entry], ends[one]
        is_found = own.fits_tokens and not own.why == its.why == "longest tried"
        yield ScalingEfficiency(
            implementation=entry.implementation,
            mode=entry.mode,
            direction=entry.direction,
            gpus=row.gpus,
            length_tokens=_length(row),
            speedup=row.batch * times_s[_length(row)] / (row.time_s or 1.0),
            length_ratio=(own.fits_tokens or 0) / (its.fits_tokens or 1) if is_found else None,
        )


def _use_cases(
    bench: AttentionBench,
    longest: Sequence[LongestLength],
    estimates: Sequence[MemoryEstimate],
) -> Iterator[UseCase]:
    """For training where that was measured, else forward alone."""
    if not bench.rows:
        return
    direction = bench.order.directions[-1]
    of_direction = {
        each.implementation: each
        for each in longest
        if each.mode == "single" and each.direction == direction and each.fits_tokens
    }
    fits = {
        each.implementation: each
        for each in estimates
        if each.mode == "single" and each.direction == direction
    }
    for start, end in _USE_CASES:
        choices = [
            choice
            for name, each in of_direction.items()
            if name != "reference"
            and (choice := _choice(bench, each, fits.get(name), start, end)) is not None
        ]
        exact = [each for each in choices if not IMPLEMENTATIONS[each.implementation].changes_model]
        sparse = [each for each in choices if each not in exact]
        yield UseCase(
            from_tokens=start,
            to_tokens=end,
            direction=direction,
            exact=_fastest(bench, exact, direction),
            sparse=_fastest(bench, sparse, direction),
            shared=_shared(bench, estimates, direction),
        )


def _choice(
    bench: AttentionBench,
    longest: LongestLength,
    estimate: MemoryEstimate | None,
    start: int,
    end: int | None,
) -> AttentionChoice | None:
    """An implementation where it holds the end of a range, or of an open one more than its
    start; None where it does not.
    """
    held, is_measured = longest.fits_tokens or 0, True
    if longest.why == "longest tried" and held < (end or start + 1) and estimate is not None:
        free = _memory_bytes(bench) - bench.machine.outside_bytes
        predicted = estimate.fit.longest_within(free / estimate.reserved_ratio)
        held = max(held, min(predicted, FAR * estimate.fit.longest_tokens))
        is_measured = False
    if held < (end or start + 1):
        return None
    entry = Entry(longest.implementation, "single", longest.direction)
    wanted = end or longest.fits_tokens
    times = [row.time_s for row in rows_of(bench, entry) if row.fits and _length(row) == wanted]
    return AttentionChoice(
        implementation=longest.implementation,
        holds_tokens=end or held,
        is_measured=is_measured,
        time_s=times[0] if times and (end or is_measured) else None,
    )


def _memory_bytes(bench: AttentionBench) -> int:
    return bench.order.memory_bytes or bench.machine.memory_total_bytes


def _fastest(
    bench: AttentionBench, choices: Sequence[AttentionChoice], direction: Direction
) -> AttentionChoice | None:
    """The fastest at the longest length that was measured of all of them."""
    times: dict[str, dict[int, float]] = {
        each.implementation: {
            _length(row): row.time_s
            for row in rows_of(bench, Entry(each.implementation, "single", direction))
            if row.fits and row.time_s
        }
        for each in choices
    }
    common = set.intersection(*(set(of) for of in times.values())) if times else set[int]()
    if not common:
        return max(choices, key=lambda each: each.holds_tokens, default=None)
    return min(choices, key=lambda each: times[each.implementation][max(common)])


def _shared(
    bench: AttentionBench, estimates: Sequence[MemoryEstimate], direction: Direction
) -> dict[str, int]:
    """By the measured ring, whose shares shrink with its GPUs, or else by dense attention alone."""
    by_mode = {
        (each.implementation, each.mode): each
        for each in estimates
        if each.direction == direction and each.implementation in ("ring", "dense")
    }
    ring, dense = by_mode.get(("ring", "ring")), by_mode.get(("dense", "single"))
    estimate = ring or dense
    if estimate is None:
        return {}
    gpus = bench.order.gpus if ring is not None else 1
    free = (_memory_bytes(bench) - bench.machine.outside_bytes) / estimate.reserved_ratio
    longest = min(estimate.fit.longest_within(free), FAR * estimate.fit.longest_tokens)
    return {str(count): count * longest // gpus for count in _RINGS}


def _recompute(bench: AttentionBench) -> Iterator[RecomputeGain]:
    for name in dict.fromkeys(row.implementation for row in bench.rows):
        forward, both = (
            {
                _length(row): row
                for row in rows_of(bench, Entry(name, "single", direction))
                if row.time_s
            }
            for direction in ("forward", "forward+backward")
        )
        common = forward.keys() & both.keys()
        if not common or name == "reference":
            continue
        length = max(common)
        whole, part = both[length], forward[length]
        yield RecomputeGain(
            implementation=name,
            length_tokens=length,
            freed_bytes=max(whole.kept_for_backward_bytes, default=0),
            peak_bytes=peak_bytes(whole),
            added_time_share=(part.time_s or 0.0) / (whole.time_s or 1.0),
        )


def _batches(bench: AttentionBench) -> Iterator[BatchGain]:
    for entry in entries(bench):
        if entry.mode != "single":
            continue
        rows = [row for row in rows_of(bench, entry, batches=True) if row.fits]
        alone = {_length(row): row for row in rows if row.batch == 1}
        for row in rows:
            one = alone.get(_length(row))
            if row.batch > 1 and one is not None and one.time_s and row.time_s:
                yield BatchGain(
                    implementation=entry.implementation,
                    direction=entry.direction,
                    length_tokens=_length(row),
                    batch=row.batch,
                    speedup=row.batch * one.time_s / row.time_s,
                )

"""Traces of the reference trainer's step that come with the package: one for each model and layout
of the published table, for any length.

``docs/results/lab/trinity.py`` makes the file, by ``highwater.engine.tracer.tracer`` with the
trainer ``trinity``. A cell that it has is answered by replay, with the fragmentation that follows
from the order of allocations; every other cell by the closed form.
"""

import lzma
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

import msgspec

from highwater.memory.capacity import Asked, CellPrediction, MemoryLimit, predict_at
from highwater.memory.formula.constants import CUBLAS_WORKSPACES_BYTES, Term
from highwater.memory.trace.exact import edge, ended
from highwater.memory.trace.replay import Replayed, alive_at
from highwater.memory.trace.scaled_trace import ScaledTrace, replay_scaled
from highwater.memory.trinity.closed_form import footprint, tokens_of_a_gpu
from highwater.model.model import ModelShape
from highwater.nouns.codec import Record, from_json
from highwater.nouns.corpus import least_packed
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Allocator
from highwater.nouns.study import Cell, Question, risk_of
from highwater.units import GIB

FILE = Path(__file__).with_name("trinity.json.xz")
ACCURACY = (
    "by replay of a trace, which has of the published A100 table 39 of 40 cells with expandable "
    "segments and 34 of 40 without, and all but two of the others within one step of the grid"
)
"""What is known of its errors."""
OUTSIDE_BYTES: Mapping[bool, int] = {False: round(2.0 * GIB), True: round(3.5 * GIB)}
"""What is not in a trace, by whether GPUs share sequences: context, NCCL, whatever else the
trainer's workers hold. Fitted to the published A100 table, of whose cells 2.0, by one, and 3.2 to
3.7 GiB alike give the most exactly (docs/results/lab/outside_scan.py). Of these workers themselves
H200s have 1.6 and 2.0 to 2.8 GiB outside the allocator (docs/results/lab, Outside the
allocator)."""


class BundledTrace(Record, frozen=True, kw_only=True):
    """The step of one model on one layout, on the fullest rank."""

    shape: ModelShape
    layout: Layout
    log: ScaledTrace


_Place = tuple[ModelShape, Layout]


class _Undecoded(Record, frozen=True, kw_only=True):
    """A bundled trace whose log is read once it is asked for: all 40 take a third of a second."""

    shape: ModelShape
    layout: Layout
    log: msgspec.Raw


def covers(shape: ModelShape, cell: Cell) -> bool:
    """Whether a bundled trace speaks of a model's cell."""
    is_whole = cell.settings.offload is False and cell.settings.lora is None
    return is_whole and (shape, cell.layout) in _logs()


def bundled_trace(shape: ModelShape, cell: Cell) -> ScaledTrace | None:
    """The trace of this cell, where there is one that speaks of it: FSDP, no offload, AdamW in
    float32, all of the model trained.
    """
    return _log((shape, cell.layout)) if covers(shape, cell) else None


def replay_cell(
    question: Question,
    cell: Cell,
    memory_limit: MemoryLimit,
    guessed: CellPrediction,
    asked: Asked,
) -> CellPrediction:
    """The cell's longest length by replay, from where the closed form guesses it.

    A token budget packs the fewest tokens of one length, the most of the shorter ones, and ever
    more above it: fitting is looked for from that length on, as for our own steps, and below it
    where it does not fit itself.
    """
    grid, size = question.grid, max(1, question.size_of(cell))
    if guessed.binding == "host":
        size = grid.index_at_most(guessed.capacity_tokens)
    if not size:
        return guessed  # not even the shortest, which no replay would change
    outside_bytes = OUTSIDE_BYTES[cell.layout.context_degree > 1]
    device_bytes = memory_limit.device_bytes
    capacity_bytes = device_bytes - outside_bytes
    place = question.model.shape, cell.layout
    allocator = cell.settings.allocator

    def at_index(index: int) -> _Replay | None:
        tokens = tokens_of_a_gpu(cell.settings, cell.layout, grid.length(index))
        return _replayed(place, tokens, allocator, capacity_bytes)

    def fits(index: int) -> bool:
        return at_index(index) is not None

    shortest = least_packed(question, cell, size)

    def longest_from(guessed_tokens: int) -> int:
        start = min(size, max(shortest, grid.index_at_most(guessed_tokens)))
        return edge(start, size, fits, shortest=shortest) or edge(1, shortest - 1, fits)

    likely = None
    if asked == "everything":
        likely = longest_from(guessed.likely_edge_tokens)
    if question.margin_bytes or likely is None:
        capacity_bytes -= question.margin_bytes
        longest = longest_from(guessed.capacity_tokens)
    else:
        longest = likely
    if not longest and asked == "fit":
        return msgspec.structs.replace(guessed, capacity_tokens=0)
    at = max(1, longest)
    tokens = tokens_of_a_gpu(cell.settings, cell.layout, grid.length(at))
    replayed = at_index(at) or _needed(place, tokens, allocator)
    found = predict_at(question, cell, memory_limit, footprint, grid.length(at))
    outside = (Term(name="context, NCCL and the rest", bytes=outside_bytes),)
    found = msgspec.structs.replace(
        found,
        footprint=msgspec.structs.replace(found.footprint, outside=outside),
        replayed=replayed.with_alive() if asked == "everything" else replayed.found,
    )
    found = ended(question, found, longest, size, guessed)
    used_bytes = found.device_used_bytes
    headroom_bytes = device_bytes - used_bytes
    return msgspec.structs.replace(
        found,
        likely_tokens=likely and grid.length(likely),
        headroom_bytes=headroom_bytes,
        lacks_bytes=max(0, question.margin_bytes - headroom_bytes) or None,
        risk=risk_of(
            headroom_bytes=headroom_bytes,
            pessimistic_bytes=used_bytes,
            device_bytes=device_bytes,
            whole_bytes=question.device_total_bytes,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replay:
    """One replay, a twelfth of a second."""

    place: _Place
    tokens: int
    found: Replayed
    """But for what is alive at the peak."""
    peak_at: int
    """Events before the peak."""

    def with_alive(self) -> Replayed:
        alive = alive_at(_log(self.place).at(self.tokens), self.peak_at)
        return msgspec.structs.replace(self.found, alive=alive)


@lru_cache(maxsize=1024)
def _replayed(
    place: _Place, tokens: int, allocator: Allocator, capacity_bytes: int
) -> _Replay | None:
    """A replay, or None where it does not fit; what is alive at once may be too much without one,
    and what never came to the end of a smaller GPU does in a larger one as it did there.

    Of two lengths that give a GPU as many tokens, the first alone takes it.
    """
    if _least_bytes(place, tokens) + sum(CUBLAS_WORKSPACES_BYTES) > capacity_bytes:
        return None
    roomy = _ROOMY.get((place, tokens, allocator))
    if roomy is not None and roomy.found.peak_reserved_bytes <= capacity_bytes:
        return roomy
    replay = _replay(place, tokens, allocator, capacity_bytes)
    return replay if replay.found.fits else None


@lru_cache(maxsize=1024)
def _needed(place: _Place, tokens: int, allocator: Allocator) -> _Replay:
    """What the shortest would need, where not even that fits."""
    replay = _replay(place, tokens, allocator, None)
    return replace(replay, found=msgspec.structs.replace(replay.found, fits=False))


_ROOMY: dict[tuple[_Place, int, Allocator], _Replay] = {}
"""Replays that gave nothing back for want of memory."""


def _replay(
    place: _Place, tokens: int, allocator: Allocator, capacity_bytes: int | None
) -> _Replay:
    found, peak_at = replay_scaled(
        _log(place), tokens, allocator=allocator, capacity_bytes=capacity_bytes
    )
    replay = _Replay(place=place, tokens=tokens, found=found, peak_at=peak_at)
    if not found.retries:
        _ROOMY[place, tokens, allocator] = replay
    return replay


@lru_cache(maxsize=1024)
def _least_bytes(place: _Place, tokens: int) -> int:
    return _log(place).least_bytes(tokens)


@cache
def _log(place: _Place) -> ScaledTrace:
    return from_json(bytes(_logs()[place]), ScaledTrace)


@cache
def _logs() -> dict[_Place, msgspec.Raw]:
    traces = from_json(lzma.decompress(FILE.read_bytes()), tuple[_Undecoded, ...])
    return {(trace.shape, trace.layout): trace.log for trace in traces}

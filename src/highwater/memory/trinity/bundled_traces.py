"""Traces of the reference trainer's step that come with the package: one for each model and layout
of the published table, for any length.

``docs/results/lab/trinity.py`` makes the file, by ``highwater.tracer.tracer`` with the trainer
``trinity``. A cell that it has is answered by replay, with the fragmentation that follows from the
order of allocations; every other cell by the closed form.
"""

import lzma
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path

import msgspec

from highwater.memory.capacity import CellPrediction, MemoryLimit, predict_at
from highwater.memory.formula.breakdown import Term
from highwater.memory.formula.constants import CUBLAS_WORKSPACES_BYTES
from highwater.memory.trace.exact import edge, ended
from highwater.memory.trace.replay import Replayed, needed, replay
from highwater.memory.trace.scaled_trace import ScaledTrace
from highwater.memory.trinity.closed_form import footprint, tokens_of_a_gpu
from highwater.spec.codec import Record, from_json
from highwater.spec.headroom import risk_of
from highwater.spec.layout import Layout
from highwater.spec.model import ModelShape
from highwater.spec.packing import least_packed
from highwater.spec.settings import Allocator
from highwater.spec.study import Cell, Question
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


def covers(shape: ModelShape, cell: Cell) -> bool:
    """Whether a bundled trace speaks of a model's cell."""
    return bundled_trace(shape, cell) is not None


def bundled_trace(shape: ModelShape, cell: Cell) -> ScaledTrace | None:
    """The trace of this cell, where there is one that speaks of it: FSDP, no offload, AdamW in
    float32, all of the model trained.
    """
    if cell.settings.offload is not False or cell.settings.lora is not None:
        return None
    return _logs().get((shape, cell.layout))


def replay_cell(
    question: Question, cell: Cell, memory_limit: MemoryLimit, guessed: CellPrediction
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
    replays: dict[int, Replayed] = {}

    def fits(index: int) -> bool:
        tokens = tokens_of_a_gpu(cell.settings, cell.layout, grid.length(index))
        found = _replayed(place, tokens, cell.settings.allocator, capacity_bytes)
        if found is None and index == 1:
            found = _needed(place, tokens, cell.settings.allocator)
        if found is not None:
            replays[index] = found
        return found is not None and found.fits

    shortest = least_packed(question, cell, size)

    def longest_from(guessed_tokens: int) -> int:
        start = min(size, max(shortest, grid.index_at_most(guessed_tokens)))
        return edge(start, size, fits, shortest=shortest) or edge(1, shortest - 1, fits)

    likely = longest = longest_from(guessed.likely_edge_tokens)
    if question.margin_bytes:
        capacity_bytes -= question.margin_bytes
        replays.clear()
        longest = longest_from(guessed.capacity_tokens)
    at = max(1, longest)
    if at not in replays:
        fits(at)
    found = predict_at(question, cell, memory_limit, footprint, grid.length(at))
    outside = (Term(name="context, NCCL and the rest", bytes=outside_bytes),)
    found = msgspec.structs.replace(
        found,
        footprint=msgspec.structs.replace(found.footprint, outside=outside),
        replayed=replays[at],
    )
    found = ended(question, found, longest, size, guessed)
    used_bytes = found.device_used_bytes
    headroom_bytes = device_bytes - used_bytes
    return msgspec.structs.replace(
        found,
        likely_tokens=grid.length(likely) if likely else 0,
        headroom_bytes=headroom_bytes,
        lacks_bytes=max(0, question.margin_bytes - headroom_bytes) or None,
        risk=risk_of(
            headroom_bytes=headroom_bytes,
            pessimistic_bytes=used_bytes,
            device_bytes=device_bytes,
            whole_bytes=question.device_total_bytes,
        ),
    )


@lru_cache(maxsize=1024)
def _replayed(
    place: tuple[ModelShape, Layout], tokens: int, allocator: Allocator, capacity_bytes: int
) -> Replayed | None:
    """One replay, a sixth of a second, or None where it does not fit; what is alive at once may be
    too much without one.

    Of two lengths that give a GPU as many tokens, the first alone takes it.
    """
    log = _logs()[place]
    if log.least_bytes(tokens) + sum(CUBLAS_WORKSPACES_BYTES) > capacity_bytes:
        return None
    found = replay(log.at(tokens), allocator=allocator, capacity_bytes=capacity_bytes)
    return found if found.fits else None


@lru_cache(maxsize=1024)
def _needed(place: tuple[ModelShape, Layout], tokens: int, allocator: Allocator) -> Replayed:
    """What the shortest would need, where not even that fits."""
    return needed(_logs()[place].at(tokens), allocator=allocator)


@cache
def _logs() -> dict[tuple[ModelShape, Layout], ScaledTrace]:
    traces = from_json(lzma.decompress(FILE.read_bytes()), tuple[BundledTrace, ...])
    return {(trace.shape, trace.layout): trace.log for trace in traces}

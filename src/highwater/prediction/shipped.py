"""Shipped: traces of the reference system's step, one for each model and layout of the published table, for any length.

``docs/results/predict/trinity.py`` makes the file, by ``highwater.engine.tracer`` with the trainer ``trinity``. A cell that it has
is answered by replay, with the fragmentation that follows from the order of allocations; every other cell by the closed form.
"""

import lzma
from functools import cache, lru_cache
from pathlib import Path

import msgspec

from highwater.prediction.affine import AffineLog
from highwater.prediction.capacity import CellPrediction, Room, predict_at, predict_cells
from highwater.prediction.constants import CUBLAS_WORKSPACES_BYTES, TRINITY_OUTSIDE_BYTES
from highwater.prediction.exact import edge, ended
from highwater.prediction.replay import Replayed, needed, replay
from highwater.prediction.terms import Term
from highwater.prediction.trinity import footprint, tokens_of_a_gpu
from highwater.spec.codec import Noun, from_json
from highwater.spec.layout import Layout
from highwater.spec.model import STATE_BYTES_PER_PARAMETER, ModelShape
from highwater.spec.packing import least_packed
from highwater.spec.settings import Allocator
from highwater.spec.study import Cell, Question

FILE = Path(__file__).with_name("trinity.json.xz")


class ShippedTrace(Noun, frozen=True, kw_only=True):
    """The step of one model on one layout, on the fullest rank."""

    shape: ModelShape
    layout: Layout
    log: AffineLog


def predict_trinity(question: Question, room: Room) -> tuple[CellPrediction, ...]:
    """Every cell of the question for the reference system's trainer, in its order: by replay where a trace is shipped."""
    guessed = predict_cells(question, room, "trinity")
    return tuple(
        guess if shipped(question.model.shape, cell, room) is None else replay_cell(question, cell, room, guess)
        for cell, guess in zip(question.cells, guessed, strict=True)
    )


def by_replay(replayed: int, cells: int) -> str:
    """How many of so many cells a replay answered, in words."""
    if not replayed:
        return f"no cell by replay of a trace that comes with the package: all {cells} by formula"
    others = "" if replayed == cells else ", the others by formula"
    return f"{replayed} of {cells} cells by replay of a trace that comes with the package{others}"


def shipped(shape: ModelShape, cell: Cell, room: Room) -> AffineLog | None:
    """The trace of this cell, where there is one that speaks of it: FSDP, no offload, AdamW in float32."""
    if cell.settings.offload or room.state_bytes_per_parameter != STATE_BYTES_PER_PARAMETER:
        return None
    return _logs().get((shape, cell.layout))


def replay_cell(question: Question, cell: Cell, room: Room, guessed: CellPrediction) -> CellPrediction:
    """The cell's longest length by replay, from where the closed form guesses it.

    A token budget packs the fewest tokens of one length, the most of the shorter ones, and ever more above it: fitting is looked
    for from that length on, as for our own steps, and below it where it does not fit itself.
    """
    grid, size = question.grid, max(1, question.size_of(cell))
    if guessed.binding == "host":
        size = grid.index_at_most(guessed.capacity_tokens)
    if not size:
        return guessed  # not even the shortest, which no replay would change
    outside_bytes = TRINITY_OUTSIDE_BYTES[cell.layout.context_degree > 1]
    capacity_bytes = room.device_bytes - question.margin_bytes - outside_bytes
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
    start = min(size, max(shortest, grid.index_at_most(guessed.capacity_tokens)))
    longest = edge(start, size, fits, shortest=shortest) or edge(1, shortest - 1, fits)
    at = max(1, longest)
    found = predict_at(question, cell, room, footprint, grid.length(at))
    outside = (Term(name="context, NCCL and the rest", bytes=outside_bytes),)
    found = msgspec.structs.replace(
        found, footprint=msgspec.structs.replace(found.footprint, outside=outside), replayed=replays[at]
    )
    found = ended(question, found, longest, size, guessed)
    headroom_bytes = room.device_bytes - found.device_used_bytes
    return msgspec.structs.replace(found, likely_tokens=found.capacity_tokens, headroom_bytes=headroom_bytes)


@lru_cache(maxsize=1024)
def _replayed(place: tuple[ModelShape, Layout], tokens: int, allocator: Allocator, capacity_bytes: int) -> Replayed | None:
    """One replay, a sixth of a second, or None where it does not fit; what is alive at once may be too much without one.

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
def _logs() -> dict[tuple[ModelShape, Layout], AffineLog]:
    traces = from_json(lzma.decompress(FILE.read_bytes()), tuple[ShippedTrace, ...])
    return {(trace.shape, trace.layout): trace.log for trace in traces}

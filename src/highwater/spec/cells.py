"""The cells that a request asks about: every layout that can work, on every rung of its ladder."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from highwater.errors import UsageError
from highwater.spec.grid import Grid
from highwater.spec.ladder import default_ladder
from highwater.spec.layout import Layout
from highwater.spec.model import ModelShape
from highwater.spec.request import Request
from highwater.spec.settings import Strategy
from highwater.spec.study import Cell, counted_ranks
from highwater.spec.trial import Device
from highwater.units import format_tokens


def cells_of(
    request: Request,
    shape: ModelShape,
    device: Device,
    counts: tuple[int, ...],
    *,
    has_ring: bool = True,
) -> tuple[tuple[Cell, ...], tuple[str, ...]]:
    """Every layout that can work, on every rung; and a note for each that is skipped.

    ``has_ring``: of a trainer that can share sequences by a ring.
    """
    if device == "cpu" and request.allocator == "expandable":
        raise UsageError(
            "`--device cpu` and `--allocator expandable` exclude each other",
            hint="leave `--allocator` out",
        )
    rungs = default_ladder(
        device=device,
        base=request.common_settings,
        allocator=request.allocator,
        loss=request.loss,
    )
    asked = list(dict.fromkeys(_asked(request, counts)))
    obstacles = {each: _obstacle(each, shape, device, request.strategy) for each in asked}
    layouts = [each.layout for each, obstacle in obstacles.items() if obstacle is None]
    skipped = {each: why for each, why in obstacles.items() if why is not None}
    if not layouts:
        works = _offers(list(skipped), shape, counts, has_ring=has_ring)
        problem = "; ".join(f"{each.label_on(device)}: {why}" for each, why in skipped.items())
        raise UsageError(problem, hint=f"use {works}")
    cells = tuple(Cell(layout=layout, settings=rung) for layout, rung in product(layouts, rungs))
    return cells, tuple(
        f"{each.label_on(device)} is skipped: {why}" for each, why in skipped.items()
    )


def within_token_budget(
    cells: tuple[Cell, ...], grid: Grid, device: Device
) -> tuple[tuple[Cell, ...], tuple[str, ...]]:
    """The cells whose token budget holds a sequence of the start length, and a note for each that
    does not; all where none does.
    """
    kept = [
        cell
        for cell in cells
        if cell.settings.sequences(grid.start_tokens, context_degree=cell.layout.context_degree)
    ]
    if not kept:
        return cells, ()
    skipped = [cell.label_on(device) for cell in cells if cell not in kept]
    why = (
        f"is skipped: its token budget does not hold a sequence of "
        f"{format_tokens(grid.start_tokens)} tokens"
    )
    return tuple(kept), tuple(f"{label} {why}" for label in skipped)


def heads_obstacle(shape: ModelShape, degree: int) -> str | None:
    """Why this many GPUs cannot trade heads, in words; None when they can."""
    if shape.query_heads % degree:
        return f"{degree} does not divide the model's {shape.query_heads} query heads"
    if shape.kv_heads % degree and degree % shape.kv_heads:
        return f"{degree} and the model's {shape.kv_heads} key/value heads do not divide each other"
    return None


class _Degrees(NamedTuple):
    """A layout that was asked for, and may not be one."""

    gpus: int
    ulysses: int
    ring: int
    copies: int

    @property
    def layout(self) -> Layout:
        return Layout(
            gpus=self.gpus,
            ulysses_degree=self.ulysses,
            ring_degree=self.ring,
            replicate_degree=self.copies,
        )

    def label_on(self, device: Device) -> str:
        """``SP=2, ring=3 on 6 GPUs``."""
        # on as many as the degrees would do on, a layout that is one has their spelling
        whole = self._replace(gpus=self.ulysses * self.ring * self.copies).layout
        degrees = whole.degrees if self.ulysses > 1 else (f"SP={self.ulysses}", *whole.degrees)
        return f"{', '.join(degrees)} on {counted_ranks(self.gpus, device)}"


def _asked(request: Request, counts: tuple[int, ...]) -> Iterator[_Degrees]:
    for each in product(counts, request.ulysses, request.ring, request.copies):
        yield _Degrees(*each)


def _obstacle(asked: _Degrees, shape: ModelShape, device: Device, strategy: Strategy) -> str | None:
    """Why so many GPUs cannot be laid out so, in words; None when they can."""
    ranks, context = counted_ranks(asked.gpus, device), asked.ulysses * asked.ring
    if asked.gpus % context:
        product_ = f" x {asked.ring} = {context}" if asked.ring > 1 else ""
        return f"{asked.ulysses}{product_} does not divide {ranks}"
    if asked.gpus % asked.copies:
        return f"{asked.copies} copies do not divide {ranks}"
    if asked.copies > 1 and strategy != "fsdp2":
        return "FSDP1 keeps no copies of its shards"
    return heads_obstacle(shape, asked.ulysses)


def _offers(
    refused: Sequence[_Degrees], shape: ModelShape, counts: tuple[int, ...], *, has_ring: bool
) -> str:
    """Flags that work in the place of what was asked for: a ring that shares a sequence among as
    many GPUs, the number of copies, every degree that some of the counts can trade heads by.
    """
    if all(heads_obstacle(shape, each.ulysses) is None for each in refused):
        without = [each for each in refused if each.gpus % (each.ulysses * each.ring) == 0]
        if without:
            return "`--copies 1`"
    rings = [_with_ring(each, shape) for each in refused] if has_ring else []
    degrees = (
        f"`--ulysses {degree}{' --ring 1' if any(each.ring > 1 for each in refused) else ''}`"
        for degree in range(1, min(max(counts), shape.query_heads) + 1)
        if heads_obstacle(shape, degree) is None and any(gpus % degree == 0 for gpus in counts)
    )
    works = list(dict.fromkeys((*(ring for ring in rings if ring is not None), *degrees)))
    return works[0] if len(works) == 1 else f"{', '.join(works[:-1])} or {works[-1]}"


def _with_ring(refused: _Degrees, shape: ModelShape) -> str | None:
    """The flags of a layout in which as many GPUs share a sequence, fewer of them by heads; None
    where there is none, or where they do not divide the GPUs.
    """
    context = refused.ulysses * refused.ring
    if refused.gpus % context:
        return None
    fewer = (degree for degree in range(refused.ulysses - 1, 0, -1) if context % degree == 0)
    works = next((degree for degree in fewer if heads_obstacle(shape, degree) is None), None)
    return None if works is None else f"`--ulysses {works} --ring {context // works}`"

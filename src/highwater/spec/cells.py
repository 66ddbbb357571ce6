"""The cells that a request asks about: every layout that can work, on every rung of its ladder."""

from itertools import product

from highwater.errors import UsageError
from highwater.spec.grid import Grid
from highwater.spec.ladder import default_ladder
from highwater.spec.layout import Layout
from highwater.spec.model import ModelShape
from highwater.spec.request import Request
from highwater.spec.study import Cell, counted_ranks
from highwater.spec.trial import Device
from highwater.units import format_tokens


def cells_of(
    request: Request, shape: ModelShape, device: Device, counts: tuple[int, ...]
) -> tuple[tuple[Cell, ...], tuple[str, ...]]:
    """Every layout that can work, on every rung; and a note for each pair of degrees that is
    skipped.
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
    layouts: list[Layout] = []
    skipped: list[tuple[str, str]] = []
    for gpus, degree in product(counts, dict.fromkeys(request.ulysses)):
        obstacle = ulysses_obstacle(shape, gpus=gpus, degree=degree, device=device)
        if obstacle is None:
            layouts.append(Layout(gpus=gpus, ulysses_degree=degree))
        else:
            skipped.append((f"SP={degree} on {counted_ranks(gpus, device)}", obstacle))
    if not layouts:
        works = _degrees(shape, counts, device)
        raise UsageError("; ".join(f"{what}: {why}" for what, why in skipped), hint=f"use {works}")
    cells = tuple(Cell(layout=layout, settings=rung) for layout, rung in product(layouts, rungs))
    return cells, tuple(f"{what} is skipped: {why}" for what, why in skipped)


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


def ulysses_obstacle(
    shape: ModelShape, *, gpus: int, degree: int, device: Device = "cuda"
) -> str | None:
    """Why this many GPUs cannot share a sequence by heads, in words; None when they can."""
    if gpus % degree:
        return f"{degree} does not divide {counted_ranks(gpus, device)}"
    if shape.query_heads % degree:
        return f"{degree} does not divide the model's {shape.query_heads} query heads"
    if shape.kv_heads % degree and degree % shape.kv_heads:
        return f"{degree} and the model's {shape.kv_heads} key/value heads do not divide each other"
    return None


def _degrees(shape: ModelShape, counts: tuple[int, ...], device: Device) -> str:
    """Every degree that some of these counts of GPUs can share a sequence by, as flags."""
    works = [
        f"`--ulysses {degree}`"
        for degree in range(1, min(max(counts), shape.query_heads) + 1)
        if any(
            ulysses_obstacle(shape, gpus=gpus, degree=degree, device=device) is None
            for gpus in counts
        )
    ]
    return works[0] if len(works) == 1 else f"{', '.join(works[:-1])} or {works[-1]}"

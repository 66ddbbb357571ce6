"""The ladder: rungs ordered from the cheapest to the most memory-saving, and cells from the
simplest on.
"""

import msgspec

from highwater.nouns.settings import Allocator, Loss, Offload, Settings
from highwater.nouns.study import Cell

_GPU_LADDER: tuple[tuple[Allocator, Loss], ...] = (
    ("native", "full"),
    ("expandable", "full"),
    ("expandable", "chunked"),
)
_CPU_LADDER: tuple[tuple[Allocator, Loss], ...] = (("native", "full"), ("native", "chunked"))
_OFFLOAD_ORDER: tuple[Offload, ...] = (False, "states", True)
"""What is in host memory, the least first."""
_RECOMPUTE_ORDER = ("none", "all-but-attention", "layer")
"""Kinds of recomputation, the simplest first, which computes nothing twice; any other is taken for
less simple than these."""


def default_ladder(
    *, device: str, base: Settings, allocator: Allocator | None = None, loss: Loss | None = None
) -> tuple[Settings, ...]:
    """Rungs that `highwater find` tries, cheapest first.

    Naming an allocator or a loss keeps the rungs with it; naming both makes one rung, on the ladder
    or not. On the CPU there is one allocator, the operating system's: only the loss varies. A
    reward model has no logits to chunk, and where the entropy is chunked they already are.
    """
    ladder = _CPU_LADDER if device == "cpu" else _GPU_LADDER
    if base.traits.gives_scalars or base.entropy == "chunked":
        ladder = tuple((a, x) for a, x in ladder if x == "full")
    kept = [(a, x) for a, x in ladder if allocator in (None, a) and loss in (None, x)]
    if not kept or (allocator and loss):
        kept = [(allocator or "native", loss or "full")]
    return tuple(msgspec.structs.replace(base, allocator=a, loss=x) for a, x in kept)


def simplicity(cell: Cell) -> tuple[int, ...]:
    """A key to sort cells of as many GPUs by, the simplest first.

    The order of the published guide: more Ulysses before offload, and for each degree what needs no
    other change first. Between two rungs of one degree the allocator, then the loss, then what is
    recomputed or computed in tiles.
    """
    settings = cell.settings
    return (
        _OFFLOAD_ORDER.index(settings.offload),
        cell.layout.context_degree,
        int(settings.allocator == "expandable")
        + int(settings.loss == "chunked")
        + int(settings.entropy == "chunked")
        + int(not settings.accumulates),
        _RECOMPUTE_ORDER.index(settings.recompute)
        if settings.recompute in _RECOMPUTE_ORDER
        else len(_RECOMPUTE_ORDER),
        settings.mlp_tiles or 0,
    )

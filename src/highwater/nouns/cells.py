"""The cells that a request asks about: every layout that can work, on every rung of its ladder.

Rungs are in order from the cheapest to the most memory-saving, cells from the simplest on.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from typing import NamedTuple

import msgspec

from highwater.errors import UsageError
from highwater.model.model import ModelShape
from highwater.nouns.layout import WIDEST_FUSED_HEAD, Device, Layout
from highwater.nouns.request import Request
from highwater.nouns.settings import Allocator, Loss, Offload, Settings, Strategy
from highwater.nouns.sparse_pattern import SparsePatternConfig
from highwater.nouns.study import Cell, Grid, counted_ranks
from highwater.units import format_tokens

_GPU_LADDER: tuple[tuple[Allocator, Loss], ...] = (
    ("native", "full"),
    ("expandable", "full"),
    ("expandable", "chunked"),
)
_CPU_LADDER: tuple[tuple[Allocator, Loss], ...] = (("native", "full"), ("native", "chunked"))
_OFFLOAD_ORDER: tuple[Offload, ...] = (False, "states", True)
"""Values of ``offload``, by how much is in host memory, the least first."""
_RECOMPUTE_ORDER = ("none", "all-but-attention", "layer")
"""Kinds of recomputation, the simplest first; any other is less simple than these."""
_COPIED = "each GPU has a copy of the model in nf4: FSDP beside it is `--copies 1`"
_UNMEASURED = (
    "shards of a model in nf4 by accelerate are taken as FSDP2 beside LoRA, and nobody measured "
    "one: FSDP1 trains it, and FSDP2 leaves it whole, or in bfloat16 changes some of its numbers"
)
"""Notes on accelerate 1.15 (docs/results/other_trainers)."""


def default_ladder(
    *, device: str, base: Settings, allocator: Allocator | None = None, loss: Loss | None = None
) -> tuple[Settings, ...]:
    """Rungs that `highwater find` tries, cheapest first. Naming an allocator or a loss keeps only
    the rungs that have it; naming both gives one. On the CPU, with one allocator, only the loss
    varies. A reward model has no logits to chunk; a chunked entropy has chunked the logits already.
    """
    ladder = _CPU_LADDER if device == "cpu" else _GPU_LADDER
    if base.traits.gives_scalars or base.entropy == "chunked":
        ladder = tuple((a, x) for a, x in ladder if x == "full")
    kept = [(a, x) for a, x in ladder if allocator in (None, a) and loss in (None, x)]
    if not kept or (allocator and loss):
        kept = [(allocator or "native", loss or "full")]
    return tuple(base.replace(allocator=a, loss=x) for a, x in kept)


def simplicity(cell: Cell) -> tuple[int, ...]:
    """Sort key of cells on equally many GPUs, the simplest first, in the published guide's order: a
    higher Ulysses degree before offload, with fewer sequences in a micro-batch and then activations
    on the host between them. Cells of equal degree are sorted by allocator and loss, then by what
    is recomputed or computed in tiles.
    """
    settings = cell.settings
    return (
        _OFFLOAD_ORDER.index(settings.offload),
        -settings.sequences_per_micro_batch,
        int(settings.activations == "host"),
        cell.layout.context_degree,
        int(settings.allocator == "expandable")
        + int(settings.loss == "chunked")
        + int(settings.entropy == "chunked")
        + int(not settings.accumulates),
        _RECOMPUTE_ORDER.index(settings.recompute)
        if settings.recompute in _RECOMPUTE_ORDER
        else len(_RECOMPUTE_ORDER),
        settings.mlp_tiles or 0,
        settings.attention_head_groups,
    )


def cells_of(
    request: Request,
    shape: ModelShape,
    device: Device,
    counts: tuple[int, ...],
    *,
    has_ring: bool = True,
    shards_packed: bool = False,
    machines: int = 1,
    longest_tokens: int | None = None,
) -> tuple[tuple[Cell, ...], tuple[str, ...]]:
    """Cells of every layout that can work on every rung, and a note for each skipped layout.
    ``has_ring``: the trainer has ring attention; ``shards_packed``: it shards a model in NF4 if
    no copies are named, else each GPU has one. ``machines``: number that the GPUs are in.
    ``longest_tokens``: the longest document; None: unknown. Raises UsageError if no layout works.
    """
    if device == "cpu" and request.allocator == "expandable":
        raise UsageError(
            "`--device cpu` and `--allocator expandable` exclude each other",
            hint="leave `--allocator` out",
        )
    ladder = partial(default_ladder, device=device, loss=request.loss)
    ladders = [ladder(base=request.settings, allocator=request.allocator)]
    if request.activations == "auto" and device == "cuda":
        with suppress(UsageError):  # without recomputation no input moves
            on_host = request.settings.replace(activations="host")
            ladders += [ladder(base=on_host, allocator=request.allocator or "expandable")]
    is_copied = request.settings.lora_base == "nf4" and not shards_packed
    degrees = product(counts, request.ulysses or (1,), request.ring, request.copies or (1,))
    if is_copied and request.copies is None:
        degrees = ((gpus, ulysses, ring, gpus) for gpus, ulysses, ring, _ in degrees)
    asked = [_Degrees(*each, machines=machines) for each in dict.fromkeys(degrees)]
    pattern = request.settings.pattern
    has_ring = has_ring and (pattern is None or _sparse_obstacle(pattern, device) is None)
    bounds = _Bounds(
        *(shape, device, request.settings.strategy),
        *(has_ring, longest_tokens, pattern),
        head_groups=request.settings.attention_head_groups,
    )
    obstacles = {each: bounds.obstacle(each) for each in asked}
    layouts = [each.layout for each, obstacle in obstacles.items() if obstacle is None]
    skipped = {each: why for each, why in obstacles.items() if why is not None}
    if not layouts:
        works = _offers(list(skipped), request, counts, bounds)
        # degrees that nobody named divide no GPUs beside a ring that somebody did
        meant = {each: why for each, why in skipped.items() if not each.gpus % each.context}
        whys = {why: each for each, why in reversed((meant or skipped).items())}
        problem = "; ".join(f"{whys[why].label_on(device)}: {why}" for why in reversed(whys))
        raise UsageError(problem, hint=f"use {works}")
    every = (place for rungs in ladders for place in product(layouts, rungs))
    cells = tuple(Cell(layout=layout, settings=rung) for layout, rung in every)
    said = [f"{each.label_on(device)} is skipped: {why}" for each, why in skipped.items()]
    if is_copied and max(counts) > 1:
        is_whole = all(each.shard_degree == 1 for each in layouts)
        said.append(_COPIED if is_whole else _UNMEASURED)
    return cells, tuple(said)


def within_token_budget(
    cells: tuple[Cell, ...], grid: Grid, device: Device
) -> tuple[tuple[Cell, ...], tuple[str, ...]]:
    """Cells whose token budget holds the start length, or all if none does; notes on the others."""
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
    """Reason why ``degree`` GPUs cannot share a sequence by heads (Ulysses); None if they can."""
    if shape.query_heads % degree:
        return f"{degree} does not divide the model's {shape.query_heads} query heads"
    softmax = (run.kind.attention for run in shape.runs if run.kind.attention.delta is None)
    for heads in sorted({attention.kv_heads for attention in softmax}):
        if heads % degree and degree % heads:
            return f"{degree} and the model's {heads} key/value heads do not divide each other"
    if shape.delta is not None and shape.delta.kv_heads % degree:
        return f"{degree} does not divide the {shape.delta.kv_heads} key heads of linear attention"
    return None


def ring_obstacle(shape: ModelShape, longest_tokens: int | None) -> str | None:
    """Reason why a ring cannot share documents up to this length (None: unknown), else None."""
    return unringed(
        longest_tokens,
        caps_scores=shape.caps_scores,
        widest_head=shape.widest_head,
        window_tokens=shape.window_tokens,
    )


def unringed(
    longest_tokens: int | None, *, caps_scores: bool, widest_head: int, window_tokens: int | None
) -> str | None:
    """Reason why no ring attends so in documents up to this length (None: unknown), else None;
    ``widest_head`` is the largest size of a head, and ``window_tokens`` None without a window.
    """
    if caps_scores:
        return "a ring does not cap the scores of attention (attn_logit_softcapping)"
    if widest_head > WIDEST_FUSED_HEAD:
        return f"a ring does not attend with heads of {widest_head} numbers"
    if window_tokens is None or longest_tokens is None or longest_tokens <= window_tokens:
        return None
    return (
        f"a ring shares no document of {format_tokens(longest_tokens)} tokens whose layers attend "
        f"in a sliding window of {format_tokens(window_tokens)}"
    )


def _sparse_obstacle(pattern: SparsePatternConfig, device: Device) -> str | None:
    """Reason why ring attention cannot use this sparse pattern; None if it can."""
    if pattern.follows_content:
        return "block_top_k chooses keys by what is in them, which no rank of a ring knows"
    if device == "cuda":
        return "what block-sparse attention takes in a ring of GPUs is not predicted"
    return None


class _Degrees(NamedTuple):
    """Degrees that a user asks for, which may not make a valid layout."""

    gpus: int
    ulysses: int
    ring: int
    copies: int
    machines: int = 1

    @property
    def context(self) -> int:
        """GPUs that would share one sequence."""
        return self.ulysses * self.ring

    def is_shared_as(self, other: "_Degrees") -> bool:
        """True if sequences are shared by the same degrees as in ``other``."""
        return (self.ulysses, self.ring) == (other.ulysses, other.ring)

    def flags_after(self, other: "_Degrees") -> str:
        """The flags to type that turn ``other`` into this layout."""
        is_shared = self.is_shared_as(other)
        ring = "" if self.ring == other.ring else f" --ring {self.ring}"
        shares = "" if is_shared else f"--ulysses {self.ulysses}{ring}"
        copies = "" if self.copies == other.copies else f"--copies {self.copies}"
        return " ".join(filter(None, (shares, copies)))

    @property
    def layout(self) -> Layout:
        return Layout(
            gpus=self.gpus,
            ulysses_degree=self.ulysses,
            ring_degree=self.ring,
            replicate_degree=self.copies,
            machines=self.machines if self.machines > 1 else msgspec.UNSET,
        )

    def label_on(self, device: Device) -> str:
        """Text of a layout: ``Ulysses 2, ring 3 on 6 GPUs``."""
        # a valid layout, of as many GPUs as the degrees need, spells them
        gpus = self.ulysses * self.ring * self.copies
        whole = self._replace(gpus=gpus, machines=1).layout
        degrees = whole.degrees if self.ulysses > 1 else (f"Ulysses {self.ulysses}", *whole.degrees)
        return f"{', '.join(degrees)} on {counted_ranks(self.gpus, device)}"


class _Bounds(NamedTuple):
    """What decides which layouts work: model, device, strategy and so on."""

    shape: ModelShape
    device: Device
    strategy: Strategy
    has_ring: bool
    longest_tokens: int | None
    pattern: SparsePatternConfig | None
    """The keys that attention keeps; None: every key."""
    head_groups: int = 1
    """Groups of key/value heads that attention is computed in, one after the other."""

    def obstacle(self, asked: _Degrees) -> str | None:
        """Reason why a layout cannot work; None if it can."""
        ranks, context = counted_ranks(asked.gpus, self.device), asked.context
        if asked.gpus % context:
            product_ = f" x {asked.ring} = {context}" if asked.ring > 1 else ""
            return f"{asked.ulysses}{product_} does not divide {ranks}"
        if asked.gpus % asked.copies:
            return f"{asked.copies} copies do not divide {ranks}"
        if asked.copies > 1 and self.strategy != "fsdp2":
            return "FSDP1 keeps no copies of its shards"
        if asked.ring > 1 and self.head_groups > 1:
            return "a ring passes on all heads at once, and attention in head groups does not"
        needed = asked.ulysses * self.head_groups
        if self.shape.kv_heads % needed and self.head_groups > 1:
            return (
                f"{asked.ulysses} GPUs sharing each of {self.head_groups} equal groups of heads "
                f"need {needed} key/value heads or a multiple, and the model has "
                f"{self.shape.kv_heads}"
            )
        if asked.ring > 1:
            why = ring_obstacle(self.shape, self.longest_tokens)
            if why is not None:
                return why
        if asked.ring > 1 and self.pattern is not None:
            why = _sparse_obstacle(self.pattern, self.device)
            if why is not None:
                return why
        return heads_obstacle(self.shape, asked.ulysses)

    def layouts(self, gpus: int) -> Iterator[_Degrees]:
        """Yield every layout of ``gpus`` GPUs that can work."""
        divisors = [each for each in range(1, gpus + 1) if gpus % each == 0]
        rings = divisors if self.has_ring else [1]
        degrees = product(divisors, rings, divisors)
        every = (_Degrees(gpus, *each) for each in degrees)
        return (each for each in every if self.obstacle(each) is None)


def _offers(
    refused: Sequence[_Degrees], request: Request, counts: tuple[int, ...], bounds: _Bounds
) -> str:
    """Flags that would work: the nearest layouts to the refused ones, or Ulysses alone."""
    nearest = {each: _nearest(each, bounds) for each in refused}
    works = [to.flags_after(each) for each, to in nearest.items() if to.is_shared_as(each)]
    if not works:
        works = [
            to.flags_after(each)
            for each, to in nearest.items()
            if bounds.has_ring and (each.ring > 1 or each.gpus % each.context == 0)
        ]
        works += _ulysses_alone(refused, request, counts, bounds)
    fewer = {each.ulysses: bounds.shape.kv_heads // each.ulysses for each in refused}
    if 1 < max(fewer.values()) < bounds.head_groups:
        works.insert(0, f"--attention-head-groups {max(fewer.values())}")
    works = [f"`{way}`" for way in dict.fromkeys(works)]
    return works[0] if len(works) == 1 else f"{', '.join(works[:-1])} or {works[-1]}"


def _nearest(refused: _Degrees, bounds: _Bounds) -> _Degrees:
    """The valid layout most like an invalid one: closest in sequence sharing, then in copies."""

    def distance(each: _Degrees) -> tuple[int, ...]:
        context = abs(each.context - refused.context)
        heads, copies = abs(each.ulysses - refused.ulysses), abs(each.copies - refused.copies)
        return (context > 0, heads, context, -each.context, copies)

    return min(bounds.layouts(refused.gpus), key=distance)


def _ulysses_alone(
    refused: Sequence[_Degrees], request: Request, counts: tuple[int, ...], bounds: _Bounds
) -> Iterator[str]:
    """Flags of every Ulysses degree that works on some count, without a ring."""
    ring = " --ring 1" if any(each.ring > 1 for each in refused) else ""
    for degree in range(1, min(max(counts), bounds.shape.query_heads) + 1):
        every = product(counts, (degree,), (1,), request.copies or (1,))
        asked = (_Degrees(*each) for each in every)
        if any(bounds.obstacle(each) is None for each in asked):
            yield f"--ulysses {degree}{ring}"
        else:
            layouts = (each for gpus in counts for each in bounds.layouts(gpus))
            copies = [e.copies for e in layouts if (e.ulysses, e.ring) == (degree, 1)]
            if copies:
                yield f"--ulysses {degree}{ring} --copies {min(copies)}"

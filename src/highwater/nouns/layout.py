"""Layout: how many GPUs, and how they share the sequence and the states; and stretches, the pieces
in which plain attention works, as the engine cuts them and the formula counts them.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

from highwater.errors import UsageError
from highwater.nouns.codec import Record
from highwater.nouns.declaration import MOST_GPUS, words_of
from highwater.units import MIB

Device = Literal["cuda", "cpu"]


class Layout(Record, frozen=True, kw_only=True):
    """How the GPUs of a trial work together: how many share a sequence, or keep copies."""

    gpus: int = 1
    """Processes, one per GPU (on the CPU: one per worker)."""
    ulysses_degree: int = 1
    """GPUs that share one sequence by all-to-all over heads."""
    ring_degree: int = 1
    """GPUs that share one sequence by rotating K and V."""
    replicate_degree: int = 1
    """HSDP copies; the shards number ``gpus / replicate_degree``."""
    machines: int | msgspec.UnsetType = msgspec.UNSET
    """Machines with equally many of the GPUs; unset, and in no document, for one machine."""

    def __post_init__(self) -> None:
        """Raise UsageError unless every degree is positive and divides the GPUs."""
        for name in ("gpus", "ulysses_degree", "ring_degree", "replicate_degree"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", hint="use 1 or more")
            if getattr(self, name) > MOST_GPUS:
                raise UsageError(
                    f"{name} is {getattr(self, name)}, and {MOST_GPUS} is the most",
                    hint=f"use {MOST_GPUS} or less",
                )
        if self.gpus % self.context_degree:
            works = ", ".join(str(d) for d in range(1, self.gpus + 1) if self.gpus % d == 0)
            raise UsageError(
                f"context degree {self.context_degree} does not divide {self.gpus} GPUs",
                hint=f"use one of {works}",
            )
        if self.gpus % self.replicate_degree:
            raise UsageError(
                f"{self.replicate_degree} copies do not divide {self.gpus} GPUs",
                hint="use `replicate_degree=1`",
            )
        if self.machines and self.gpus % self.machines:
            even = self.machines * max(1, self.gpus // self.machines)
            raise UsageError(
                f"{self.gpus} GPUs are not as many on each of {self.machines} machines",
                hint=f"use `--gpus {even}`: it counts those of all machines",
            )

    @property
    def context_degree(self) -> int:
        """GPUs that share one sequence."""
        return self.ulysses_degree * self.ring_degree

    @property
    def data_parallel_degree(self) -> int:
        """Number of data-parallel groups, each of which trains on its own sequences."""
        return self.gpus // self.context_degree

    @property
    def shard_degree(self) -> int:
        """Number of GPUs over which parameters, gradients and optimizer states are sharded."""
        return self.gpus // self.replicate_degree

    @property
    def is_several_machines(self) -> bool:
        """True if the GPUs are of several machines."""
        return (self.machines or 1) > 1

    @property
    def machine_gpus(self) -> int:
        """GPUs of each machine."""
        return self.gpus // (self.machines or 1)

    @property
    def degrees(self) -> tuple[str, ...]:
        """Each degree that is not 1, in words: ``Ulysses 2``, ``ring 3``, ``2 copies``."""
        return tuple(each.label.format(degree) for each, degree in self._spelled if degree > 1)

    @property
    def suffix(self) -> str:
        """A label's words after the GPUs: ``, Ulysses 2, ring 3``; empty if every degree is 1."""
        return "".join(f", {degree}" for degree in self.degrees)

    @property
    def sharing(self) -> str:
        """Text under ``Ulysses`` in a table: ``2``; with a ring ``2, ring 3``."""
        (_, ulysses_degree), *others = self._spelled
        shared = (each.label.format(degree) for each, degree in others if degree > 1)
        return ", ".join((str(ulysses_degree), *shared))

    @property
    def slug(self) -> str:
        """The degrees as part of a path: ``sp-1``, ``sp-2+ring-3``; Ulysses is always there."""
        (first, ulysses_degree), *others = self._spelled
        more = (f"{each.slug}-{degree}" for each, degree in others if degree > 1)
        return "+".join((f"{first.slug}-{ulysses_degree}", *more))

    @property
    def flags(self) -> tuple[str, ...]:
        """Words to type that name the layout: ``--gpus 4 --ulysses 2``."""
        return ("--gpus", str(self.gpus), *words_of(self.degree_settings))

    @property
    def degree_settings(self) -> dict[str, int]:
        """Degrees by the setting's name, as ``{"ulysses": 2}``; only Ulysses' may be 1."""
        first, *others = self._spelled
        return {
            spelling.setting: degree
            for spelling, degree in (first, *(each for each in others if each[1] > 1))
        }

    def across(self, machines: int) -> "Layout":
        """The layout of ``machines`` such machines, each of which has a copy of the states."""
        return self.replace(
            gpus=self.gpus * machines,
            replicate_degree=self.replicate_degree * machines,
            machines=machines,
        )

    def without(self, settings: Collection[str]) -> "Layout":
        """The layout of as many GPUs with the degrees of these settings set to 1."""
        fields = (each.field for each in _SPELLINGS if each.setting in settings)
        return self.replace(**dict.fromkeys(fields, 1))

    @property
    def _spelled(self) -> tuple[tuple["_Spelling", int], ...]:
        return tuple((spelling, getattr(self, spelling.field)) for spelling in _SPELLINGS)


class _Spelling(NamedTuple):
    """How one degree is written in records, labels, paths and flags."""

    field: str
    label: str
    slug: str
    setting: str


_SPELLINGS = (
    _Spelling("ulysses_degree", "Ulysses {}", "sp", "ulysses"),
    _Spelling("ring_degree", "ring {}", "ring", "ring"),
    _Spelling("replicate_degree", "{} copies", "copies", "copies"),
)


def flags_of(layouts: Iterable[Layout]) -> tuple[str, ...]:
    """Words to type that name several layouts at once, each number once: ``--gpus 2 4``."""
    found = list(layouts)
    values = {"gpus": _distinct(layout.gpus for layout in found)}
    for spelling in _SPELLINGS:
        degrees = _distinct(getattr(layout, spelling.field) for layout in found)
        if spelling is _SPELLINGS[0] or degrees != ["1"]:
            values[spelling.setting] = degrees
    return tuple(words_of(values))


def _distinct(numbers: Iterable[int]) -> list[str]:
    return list(dict.fromkeys(map(str, numbers)))


CHUNK_BYTES: Mapping[str, int] = {"cuda": 512 * MIB, "cpu": 32 * MIB}
"""Bytes of one chunk of logits, by device: enough rows for efficient matrix products."""
TILE_BYTES: Mapping[str, int] = {"cuda": 128 * MIB, "cpu": MIB}
"""Bytes of one product in an MLP's tile, by device; three are alive at once."""
TILED_EXPERTS = ("mixtral", "qwen3_moe")
"""Model types whose experts go in tiles of tokens; other types' take all tokens at once."""
EXPERT_TILE_TOKENS = 32_768
"""Tokens of a tile of experts: each of many experts has few of them."""
ELEMENT_BYTES: Mapping[str, int] = {"cuda": 2, "cpu": 4}
"""Bytes of a number of activations, logits, gathered and saved weights: bf16; float32 on a CPU."""
DELTA_CHUNK_TOKENS = 64
"""Tokens of a gated delta rule that are solved as one triangular system; a state is passed from one
such chunk to the next."""
DELTA_GROUP_TOKENS = 2048
"""Tokens of a gated delta rule computed at once: one state is kept for each group, and its working
numbers, in float32, are some hundreds of KiB a token of a 9B."""
SCORES_AT_HAND = 2**23
"""Scores that plain attention computes at once, of all documents and heads; at least one row."""
WIDE_SCORES_AT_HAND = 2**26
"""The same for heads wider than fused kernels take: products of some hundred rows, which keep a GPU
busy at 65,536 tokens; 256 MiB in float32, and in the backward pass three times as many."""
_ALIGNED = 8
"""Numbers of bfloat16 in 16 bytes: products of rows of another length took 1.1 to 2.4 times
as long on an H200 (docs/results/families)."""

WIDEST_FUSED_HEAD = 256
"""Largest head size that a fused kernel takes."""


class Stretch(NamedTuple):
    """The queries and keys of one document and head whose scores are in memory at once."""

    rows: int
    """Number of queries."""
    keys: int
    """Number of keys that at least one of them reads."""


def stretch(
    length_tokens: int, window_tokens: int | None, heads: int, *, at_hand: int | None = None
) -> Stretch:
    """The largest stretch for documents of this length. ``heads``: heads of all documents together.
    ``at_hand``: attention scores computed at once, by default ``SCORES_AT_HAND``, at least one row
    of them; if it is given, rows are a multiple of ``_ALIGNED``.
    """
    window = min(length_tokens, window_tokens or length_tokens)
    room = (at_hand or SCORES_AT_HAND) // heads
    # r rows of a window read window + r - 1 keys: r (window + r) is to be within the room
    rows = max(1, (math.isqrt(window**2 + 4 * room) - window) // 2)
    if at_hand is not None and rows > _ALIGNED:
        rows -= rows % _ALIGNED
    return Stretch(min(length_tokens, rows), min(length_tokens, window + rows - 1))


def expert_tile_tokens(tokens: int, *, tiles: int | None) -> int:
    """Tokens that experts process at once: of one tile, if the number of ``tiles`` is given, else
    at most ``EXPERT_TILE_TOKENS``.
    """
    if tiles is None:
        return min(tokens, EXPERT_TILE_TOKENS)
    return max(1, -(-tokens // tiles))

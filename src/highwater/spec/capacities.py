"""Capacities: the longest length of one model on some GPUs with some settings, whoever found it."""

from typing import Literal

from highwater.spec.codec import Noun
from highwater.spec.ladder import simplicity
from highwater.spec.study import Cell

Source = Literal["measured", "predicted", "published"]
"""Trials of this project, a prediction of this project, or somebody else's table."""


class Capacity(Noun, frozen=True, kw_only=True):
    """One cell's answer. What nobody knows is no capacity."""

    model_name: str
    native_length_tokens: int
    device_name: str
    """Kind of GPU, as in the catalog where it is known: ``A100-80GB``."""
    cell: Cell
    capacity_tokens: int
    """The longest length that fits; 0: not even the shortest."""
    is_memory_only: bool = False
    """Memory holds it; trained in full was less, or nothing."""
    source: Source
    found_in: str
    """File that says so, or the command that predicts it."""


def simplest(capacities: tuple[Capacity, ...], length_tokens: int) -> Capacity | None:
    """Of one model on as many GPUs of one kind: the simplest that trains a length; None where none of them does."""
    return next((each for each in in_order(capacities) if each.capacity_tokens >= length_tokens), None)


def in_order(capacities: tuple[Capacity, ...]) -> list[Capacity]:
    """The simplest first."""
    return sorted(capacities, key=lambda capacity: simplicity(capacity.cell))

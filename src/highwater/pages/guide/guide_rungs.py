"""The capacities of a guide: how far each model gets, of all cells and by rung."""

from collections.abc import Iterator, Sequence

import msgspec

from highwater.nouns.capacities import Capacity
from highwater.nouns.cells import simplicity
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.study import PUBLISHED_STEP_TOKENS, Cell
from highwater.pages.guide.guide import GuideTable, in_natural_order
from highwater.pages.text_table import TextTable
from highwater.units import format_tokens

_STRATEGIES = {"fsdp": "FSDP1", "fsdp2": "FSDP2"}

_HF_WEIGHTS = {
    "always": "saved with every checkpoint",
    "last": "saved at the end",
    "never": "never saved",
}


def rungs(capacities: Sequence[Capacity]) -> Iterator[TextTable]:
    """The capacities of each rung, the simplest first, by number of GPUs and degree."""
    models = in_natural_order(each.model_name for each in capacities)
    settings_found = {each.cell.settings for each in capacities}
    for settings in sorted(settings_found, key=_rung_order):
        found: dict[Layout, dict[str, list[Capacity]]] = {}
        for each in capacities:
            if each.cell.settings == settings:
                by_model = found.setdefault(each.cell.layout, {})
                by_model.setdefault(each.model_name, []).append(each)
        cells = [
            (layout, [found[layout].get(name, []) for name in models])
            for layout in sorted(found, key=msgspec.structs.astuple)
        ]
        strategy, weights = _STRATEGIES[settings.strategy], _HF_WEIGHTS[settings.save_hf]
        yield TextTable(
            title=f"{settings.label} ({strategy}, Hugging Face weights {weights})",
            columns=("GPUs", "SP", *models),
            rows=tuple(
                (str(layout.gpus), layout.sharing, *map(_figure, own)) for layout, own in cells
            ),
            left_columns=0,
        )


def _rung_order(settings: Settings) -> tuple[tuple[int, ...], str]:
    """Sort key of rungs, the simplest first.

    Those that are as simple have an order that no run changes.
    """
    return simplicity(Cell(layout=Layout(), settings=settings)), repr(msgspec.to_builtins(settings))


def _figure(capacities: Sequence[Capacity]) -> str:
    """The text of one cell's capacities; empty where nothing was tried.

    A memory-only proof stands beside the capacity; of several files each stands that says more.
    """
    telling = (
        each for each in capacities if not any(_says_more(other, each) for other in capacities)
    )
    in_order = sorted(telling, key=lambda each: (each.is_memory_only, each.capacity_tokens))
    failures = [
        each.does_not_fit_tokens for each in capacities if each.does_not_fit_tokens is not None
    ]
    return ", ".join(dict.fromkeys(_capacity_text(each, failures) for each in in_order))


def best_text(table: GuideTable, model_name: str) -> str:
    """The longest of any cell that was trained in full.

    What memory alone holds stands beside it, where that is longer.
    """
    return _figure([each for each in longest(table, model_name) if each is not None])


def longest(table: GuideTable, model_name: str) -> tuple[Capacity | None, Capacity | None]:
    """The longest capacity of any cell trained in full, and the longest by memory alone."""
    own = [each for each in table.capacities if each.model_name == model_name]
    full, memory_only = (
        [each for each in own if each.is_memory_only == is_so] for is_so in (False, True)
    )
    return max(full, key=_reach, default=None), max(memory_only, key=_reach, default=None)


def _reach(capacity: Capacity) -> int:
    return capacity.capacity_tokens


def _says_more(one: Capacity, other: Capacity) -> bool:
    """Whether the other adds nothing to the one.

    It has no longer length, and none that fails where the one fits.
    """
    if one.is_memory_only and not other.is_memory_only:
        return False
    if other.does_not_fit_tokens is not None and other.does_not_fit_tokens <= one.capacity_tokens:
        return False
    is_in_full_too = other.is_memory_only and not one.is_memory_only
    return one.capacity_tokens > other.capacity_tokens or (
        is_in_full_too and one.capacity_tokens == other.capacity_tokens
    )


def _capacity_text(capacity: Capacity, failures: Sequence[int]) -> str:
    tokens, fails = capacity.capacity_tokens, min(failures, default=None)
    if tokens == 0:
        if fails is None:
            return "?"
        return "-" if fails <= PUBLISHED_STEP_TOKENS else f"< {format_tokens(fails)}"
    yarn = "*" if tokens > capacity.native_length_tokens else ""
    figure = (
        f"{'' if any(length > tokens for length in failures) else '≥'}{format_tokens(tokens)}{yarn}"
    )
    return f"{figure} memory-only" if capacity.is_memory_only else figure

"""The parts of a guide, before anybody decides how they are drawn: headings, tables and sentences,
nothing escaped yet.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import msgspec

from highwater.nouns.capacities import Capacity, Source
from highwater.nouns.cells import simplicity
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.study import PUBLISHED_STEP_TOKENS, Cell, counted_ranks
from highwater.nouns.trainer import predicted_traits
from highwater.pages.guide import guide_text
from highwater.pages.guide.guide import (
    UNKNOWN,
    Choice,
    Guide,
    GuideTable,
    cell_label,
    farthest,
    in_natural_order,
)
from highwater.pages.text import TextTable
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
    """Sort key of rungs, the simplest first."""
    return simplicity(Cell(layout=Layout(), settings=settings)), repr(msgspec.to_builtins(settings))


def _figure(capacities: Sequence[Capacity]) -> str:
    """The text of one cell's capacities; empty where nothing was tried."""
    telling = (
        each for each in capacities if not any(_says_more(other, each) for other in capacities)
    )
    in_order = sorted(telling, key=lambda each: (each.is_memory_only, each.capacity_tokens))
    failures = [c.does_not_fit_tokens for c in capacities if c.does_not_fit_tokens is not None]
    return ", ".join(dict.fromkeys(_capacity_text(each, failures) for each in in_order))


def best_text(table: GuideTable, model_name: str) -> str:
    """The longest of any cell that was trained in full. What memory alone holds stands beside it,
    where that is longer.
    """
    return _figure([each for each in longest(table, model_name) if each is not None])


def longest(table: GuideTable, model_name: str) -> tuple[Capacity | None, Capacity | None]:
    """The longest capacity of any cell trained in full, and the longest by memory alone."""
    own = [each for each in table.capacities if each.model_name == model_name]
    in_order = sorted(own, key=lambda each: -each.capacity_tokens)
    full = next((each for each in in_order if not each.is_memory_only), None)
    return full, next((each for each in in_order if each.is_memory_only), None)


def _says_more(one: Capacity, other: Capacity) -> bool:
    """Whether the other adds nothing to the one."""
    if one.is_memory_only and not other.is_memory_only:
        return False
    if other.does_not_fit_tokens is not None and other.does_not_fit_tokens <= one.capacity_tokens:
        return False
    is_in_full_too = other.is_memory_only and not one.is_memory_only
    return one.capacity_tokens + is_in_full_too > other.capacity_tokens


def _capacity_text(capacity: Capacity, failures: Sequence[int]) -> str:
    tokens, fails = capacity.capacity_tokens, min(failures, default=None)
    if tokens == 0:
        if fails is None:
            return "?"
        return "-" if fails <= PUBLISHED_STEP_TOKENS else f"< {format_tokens(fails)}"
    yarn = "*" if tokens > capacity.native_length_tokens else ""
    least = "" if any(length > tokens for length in failures) else "≥"
    figure = f"{least}{format_tokens(tokens)}{yarn}"
    return f"{figure} memory-only" if capacity.is_memory_only else figure


ORIGINS: dict[Source, str] = {
    "measured": "by real trials",
    "simulated": "from a memory law, nothing was trained",
    "predicted": "where the prediction is an interval, its upper end fits",
    "published": "by others, not measured here",
}
"""How far figures are to be trusted, by source."""
SOURCES: dict[Source, str] = {
    **{source: f"{source} {origin}" for source, origin in ORIGINS.items()},
    "predicted": f"predicted, nothing was run; {ORIGINS['predicted']}",
}
_VANILLA = simplicity(Cell(layout=Layout(), settings=Settings()))
_LONG_TABLE_ROWS, _MANY_FACTORS = 20, 20
"""Numbers beyond which rows that say the same are joined, and not every factor is listed. No
published table is as long."""


class Section(NamedTuple):
    """Everything about one kind of GPU, from one source. All of it is of one kind of training and
    one native length.
    """

    heading: str
    tables: tuple[GuideTable, ...]

    @property
    def capacities(self) -> list[Capacity]:
        """The capacities of all its tables."""
        return [each for table in self.tables for each in table.capacities]


class LongContext(NamedTuple):
    """The configuration of models of one native length past it."""

    configuration: str
    factors: str
    """YaRN's factor for each length of the guide, in a sentence."""


def sections(guide: Guide) -> list[Section]:
    """Sections of the guide, in its order."""
    return [
        Section(heading, tuple(group)) for heading, group in groupby(guide.tables, key=_heading)
    ]


def introduction(guide: Guide) -> str:
    """What the page is about."""
    kinds = ", ".join(dict.fromkeys(table.device_name for table in guide.tables))
    return (
        f"For each length in tokens and each model: the simplest settings that fit, on "
        f"{kinds}. Every table says what it rests on."
    )


def source_words(guide: Guide) -> list[str]:
    """What each kind of figure in the guide is; our own text."""
    found = {table.source for table in guide.tables}
    return [
        f"{text.replace(source, f'**{source}**', 1)}."
        for source, text in SOURCES.items()
        if source in found
    ]


def words(guide: Guide) -> Iterator[str]:
    """The words that every guide explains, and those of its own; our own text."""
    labels = {cell_label(each.cell) for table in guide.tables for each in table.capacities}
    used = {name for name in guide_text.WORDS if any(name in label for label in labels)}
    yield from (
        f"**{name}{'N' if name.endswith('=') else ''}**: {text}"
        for name, text in guide_text.WORDS.items()
        if name in used | guide_text.ALWAYS
    )
    yield from (guide_text.COMBINED, guide_text.SAME_LABEL)
    if any(re.search(r" with [\d.]+ GiB$", table.device_name) for table in guide.tables):
        yield guide_text.BUDGETED
    yield guide_text.NOTHING
    if any(choice.label == UNKNOWN for choice in guide.choices):
        yield guide_text.UNKNOWN
    if any(choice.capacity is not None and choice.may_be_simpler for choice in guide.choices):
        yield guide_text.PERHAPS_SIMPLER
    if any(map(only_tried, guide.tables)):
        yield guide_text.ONLY_TRIED
    if any(choice.capacity and choice.capacity.is_memory_only for choice in guide.choices):
        yield guide_text.MEMORY_ONLY


def glance_tables(guide: Guide) -> Iterator[TextTable]:
    """How far every model gets, in tokens, by number of GPUs and with whatever settings. There is a
    table for each section.
    """
    for section in sections(guide):
        models = in_natural_order(name for table in section.tables for name in table.models)
        rows = tuple(
            (str(table.gpus), *(best_text(table, name) for name in models))
            for table in section.tables
        )
        yield TextTable(title=section.heading, columns=("GPUs", *models), rows=rows, left_columns=0)


def gpus_heading(table: GuideTable) -> str:
    """``4 GPUs``."""
    return counted_ranks(table.gpus, "cuda")


def summary(table: GuideTable) -> str:
    """How far each model gets, and what kind of figure that is, in one line."""
    reached = (f"{name} {reached_text(table, name)}" for name in table.models)
    return f"longest context known to fit, {table.source}: {'; '.join(reached)}"


def reached_text(table: GuideTable, model_name: str) -> str:
    """How far a model gets by its capacities, as at a glance. ``262,144, 671,744 memory-only``; in
    words where it is no length.
    """
    text = best_text(table, model_name).replace("*", "")
    return {"": "not tried", "-": "none", "?": "unknown"}.get(text, text)


def only_with_offload(table: GuideTable) -> str:
    """A sentence that names models which fit nothing without offload; empty where there is none."""
    first = table.rows[0][1]
    names = [
        each.model_name
        for each in first
        if each.capacity is not None and each.capacity.cell.settings.offload is not False
    ]
    return f"Only with offload, here: {', '.join(names)}." if names else ""


def only_tried(table: GuideTable) -> str:
    """A sentence of what was tried of models that begin with something less simple than vanilla.
    Empty where none does.
    """
    tried: dict[str, list[str]] = {}
    for name in table.models:
        cells = sorted(
            {each.cell for each in table.capacities if each.model_name == name}, key=simplicity
        )
        if simplicity(cells[0]) > _VANILLA:
            tried.setdefault(", ".join(dict.fromkeys(map(cell_label, cells))), []).append(name)
    each = "; ".join(f"{', '.join(names)}: {labels}" for labels, names in tried.items())
    return f"Tried here, and nothing simpler: {each}. Simpler settings may do." if each else ""


def default_budget(section: Section) -> str:
    """A note that tables of one sequence a micro-batch do not hold for the default token budget.
    Empty for other tables.
    """
    packed = {
        (each.cell.settings.sequences_per_micro_batch, each.cell.settings.token_budget_tokens)
        for each in section.capacities
        if (traits := predicted_traits(each.trainer)) is not None and not traits.is_watched
    }
    return guide_text.ONE_SEQUENCE if packed == {(1, None)} else ""


def choice_table(table: GuideTable) -> TextTable:
    """Lengths by models; ``?`` after an entry where something simpler may fit."""
    rows = ((format_tokens(tokens), *map(entry, choices)) for tokens, choices in table.rows)
    return TextTable(
        title=f"simplest settings by length and model, {gpus_heading(table)}, {table.source}",
        columns=("max_model_len", *table.models),
        rows=tuple(rows),
        left_columns=1 + len(table.models),
    )


def entry(choice: Choice) -> str:
    """A table's text for one model and length."""
    is_open = choice.capacity is not None and choice.may_be_simpler
    return f"{choice.label} ?" if is_open else choice.label


def long_contexts(guide: Guide) -> Iterator[LongContext]:
    """Long contexts for each native length."""
    lengths: dict[int, set[int]] = {}
    models: dict[int, str] = {}
    for table in guide.tables:
        models.setdefault(table.native_length_tokens, table.models[0])
        found = lengths.setdefault(table.native_length_tokens, set())
        found |= {
            tokens for tokens, choices in table.rows if any(choice.capacity for choice in choices)
        }
    for native, found in lengths.items():
        longer = [tokens for tokens in sorted(found) if tokens > native]
        if len(longer) > _MANY_FACTORS:
            longer = [tokens for tokens in longer if tokens % native == 0]
        factors = ", ".join(f"{format_tokens(tokens)}: {tokens / native:g}" for tokens in longer)
        said = "No length of this guide is longer."
        said = f"`FACTOR` by length: {factors}." if factors else said
        yield LongContext(
            guide_text.long_context(_model_path(models[native]), native),
            f"Up to {format_tokens(native)} tokens leave `rope_scaling` out. {said}",
        )


def budget_table(guide: Guide) -> TextTable:
    """Default and least token budgets at the longest length of the guide."""
    reached = (farthest(table, name) for table in guide.tables for name in table.models)
    tokens = max((found[0] for found in reached if found), default=PUBLISHED_STEP_TOKENS)
    layouts = (each.cell.layout for table in guide.tables for each in table.capacities)
    degrees = sorted({1, *(layout.context_degree for layout in layouts)})
    return TextTable(
        title=f"Tokens per GPU at {format_tokens(tokens)} tokens",
        columns=("SP", "default", "least"),
        rows=tuple(
            (str(degree), *(format_tokens(math.ceil(n * tokens / degree)) for n in (2, 1)))
            for degree in degrees
        ),
        left_columns=1,
    )


def joined(table: TextTable) -> TextTable:
    """A long table with neighbouring rows that say the same as one: ``4,096 – 40,960``."""
    if len(table.rows) <= _LONG_TABLE_ROWS:
        return table
    rows: list[tuple[str, ...]] = []
    for entries, own in groupby(table.rows, key=lambda row: row[1:]):
        lengths = [row[0] for row in own]
        length = lengths[0] if len(lengths) == 1 else f"{lengths[0]} – {lengths[-1]}"
        rows.append((length, *entries))
    return replace(table, rows=tuple(rows))


def origin_table(guide: Guide) -> TextTable:
    """Every file and prediction with what its figures are, and what was found there."""
    found: dict[tuple[str, Source], list[Capacity]] = {}
    for table in guide.tables:
        for each in table.capacities:
            found.setdefault((each.found_in, each.source), []).append(each)
    rows = (
        (
            *(name, SOURCES[source]),
            ", ".join(dict.fromkeys(each.device_name for each in own)),
            ", ".join(dict.fromkeys(each.model_name for each in own)),
            str(len({(each.model_name, each.cell) for each in own})),
            str(sum(not c.capacity_tokens and c.does_not_fit_tokens is None for c in own)),
        )
        for (name, source), own in found.items()
    )
    columns = ("found in", "figures", "GPU", "models", "cells", "of them unknown")
    return TextTable(title="Sources", columns=columns, rows=tuple(rows), left_columns=4)


def _heading(table: GuideTable) -> str:
    return (
        f"{table.device_name}: {table.source} ({table.training}; native length "
        f"{format_tokens(table.native_length_tokens)})"
    )


def _model_path(model_name: str) -> str:
    """An example of a path in a configuration. Text from outside is in it only where it is harmless
    there.
    """
    if not re.fullmatch(r"[0-9A-Za-z][\w.-]*", model_name, re.ASCII):
        return "/path/to/model"
    return f"Qwen/{model_name}" if model_name.startswith("Qwen") else f"/path/to/{model_name}"

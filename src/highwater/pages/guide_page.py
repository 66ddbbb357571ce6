"""The guide as a page, as Markdown and as rows: its tables, its bars and the sentences that depend
on its content. The template ``guide.j2`` has the rest.
"""

import math
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from highwater.errors import HighwaterError, UsageError
from highwater.model.model import load_model
from highwater.model.rope import yarn_parameters
from highwater.nouns.capacities import Capacity, Source
from highwater.nouns.cells import simplicity
from highwater.nouns.environment import ENV_BEFORE_IN_WORDS, ENV_IN_WORDS
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings, short_settings
from highwater.nouns.study import PUBLISHED_STEP_TOKENS, Cell
from highwater.nouns.trainer import OURS, predicted_traits
from highwater.pages.chooser import ChooserPlace, chooser_json, places
from highwater.pages.guide import (
    SOURCES,
    UNKNOWN,
    Choice,
    Guide,
    GuideTable,
    farthest,
    in_natural_order,
    published_label,
)
from highwater.pages.page import digest, drawn_page, page_script
from highwater.pages.prediction_tables import recommendation_answer
from highwater.pages.study_answer import layout_table
from highwater.pages.table import TextTable, table_of
from highwater.speed import PredictedStep, predicted_step
from highwater.store.directory import check_new_file, free_name, write_new_file
from highwater.units import format_seconds, format_tokens

PAGE = ".html"
"""Suffix of a guide that is written as a page."""
_ENDS = (PAGE, ".md")
_STRATEGIES = {"fsdp": "FSDP1", "fsdp2": "FSDP2"}
_HF_WEIGHTS = {
    "always": "saved with every checkpoint",
    "last": "saved at the end",
    "never": "never saved",
}
_LONG_TABLE_ROWS, _MANY_FACTORS = 20, 20
"""Rows above which equal ones are joined, and factors listed; published tables are shorter."""


class Section(NamedTuple):
    """Tables of a guide below one heading: one kind of GPU, one source, one training."""

    heading: str
    tables: tuple[GuideTable, ...]

    @property
    def capacities(self) -> list[Capacity]:
        """Capacities of all tables of the section."""
        return [each for table in self.tables for each in table.capacities]

    @property
    def is_of_one_sequence(self) -> bool:
        """True if each micro-batch has one sequence, rather than another trainer's token budget."""
        packed = {
            (each.cell.settings.sequences_per_micro_batch, each.cell.settings.token_budget_tokens)
            for each in self.capacities
            if (traits := predicted_traits(each.trainer)) is not None and not traits.is_watched
        }
        return packed == {(1, None)}


class Bar(NamedTuple):
    """A bar of a guide: the length that one model reaches on one number of GPUs."""

    label: str
    text: str
    percent: float
    """Length trained in full, in per cent of the longest bar of its section."""
    memory_only_percent: float
    """Further length that fits by memory alone, in the same per cent."""


class LongContext(NamedTuple):
    """How a guide says to go past one native length: a configuration, and YaRN's factors."""

    configuration: str
    factors: str
    """One sentence with YaRN's factor for each length of the guide."""


def write_guide(path: str | Path, made: Guide) -> Path:
    """Write a guide into a new file: ``.html`` as a self-contained page, ``.md`` as Markdown.
    Raises HighwaterError for another suffix, and for a file that exists or cannot be written.
    """
    path = Path(path)
    check_guide_file(path)
    text = guide_page(made, places(made)) if path.suffix == PAGE else guide_markdown(made)
    write_new_file(path, text.encode(), flag="-o")
    return path


def check_guide_file(path: Path) -> None:
    """Raise UsageError for a suffix that no guide has, or a file that exists."""
    if path.suffix not in _ENDS:
        hint = (
            f"end it in {' or '.join(_ENDS)}: `-o {shlex.quote(free_name(f'{path.stem}{PAGE}'))}`"
        )
        raise UsageError(
            f"{path}: a guide is not written as {path.suffix or 'a file without a suffix'}",
            hint=hint,
        )
    check_new_file(path, flag="-o", name="guide.html" if path.suffix == PAGE else "guide.md")


def guide_markdown(guide: Guide) -> str:
    """Return the guide as a Markdown document."""
    return _drawn(guide, (), "md")


def guide_page(guide: Guide, chosen: Sequence[ChooserPlace] = ()) -> str:
    """Render the guide as an HTML page, with a chooser among the ``chosen`` places."""
    return _drawn(guide, chosen, "html")


def _drawn(guide: Guide, places: Sequence[ChooserPlace], form: Literal["html", "md"]) -> str:
    script, choices = page_script("chooser.js"), guide.choices
    every = list(map(choice_table, guide.tables))
    found = {table.source for table in guide.tables}
    capacities = [each for table in guide.tables for each in table.capacities]
    return drawn_page(
        "guide.j2",
        form=form,
        kinds=list(dict.fromkeys(table.device_name for table in guide.tables)),
        sources=[
            f"{text.replace(source, f'**{source}**', 1)}."
            for source, text in SOURCES.items()
            if source in found
        ],
        allocator={"words": ENV_IN_WORDS, "before": ENV_BEFORE_IN_WORDS},
        labels="\n".join({each.cell.words for each in capacities}),
        has={
            "budgeted": any(re.search(r" with [\d.]+ GiB$", t.device_name) for t in guide.tables),
            "unknown": any(choice.label == UNKNOWN for choice in choices),
            "perhaps_simpler": any(each.capacity and each.may_be_simpler for each in choices),
            "only_tried": any(map(only_tried, guide.tables)),
            "memory_only": any(each.capacity and each.capacity.is_memory_only for each in choices),
            "joined": any(joined(table) != table for table in every),
        },
        sections=sections(guide),
        glances=list(glance_tables(guide)),
        bars=_bars,
        rungs=rungs,
        only_with_offload=only_with_offload,
        only_tried=only_tried,
        choice_table=choice_table,
        joined=joined,
        summary=summary,
        contexts=list(long_contexts(guide)),
        budgets=budget_table(guide),
        origins=origin_table(guide),
        notes=guide.notes,
        places=places,
        data=chooser_json(places),
        script=script,
        script_digest=digest(script),
        opening=_opening(places),
        speeds=list(speed_tables(guide)),
    )


def _opening(places: Sequence[ChooserPlace]) -> str:
    """The answer that the chooser shows first; empty if there is no chooser."""
    if not places:
        return ""
    place = next((each for each in places if each.longest_tokens is not None), places[0])
    length = place.longest_tokens or place.answers[0].found.length_tokens
    return next(
        recommendation_answer(each.found)
        for each in place.answers
        if each.found.length_tokens == length
    )


def sections(guide: Guide) -> list[Section]:
    """Group a guide's tables into sections with one heading each, in the tables' order."""

    def heading(table: GuideTable) -> str:
        native = format_tokens(table.native_length_tokens)
        return f"{table.device_name}: {table.source} ({table.training}; native length {native})"

    return [Section(text, tuple(group)) for text, group in groupby(guide.tables, key=heading)]


def _bars(section: Section) -> list[Bar]:
    each = [(table, name) for table in section.tables for name in table.models]
    reached = [
        [0 if found is None else found.capacity_tokens for found in longest(table, name)]
        for table, name in each
    ]
    unit = max(1, *(tokens for pair in reached for tokens in pair)) / 100
    return [
        Bar(
            label=f"{table.gpus_in_words}, {name}",
            text=reached_text(table, name),
            percent=round(full / unit, 1),
            memory_only_percent=round(max(0, memory_only - full) / unit, 1),
        )
        for (table, name), (full, memory_only) in zip(each, reached, strict=True)
    ]


def rungs(capacities: Sequence[Capacity]) -> Iterator[TextTable]:
    """Yield a table for each rung, the simplest first: capacities by number of GPUs and degree."""
    models = in_natural_order(each.model_name for each in capacities)

    def order(settings: Settings) -> tuple[tuple[int, ...], str]:
        simple = simplicity(Cell(layout=Layout(), settings=settings))
        return simple, repr(msgspec.to_builtins(settings))

    for settings in sorted({each.cell.settings for each in capacities}, key=order):
        own = [each for each in capacities if each.cell.settings == settings]
        found: dict[str, dict[Layout, list[Capacity]]] = {name: {} for name in models}
        for each in own:
            found[each.model_name].setdefault(each.cell.layout, []).append(each)
        strategy, weights = _STRATEGIES[settings.strategy], _HF_WEIGHTS[settings.save_hf]
        yield layout_table(
            f"{short_settings(settings)} ({strategy}, Hugging Face weights {weights})",
            {
                name: dict(zip(has, map(_figure, has.values()), strict=True))
                for name, has in found.items()
            },
            heads=("GPUs", "Ulysses"),
            names=0,
        )


def _figure(capacities: Sequence[Capacity]) -> str:
    """Text of the capacities of one cell; empty if none is known."""
    telling = (
        each for each in capacities if not any(_says_more(other, each) for other in capacities)
    )
    in_order = sorted(telling, key=lambda each: (each.is_memory_only, each.capacity_tokens))
    failures = [c.does_not_fit_tokens for c in capacities if c.does_not_fit_tokens is not None]
    return ", ".join(dict.fromkeys(_capacity_text(each, failures) for each in in_order))


def _says_more(one: Capacity, other: Capacity) -> bool:
    """True if ``one`` implies everything that ``other`` says."""
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


def longest(table: GuideTable, model_name: str) -> tuple[Capacity | None, Capacity | None]:
    """The longest capacity of any cell trained in full, and the longest by memory alone."""
    own = [each for each in table.capacities if each.model_name == model_name]
    in_order = sorted(own, key=lambda each: -each.capacity_tokens)
    full = next((each for each in in_order if not each.is_memory_only), None)
    return full, next((each for each in in_order if each.is_memory_only), None)


def best_text(table: GuideTable, model_name: str) -> str:
    """Text of the longest length trained in full, and of any longer memory-only one."""
    return _figure([each for each in longest(table, model_name) if each is not None])


def reached_text(table: GuideTable, model_name: str) -> str:
    """Longest length of a model: ``262,144, 671,744 memory-only``; ``none`` and such in words."""
    text = best_text(table, model_name).replace("*", "")
    return {"": "not tried", "-": "none", "?": "unknown"}.get(text, text)


def summary(table: GuideTable) -> str:
    """One line with the longest length of each model and the table's source."""
    reached = (f"{name} {reached_text(table, name)}" for name in table.models)
    return f"longest context known to fit, {table.source}: {'; '.join(reached)}"


def glance_tables(guide: Guide) -> Iterator[TextTable]:
    """Yield a table for each section: longest length of every model by number of GPUs."""
    for section in sections(guide):
        models = in_natural_order(name for table in section.tables for name in table.models)
        yield _by_gpus(section.heading, section.tables, models, best_text)


def _by_gpus(
    title: str,
    tables: Sequence[GuideTable],
    models: Sequence[str],
    figure: Callable[[GuideTable, str], str],
) -> TextTable:
    """Table with a row for each number of GPUs and a column for each model."""
    rows = ((str(table.gpus), *(figure(table, name) for name in models)) for table in tables)
    return TextTable(title=title, columns=("GPUs", *models), rows=tuple(rows), left_columns=0)


def only_with_offload(table: GuideTable) -> str:
    """Sentence on models that need offload at the shortest length; empty if none does."""
    names = [
        each.model_name
        for each in table.rows[0][1]
        if each.capacity is not None and each.capacity.cell.settings.offload is not False
    ]
    return f"Only with states or moments on host, here: {', '.join(names)}." if names else ""


def only_tried(table: GuideTable) -> str:
    """Sentence on models that were tried only with memory-saving settings; empty if none."""
    tried: dict[str, list[str]] = {}
    for name in table.models:
        own = {each.cell for each in table.capacities if each.model_name == name}
        cells = sorted(own, key=simplicity)
        rows = cells[0].settings.sequences_per_micro_batch
        nothing_set = Cell(layout=Layout(), settings=Settings(sequences_per_micro_batch=rows))
        if simplicity(cells[0]) > simplicity(nothing_set):
            words = ", or with ".join(dict.fromkeys(each.words for each in cells))
            tried.setdefault(words, []).append(name)
    each = "; ".join(f"{', '.join(names)} with {labels}" for labels, names in tried.items())
    return f"Tried here, and nothing simpler: {each}. Simpler settings may do." if each else ""


def choice_table(table: GuideTable) -> TextTable:
    """Settings by length and model; ``?`` after an entry if simpler settings may fit."""
    return TextTable(
        title=f"simplest settings by length and model, {table.gpus_in_words}, {table.source}",
        columns=("max_model_len", *table.models),
        rows=tuple(
            (format_tokens(tokens), *(choice.entry for choice in own)) for tokens, own in table.rows
        ),
        left_columns=1 + len(table.models),
    )


def joined(table: TextTable) -> TextTable:
    """Join equal neighbouring rows of a long table into one row: ``4,096 – 40,960``."""
    if len(table.rows) <= _LONG_TABLE_ROWS:
        return table
    rows: list[tuple[str, ...]] = []
    for entries, own in groupby(table.rows, key=lambda row: row[1:]):
        lengths = [row[0] for row in own]
        length = lengths[0] if len(lengths) == 1 else f"{lengths[0]} – {lengths[-1]}"
        rows.append((length, *entries))
    return replace(table, rows=tuple(rows))


def long_contexts(guide: Guide) -> Iterator[LongContext]:
    """Yield the long-context configuration for each native length."""
    for native in dict.fromkeys(table.native_length_tokens for table in guide.tables):
        own = [table for table in guide.tables if table.native_length_tokens == native]
        rows = (row for table in own for row in table.rows)
        found = {tokens for tokens, choices in rows if any(choice.capacity for choice in choices)}
        longer = [tokens for tokens in sorted(found) if tokens > native]
        if len(longer) > _MANY_FACTORS:
            longer = [tokens for tokens in longer if tokens % native == 0]
        factors = ", ".join(f"{format_tokens(tokens)}: {tokens / native:g}" for tokens in longer)
        said = (
            f"`FACTOR` by length: {factors}." if factors else "No length of this guide is longer."
        )
        yield LongContext(
            _long_context(_model_path(own[0].models[0]), native),
            f"Up to {format_tokens(native)} tokens leave `rope_scaling` out. {said}",
        )


def _long_context(model_path: str, native_length_tokens: int) -> str:
    """The model part of a Trinity-RFT configuration beyond the native length."""
    factor = f"${{oc.decode:${{oc.env:FACTOR}}}}  # MAX_MODEL_LEN / {native_length_tokens}"
    block = yarn_parameters(factor, native_length_tokens=native_length_tokens)
    scaling = "".join(f"\n    {name}: {value}" for name, value in block.items())
    return f"""\
model:
  model_path: ${{oc.env:MODEL_PATH,{model_path}}}
  max_prompt_tokens: 2048
  max_model_len: ${{oc.env:MAX_MODEL_LEN,4096}}
  rope_scaling:{scaling}"""


def _model_path(model_name: str) -> str:
    """Example path for a configuration; text from outside is in it only where it is harmless."""
    if not re.fullmatch(r"[0-9A-Za-z][\w.-]*", model_name, re.ASCII):
        return "/path/to/model"
    return f"Qwen/{model_name}" if model_name.startswith("Qwen") else f"/path/to/{model_name}"


def budget_table(guide: Guide) -> TextTable:
    """Table of default and least token budgets at the longest length of the guide, by degree."""
    reached = (farthest(table, name) for table in guide.tables for name in table.models)
    tokens = max((found[0] for found in reached if found), default=PUBLISHED_STEP_TOKENS)
    layouts = (each.cell.layout for table in guide.tables for each in table.capacities)
    degrees = sorted({1, *(layout.context_degree for layout in layouts)})
    return table_of(
        f"Tokens per GPU at {format_tokens(tokens)} tokens",
        degrees,
        ("GPUs a sequence", str),
        ("default", lambda degree: format_tokens(math.ceil(2 * tokens / degree))),
        ("least", lambda degree: format_tokens(math.ceil(tokens / degree))),
        names=1,
    )


def origin_table(guide: Guide) -> TextTable:
    """Table of sources: the kind of each one's figures, and the number of capacities."""
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


def choice_speed(
    guide: Guide, table: GuideTable, choice: Choice, length_tokens: int
) -> PredictedStep | None:
    """Predicted time of a step with the guide's choice for a length; None if nothing fits, for
    another trainer, a model of unknown shape, or GPUs of unknown rates.
    """
    found = choice.capacity
    if found is None or found.trainer != OURS:
        return None
    query = guide.queries.get((found.found_in, found.model_name, table.device_name))
    if query is None or query.kind is None:
        return None
    with suppress(HighwaterError):
        return predicted_step(
            load_model(query.model).shape,
            found.cell.settings,
            found.cell.layout,
            length_tokens=length_tokens,
            device_name=query.kind,
        )
    return None


def speed_tables(guide: Guide) -> Iterator[TextTable]:
    """Yield tables of speed at the longest lengths, for sections whose speed is predicted."""

    def figure(table: GuideTable, model_name: str) -> str:
        """Text of the speed: ``1,038 at 1,044,480: 33m 33s a step``."""
        reached = farthest(table, model_name) if model_name in table.models else None
        if reached is None:
            return "-"
        tokens, choice = reached
        step = choice_speed(guide, table, choice, tokens)
        if step is None:
            return "-"
        at = f"{step.tokens_per_s:,.0f} at {format_tokens(tokens)}"
        return f"{at}: {format_seconds(step.time_s)} a step"

    for section in sections(guide):
        title = f"Tokens a second, predicted. {section.heading}"
        models = tuple(dict.fromkeys(name for table in section.tables for name in table.models))
        table = _by_gpus(title, section.tables, models, figure)
        if any(text != "-" for _, *figures in table.rows for text in figures):
            yield table


def guide_rows(guide: Guide) -> list[dict[str, str | int | float | None]]:
    """Rows of the published columns, with the source, and the predicted speed if known."""
    return [
        {
            "gpu": table.device_name,
            "gpus": table.gpus,
            "max_model_len": length_tokens,
            "model": choice.model_name,
            "settings": choice.label_in(published_label),
            "source": table.source,
            "training": table.training,
            "step_time_s": step and step.time_s,
            "tokens_per_s": step and step.tokens_per_s,
            "speed_source": step and "predicted",
        }
        for table in guide.tables
        for length_tokens, choices in table.rows
        for choice in choices
        for step in (choice_speed(guide, table, choice, length_tokens),)
    ]

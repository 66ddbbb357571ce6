"""The guide as a Markdown document: words, a table for each number of GPUs, long contexts, capacities, practices, sources."""

import math
import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from highwater.report import guide_text
from highwater.report.guide import UNKNOWN, Choice, Guide, GuideTable, cell_label, farthest, rung_label
from highwater.report.text import plain
from highwater.spec.capacities import Capacity, Source
from highwater.spec.ladder import simplicity
from highwater.spec.layout import Layout
from highwater.spec.settings import Settings
from highwater.spec.study import PUBLISHED_STEP_TOKENS, Cell, counted_ranks
from highwater.units import format_tokens

SOURCES: dict[Source, str] = {
    "measured": "measured by real trials",
    "simulated": "simulated from a memory law, nothing was trained",
    "predicted": "predicted, nothing was run; where the prediction is an interval, its upper end fits",
    "published": "published by others, not measured here",
}
_STRATEGIES = {"fsdp": "FSDP1", "fsdp2": "FSDP2"}
_HF_WEIGHTS = {"always": "saved with every checkpoint", "last": "saved at the end", "never": "never saved"}
_SPECIAL = re.compile(r"[&<>|*`\[\]\\~$]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])")


def guide_markdown(guide: Guide) -> str:
    """The whole document."""
    tables = guide.tables
    parts = ["# The longest context that trains, and the simplest settings for it", _contents(tables)]
    parts += ["## How to read it", "\n".join(_words(guide))]
    parts.append(f"> **Note.** {guide_text.TRAINERS_GPUS}")
    for heading, group in groupby(tables, key=_heading):
        parts += [f"## {escaped(heading)}", *_guide_part(tuple(group))]
    parts += ["## Past the native length", *_long_contexts(tables)]
    parts += ["## Memory and the token budget", guide_text.BUDGET, _budgets(tables)]
    parts += ["## Capacities", _CAPACITY_WORDS, *_capacity_tables(tables)]
    parts += ["## Best practices", guide_text.PRACTICES]
    parts += ["## Where the numbers come from", _origins(tables), *(f"- {escaped(note)}" for note in guide.notes)]
    return "\n\n".join(parts) + "\n"


def escaped(text: str) -> str:
    """Text from outside as text, in a Markdown paragraph, heading or table, and in HTML."""
    return _SPECIAL.sub(lambda found: f"&#{ord(found[0])};", plain(text))


def table_heading(table: GuideTable) -> str:
    """``4 GPUs``."""
    return counted_ranks(table.gpus, "cuda")


def summary(table: GuideTable) -> str:
    """One line: how far each model gets, and what kind of figure that is."""
    return f"longest context known to fit, {table.source}: {', '.join(_reached(table, name) for name in table.models)}"


def _reached(table: GuideTable, model_name: str) -> str:
    found = farthest(table, model_name)
    return f"{model_name} none" if found is None else f"{model_name} {format_tokens(found[0])} with {found[1].label}"


def _heading(table: GuideTable) -> str:
    return f"{table.device_name}: {table.source} ({table.training}; native length {format_tokens(table.native_length_tokens)})"


def _contents(tables: Sequence[GuideTable]) -> str:
    kinds = ", ".join(dict.fromkeys(escaped(table.device_name) for table in tables))
    sources = "; ".join(f"**{source}**: {text}" for source, text in SOURCES.items() if any(t.source == source for t in tables))
    return (
        f"For each length in tokens and each model: the simplest settings that fit, on {kinds}. "
        f"Every table says what its figures are ({sources})."
    )


def _words(guide: Guide) -> Iterator[str]:
    """The words that every guide explains, and those of its own."""
    labels = {cell_label(each.cell) for table in guide.tables for each in table.capacities}
    used = {name for name in guide_text.WORDS if any(name in label for label in labels)}
    yield from (f"- **{name}**: {text}" for name, text in guide_text.WORDS.items() if name in used | guide_text.ALWAYS)
    yield from (guide_text.COMBINED, guide_text.SAME_LABEL, guide_text.NOTHING)
    if any(choice.label == UNKNOWN for choice in guide.choices):
        yield guide_text.UNKNOWN
    if any(choice.capacity is not None and choice.may_be_simpler for choice in guide.choices):
        yield guide_text.PERHAPS_SIMPLER
    if any(choice.capacity is not None and choice.capacity.is_memory_only for choice in guide.choices):
        yield guide_text.MEMORY_ONLY


def _guide_part(tables: Sequence[GuideTable]) -> Iterator[str]:
    """A section for each number of GPUs, its table folded away."""
    for table in tables:
        yield f"### {table_heading(table)}"
        if table.gpus == 1:
            yield guide_text.ONE_GPU + _only_with_offload(table)
        yield f"<details>\n<summary>{escaped(summary(table))}</summary>"
        rows = [(format_tokens(tokens), *map(_choice_text, choices)) for tokens, choices in table.rows]
        yield _markdown_table(("max_model_len", *map(escaped, table.models)), rows, left=False)
        yield "</details>"


def _only_with_offload(table: GuideTable) -> str:
    first = table.rows[0][1]
    names = [each.model_name for each in first if each.capacity is not None and each.capacity.cell.settings.offload]
    return f" Only with offload, here: {escaped(', '.join(names))}." if names else ""


def _choice_text(choice: Choice) -> str:
    return f"{choice.label} ?" if choice.capacity is not None and choice.may_be_simpler else choice.label


def _long_contexts(tables: Sequence[GuideTable]) -> Iterator[str]:
    yield (
        "Lengths past a model's native length need YaRN, whose factor is length / native length. In a Trinity-RFT configuration, "
        "with `MODEL_PATH`, `MAX_MODEL_LEN` and `FACTOR` in the environment:"
    )
    lengths: dict[int, set[int]] = {}
    for table in tables:
        found = lengths.setdefault(table.native_length_tokens, set())
        found |= {tokens for tokens, choices in table.rows if any(choice.capacity for choice in choices)}
    for native, found in lengths.items():
        models = [name for table in tables if table.native_length_tokens == native for name in table.models]
        yield guide_text.long_context(_model_path(models[0]), native)
        factors = [f"{format_tokens(tokens)}: {tokens / native:g}" for tokens in sorted(found) if tokens > native]
        yield f"`FACTOR` by length: {', '.join(factors)}." if factors else "No length of this guide is longer."


def _model_path(model_name: str) -> str:
    """An example of a path in a configuration: text from outside only where it is harmless there."""
    if not re.fullmatch(r"[0-9A-Za-z][\w.-]*", model_name, re.ASCII):
        return "/path/to/model"
    return f"Qwen/{model_name}" if model_name.startswith("Qwen") else f"/path/to/{model_name}"


def _budgets(tables: Sequence[GuideTable]) -> str:
    """Default and least budgets at the longest length of the guide."""
    reached = (farthest(table, name) for table in tables for name in table.models)
    tokens = max((found[0] for found in reached if found is not None), default=PUBLISHED_STEP_TOKENS)
    degrees = sorted({1, *(each.cell.layout.ulysses_degree for table in tables for each in table.capacities)})
    rows = [(f"SP={degree}", *(format_tokens(math.ceil(n * tokens / degree)) for n in (2, 1))) for degree in degrees]
    return _markdown_table((f"at {format_tokens(tokens)} tokens", "default", "least"), rows)


_CAPACITY_WORDS = (
    "The longest length that each rung is known to fit, by number of GPUs and SP. `*`: past the native length, with YaRN. "
    "`-`: not even the shortest. `?`: unknown. `≥`: no longer one was tried. `<`: no shorter one was tried. Empty: not tried."
)


def _capacity_tables(tables: Sequence[GuideTable]) -> Iterator[str]:
    for heading, group in groupby(tables, key=_heading):
        capacities = [each for table in group for each in table.capacities]
        models = list(dict.fromkeys(each.model_name for each in capacities))
        yield f"### {escaped(heading)}"
        rungs = {each.cell.settings for each in capacities}
        for settings in sorted(rungs, key=lambda rung: (simplicity(Cell(layout=Layout(), settings=rung)), rung.save_hf)):
            own = [each for each in capacities if each.cell.settings == settings]
            layouts = sorted({(each.cell.layout.gpus, each.cell.layout.ulysses_degree) for each in own})
            rows = [
                (str(gpus), str(degree), *(_figure([each for each in own if _at(each, gpus, degree, name)]) for name in models))
                for gpus, degree in layouts
            ]
            yield f"**{escaped(_rung(settings))}**"
            yield _markdown_table(("GPUs", "SP", *map(escaped, models)), rows, left=False)


def _rung(settings: Settings) -> str:
    weights = _HF_WEIGHTS[settings.save_hf]
    return f"{rung_label(settings)} ({_STRATEGIES[settings.strategy]}, Hugging Face weights {weights})"


def _at(capacity: Capacity, gpus: int, degree: int, model_name: str) -> bool:
    layout = capacity.cell.layout
    return (layout.gpus, layout.ulysses_degree, capacity.model_name) == (gpus, degree, model_name)


def _figure(capacities: Sequence[Capacity]) -> str:
    """One cell's capacity; a memory-only proof beside it; of several files each."""
    return ", ".join(dict.fromkeys(map(_capacity_text, capacities)))


def _capacity_text(capacity: Capacity) -> str:
    tokens, fails = capacity.capacity_tokens, capacity.does_not_fit_tokens
    if tokens == 0:
        if fails is None:
            return "?"
        return "-" if fails <= PUBLISHED_STEP_TOKENS else f"&lt; {format_tokens(fails)}"
    yarn = r"\*" if tokens > capacity.native_length_tokens else ""
    figure = f"{'' if fails else '≥ '}{format_tokens(tokens)}{yarn}"
    return f"{figure} memory-only" if capacity.is_memory_only else figure


def _origins(tables: Sequence[GuideTable]) -> str:
    """Every file and prediction with its label, and what was found there."""
    found: dict[tuple[str, Source], list[Capacity]] = {}
    for table in tables:
        for each in table.capacities:
            found.setdefault((each.found_in, each.source), []).append(each)
    rows = [
        (
            escaped(name),
            SOURCES[source],
            escaped(", ".join(dict.fromkeys(each.device_name for each in own))),
            escaped(", ".join(dict.fromkeys(each.model_name for each in own))),
            str(len({(each.model_name, each.cell) for each in own})),
            str(sum(each.capacity_tokens == 0 and each.does_not_fit_tokens is None for each in own)),
        )
        for (name, source), own in found.items()
    ]
    return _markdown_table(("found in", "figures", "GPU", "models", "cells", "of them unknown"), rows)


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: bool = True) -> str:
    """Columns of figures are aligned right, unless all are text; widths are even, for who reads the source."""
    grid = [tuple(columns), *map(tuple, rows)]
    widths = [max(3, *(len(row[column]) for row in grid)) for column in range(len(columns))]
    lines = ["| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |" for row in grid]
    rules = ["-" * width if left or index else "-" * (width - 1) + ":" for index, width in enumerate(widths)]
    return "\n".join((lines[0], "| " + " | ".join(rules) + " |", *lines[1:]))

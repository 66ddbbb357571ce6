"""The report of ``highwater bench attention``: its tables, in a terminal, as Markdown and as JSON.

Every figure is measured, counted (``kept``) or ``predicted``; unmeasured cases are left out.
"""

import re
from collections.abc import Iterator, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

from msgspec.structs import asdict

from highwater.nouns.attention_bench import (
    COMPARED,
    IMPLEMENTATIONS,
    AttentionBench,
    BenchCheck,
    Direction,
    Entry,
)
from highwater.pages.page import drawn_page, template_lines
from highwater.pages.table import Column, TextTable, field_text, table_of
from highwater.pages.text import plain
from highwater.recommendation.attention_summary import (
    FAR,
    LEAST_LENGTHS,
    AttentionSummary,
    LongestLength,
    MemoryFit,
    attention_summary,
    contestants,
    entries,
    rows_of,
    times_s,
)
from highwater.units import counted, format_bytes, format_pass, format_tokens

_ENTRY = ("implementation", "mode", "direction")
_COSTS = ("time_s", "kept_share", "after_qkv_bytes", "peak_allocated_bytes", "peak_reserved_bytes")
_WORDS = {
    "kept_share": "kept",
    "after_qkv": "after Q/K/V",
    "outside": "outside the allocator",
    "most": "longest to try",
}
"""Headings that are not the field's name."""
_lines = partial(template_lines, "attention.txt.j2")


class BenchDocument(AttentionBench, frozen=True, kw_only=True):
    """JSON of ``highwater bench attention``: settings, measured cases, answer and summary."""

    schema_version: int = 1
    answer: str
    summary: AttentionSummary


def bench_document(bench: AttentionBench) -> BenchDocument:
    """Make the JSON document of a benchmark's report."""
    summary = attention_summary(bench)
    return BenchDocument(**asdict(bench), answer=_answer(bench, summary), summary=summary)


class ReportSection(NamedTuple):
    """A section of the report: its heading, its lines, and the tables below them."""

    title: str
    tables: Sequence[TextTable] = ()
    lines: Sequence[str] = ()


def attention_markdown(bench: AttentionBench) -> str:
    """Draw the report as Markdown."""
    return drawn_page("attention.j2", form="md", sections=list(report_sections(bench))).rstrip("\n")


def report_sections(bench: AttentionBench) -> Iterator[ReportSection]:
    """Yield the report's sections in reading order."""
    summary, directions = attention_summary(bench), bench.order.directions
    yield ReportSection("Longest lengths", [longest_table(bench, summary)])
    yield ReportSection("What to use", lines=_lines("use_cases", summary=summary))
    yield ReportSection("Measured on", [_machine_table(bench)])
    yield ReportSection("Correctness", [_check_table(bench)])
    yield ReportSection("Every implementation and mode", list(_case_tables(bench)))
    yield ReportSection("Ratio to dense", [_ratio_table(bench, each) for each in directions])
    alone = _lines("scaling", summary=summary)
    efficiencies = table_of(
        "tokens/s and longest length of several GPUs, of one GPU's",
        summary.efficiencies,
        *_fields(*_ENTRY, "gpus", "length_tokens", "speedup", "efficiency", "length_ratio"),
        footnotes=_lines("efficiency"),
    )
    yield ReportSection("Scaling efficiency", [efficiencies], alone)
    others = [predicted_table(bench, summary, direction) for direction in directions]
    formulas = table_of(
        "peak allocated = overhead + bytes per token × length + bytes per pair × length²",
        summary.estimates,
        *_fields(*_ENTRY, *(f"fit.{name}" for name in MemoryFit.__struct_fields__)),
        footnotes=_lines("formula"),
    )
    yield ReportSection("Other GPUs, predicted", [*others, formulas], _too_little(summary))


def longest_table(bench: AttentionBench, summary: AttentionSummary) -> TextTable:
    """The answer as a table: the longest length of each implementation and mode, and its costs."""

    def ended(each: LongestLength) -> str:
        at = f" at {format_tokens(each.fails_tokens)}" if each.fails_tokens else ""
        return f"{each.why}{at}"

    takes_segments = any(
        IMPLEMENTATIONS[name].takes_segments for name in bench.order.implementations
    )
    return table_of(
        _answer(bench, summary),
        summary.longest,
        *(*_fields(*_ENTRY), ("longest", _held)),
        *(*_fields(*(f"row.{name}" for name in _COSTS)), ("ended by", ended)),
        footnotes=_lines("labels", bench=bench, takes_segments=takes_segments),
    )


def _answer(bench: AttentionBench, summary: AttentionSummary) -> str:
    """Sentence with the longest length of all, and that of dense attention."""
    direction = bench.order.directions[-1]
    found = [each for each in contestants(summary.longest, direction) if each.fits_tokens]
    if not found:
        return f"no attention held any length, {direction}"
    best = max(found, key=lambda each: (each.fits_tokens or 0, -each.time_s))
    where = "" if best.mode == "single" else f" over {counted(bench.order.gpus, 'GPU')}"
    said = f"{best.implementation}{where} holds {_held(best)} tokens, {direction}, in "
    said += format_pass(best.time_s)
    others = [each for each in found if each.implementation == "dense" and each is not best]
    held = (f"dense {_held(each)} in {format_pass(each.time_s)}" for each in others)
    return "; ".join((said, *held))


def _held(each: LongestLength) -> str:
    """Text of a longest length: ``131,072``, ``≥ 131,072`` if no longer one was tried, or ``-``."""
    is_least = each.why == "longest tried" and each.fits_tokens
    return f"{'≥ ' if is_least else ''}{format_tokens(each.fits_tokens)}"


def _fields(*paths: str) -> list[Column[Any]]:
    """Columns of fields, by their paths: a heading, and cells with their unit."""
    return [(_heading(path.rpartition(".")[2]), partial(_cell, path=path)) for path in paths]


def _cell(record: Any, path: str) -> str:
    """Text of a field, by the unit that its name ends with; ``-`` for None."""
    value: Any = reduce(lambda found, name: getattr(found, name, None), path.split("."), record)
    if value is None or value == ():
        return "-"
    if path.endswith("_s"):
        return format_pass(value)
    if path.endswith(("share", "efficiency", "error")):
        return f"{100 * value:.3g} %"
    if isinstance(value, tuple):
        return per_gpu(value) if path.endswith("_bytes") else plain(", ".join(map(str, value)))
    is_number = isinstance(value, float) and not path.endswith("_bytes")
    return f"{value:,.4g}" if is_number else field_text(record, path)


def _heading(name: str) -> str:
    word = re.sub("_(bytes|tokens|s)$", "", name)
    return _WORDS.get(word, word.replace("_", " "))


def per_gpu(sizes: Sequence[int]) -> str:
    """Text of sizes: one size if all GPUs' texts are equal, else all, separated by slashes."""
    told = list(map(format_bytes, sizes))
    return " / ".join(told[:1] if len(set(told)) == 1 else told)


def entry_words(entry: Entry) -> str:
    """``dense, forward`` or ``dense, data parallel, forward``."""
    return f"{_name(entry)}, {entry.direction}"


def _name(entry: Entry) -> str:
    is_plain = entry.mode in ("single", entry.implementation)
    return entry.implementation if is_plain else f"{entry.implementation}, {entry.mode}"


def _machine_table(bench: AttentionBench) -> TextTable:
    """Table of the date, the machine, the versions and the order, a row for each field."""
    rows = [("made at", bench.made_at), ("command", plain(" ".join(bench.command)))]
    for record in (bench.machine, bench.order):
        names = [name for name in record.__struct_fields__ if name != "versions"]
        rows += [(_heading(name), _cell(record, name)) for name in names]
    return TextTable(
        title="what was measured on, and what was asked",
        columns=("what", "which"),
        rows=(*rows, *((name, plain(own)) for name, own in bench.machine.versions.items())),
        left_columns=2,
    )


def _check_table(bench: AttentionBench) -> TextTable:
    """Table of the differences between each implementation and the reference, with the verdict."""

    def off(check: BenchCheck, name: str) -> str:
        difference = check.differences.get(name)
        return "-" if difference is None else f"{difference:.1e}"

    return table_of(
        "beside the textbook formula in float64: norm-relative difference",
        bench.checks,
        *_fields("implementation", "mode", "length_tokens"),
        *((_heading(name), partial(off, name=name)) for name in COMPARED),
        ("allowed", lambda each: f"{each.tolerance:.0e}"),
        ("verdict", lambda each: plain(each.reason) or "equal"),
        names=2,
    )


def _case_tables(bench: AttentionBench) -> Iterator[TextTable]:
    for entry in entries(bench):
        rows = rows_of(bench, entry, batches=True)
        said = [(row.length_tokens, plain(row.reason)) for row in rows if row.reason]
        yield table_of(
            f"{entry_words(entry)}: {IMPLEMENTATIONS[entry.implementation].what}",
            rows,
            *_fields("length_tokens", "batch", "result", *_COSTS),
            footnotes=(f"{format_tokens(length)}: {reason}" for length, reason in said),
            names=0,
        )


def _ratio_table(bench: AttentionBench, direction: Direction) -> TextTable:
    """Table of each implementation's speed relative to dense, by length; ``-`` without a time."""
    one = Entry("dense", "single", direction)
    dense = times_s(bench, one)
    measured = [each for each in entries(bench) if each.direction == direction and each != one]
    others = {each: times_s(bench, each) for each in measured if each.mode != "data parallel"}
    lengths = sorted(dense.keys() & {length for own in others.values() for length in own})
    return TextTable(
        title=f"times as fast as dense on one GPU, {direction}",
        columns=("implementation", *map(format_tokens, lengths)),
        rows=tuple(
            (_name(entry), *(f"{dense[n] / own[n]:.3g}" if n in own else "-" for n in lengths))
            for entry, own in others.items()
            if dense.keys() & own
        ),
        left_columns=1,
    )


def predicted_table(
    bench: AttentionBench, summary: AttentionSummary, direction: Direction
) -> TextTable:
    """Predicted longest lengths by kind of GPU; kinds with only lower bounds are left out."""
    own = [each for each in summary.predicted if each.direction == direction]
    kinds = {each.gpu: each for each in own if not each.is_least}
    tokens = {(each.gpu, each.entry): (each.is_least, each.tokens) for each in own}
    cells = {of: f"{'≥ ' if least else ''}{format_tokens(n)}" for of, (least, n) in tokens.items()}
    columns = list(dict.fromkeys(each.entry for each in own))
    gains = [each for each in summary.efficiencies if each.mode == "data parallel"]
    said = "whole sequences, tokens/s not measured on GPUs"
    if gains and bench.order.device == "cuda":
        best = max(gains, key=lambda each: each.speedup)
        brings = f"{best.speedup:.3g} times tokens/s on {best.gpus} ({best.implementation})"
        said = f"whole sequences, {brings}"
    return TextTable(
        title=f"predicted: longest length on other GPUs, {direction}, by memory alone",
        columns=("GPU", "memory", *map(_name, columns), "DataParallel"),
        rows=tuple(
            (gpu, format_bytes(each.memory_bytes), *(cells[gpu, entry] for entry in columns), said)
            for gpu, each in kinds.items()
        ),
        footnotes=_lines("predicted", bench=bench, kinds=list(kinds.values()), far=FAR),
        left_columns=1,
    )


def _too_little(summary: AttentionSummary) -> tuple[str, ...]:
    known = [each.entry for each in summary.estimates]
    unknown = [
        entry_words(each.entry)
        for each in summary.longest
        if each.fits_tokens and each.mode != "data parallel" and each.entry not in known
    ]
    beyond = {each.gpu for each in summary.predicted}
    beyond -= {each.gpu for each in summary.predicted if not each.is_least}
    limits = {"far": FAR, "least_lengths": LEAST_LENGTHS}
    return _lines("too_little", summary=summary, unknown=unknown, beyond=len(beyond), **limits)

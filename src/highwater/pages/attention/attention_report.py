"""The report of a benchmark of attentions: its sections in their order, as Markdown and as a page
that needs nothing else.
"""

from collections.abc import Iterator
from typing import NamedTuple

from highwater.nouns.attention_bench import IMPLEMENTATIONS, AttentionBench, BenchOrder
from highwater.pages.attention.attention_conclusions import (
    advice,
    answer,
    conclusions,
    labels,
    too_little,
    use_case_lines,
)
from highwater.pages.attention.attention_plots import Plot, plots
from highwater.pages.attention.attention_tables import (
    case_tables,
    check_table,
    efficiency_table,
    estimate_table,
    longest_table,
    machine_table,
    predicted_table,
    ratio_table,
)
from highwater.pages.page import page_template
from highwater.pages.text import escaped, fenced, markdown_list, markdown_table
from highwater.pages.text_table import TextTable
from highwater.recommendation.attention_summary import (
    AttentionSummary,
    UseCase,
    attention_summary,
)
from highwater.units import format_tokens

_FORMULA = (
    "Longest length = (memory − what is outside the allocator − overhead) / bytes a token, of "
    "memory that the allocator reserves as it does here."
)
_HEADS_LAST = (
    "\nby_token = [t.transpose(1, 2) for t in (q, k, v)]  # (batch, length, heads, head size)\n"
)
CODE_PREAMBLES = {
    "block_sparse": (
        f"from highwater import BlockSparseAttention, SparsePatternConfig\n{_HEADS_LAST}"
    ),
    "dense": "from torch.nn.functional import scaled_dot_product_attention\n",
    "dense_flex": (
        "import torch\n"
        "from torch.nn.attention.flex_attention import create_block_mask, flex_attention\n"
        "\n"
        "flex_attention = torch.compile(flex_attention)  # else all scores are there at once\n"
        "create_block_mask = torch.compile(create_block_mask)\n"
        "causal_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length)\n"
    ),
    "dilated": (f"from highwater import DilatedAttention\n{_HEADS_LAST}length = q.shape[2]\n"),
}
CODE_PREAMBLES["window"] = CODE_PREAMBLES["block_sparse"]
CODE_PREAMBLES["block_sparse_ring_dilated"] = CODE_PREAMBLES["dilated"].replace(
    "DilatedAttention", "BlockSparseRingDilatedAttention, SparsePatternConfig"
)
"""What stands before an implementation's code, by its family."""


class ReportPart(NamedTuple):
    """A part of a section."""

    title: str
    lines: list[str]
    code: str = ""


class ReportSection(NamedTuple):
    """A heading and what stands under it, in this order."""

    title: str
    lines: list[str]
    plots: list[Plot]
    tables: list[TextTable]
    parts: list[ReportPart]


class AttentionReport(NamedTuple):
    """All of it."""

    answer: str
    sections: list[ReportSection]


class BenchDocument(AttentionBench, frozen=True, kw_only=True):
    """What ``highwater bench attention --json`` prints: what was measured, its cases as ``rows``,
    and what follows from them.
    """

    schema_version: int = 1
    answer: str
    summary: AttentionSummary
    conclusions: tuple[str, ...]
    advice: tuple[str, ...]


def attention_report(bench: AttentionBench) -> AttentionReport:
    """Put the report together."""
    summary = attention_summary(bench)
    return AttentionReport(answer(bench, summary), list(_sections(bench, summary)))


def bench_document(bench: AttentionBench) -> BenchDocument:
    """The same as one JSON document; ``rows`` are the measured cases."""
    summary = attention_summary(bench)
    return BenchDocument(
        **{name: getattr(bench, name) for name in AttentionBench.__struct_fields__},
        answer=answer(bench, summary),
        summary=summary,
        conclusions=tuple(conclusions(bench, summary)),
        advice=tuple(advice(summary)),
    )


def attention_markdown(bench: AttentionBench) -> str:
    """The report as Markdown, beside whose file the plots lie."""
    report = attention_report(bench)
    return "\n\n".join(
        (
            "# The longest sequence that each attention holds",
            escaped(f"{report.answer}."),
            *(text for section in report.sections for text in _section_markdown(section)),
        )
    )


def attention_page(bench: AttentionBench) -> str:
    """The report as a page."""
    return page_template("attention.html.j2").render(report=attention_report(bench))


def _section_markdown(section: ReportSection) -> Iterator[str]:
    yield f"## {section.title}"
    if section.lines:
        yield markdown_list(section.lines)
    for plot in section.plots:
        yield f"![{plot.title}]({plot.name}.svg)"
    for table in section.tables:
        yield f"**{escaped(table.title)}**"
        yield markdown_table(table)
        if table.footnotes:
            yield markdown_list(map(escaped, table.footnotes))
    for part in section.parts:
        yield f"### {part.title}"
        yield markdown_list(part.lines)
        if part.code:
            yield fenced(part.code).replace("```text", "```python", 1)


def _sections(bench: AttentionBench, summary: AttentionSummary) -> Iterator[ReportSection]:
    directions = bench.order.directions
    longest = longest_table(bench, summary)
    yield _section("Measured on", tables=[machine_table(bench)])
    yield _section(
        "Executive summary",
        lines=[answer(bench, summary), *conclusions(bench, summary)[:3], *labels(bench)],
        plots=plots(bench),
        tables=[longest],
    )
    yield _section("Correctness", tables=[check_table(bench)])
    yield _section("Every implementation and mode", tables=list(case_tables(bench)))
    yield _section(
        "Ratio to dense",
        tables=[ratio_table(summary, direction) for direction in directions],
    )
    yield _section("Bytes a token", lines=[_FORMULA], tables=[estimate_table(summary)])
    if summary.efficiencies:
        yield _section("Scaling efficiency", tables=[efficiency_table(summary)])
    else:
        alone = (
            "One GPU was measured: `--gpus 2` compares with it DataParallel, which cannot lengthen "
            "a sequence, and ring and Ulysses, which can."
        )
        yield _section("Scaling efficiency", lines=[alone])
    yield _section(
        "Other GPUs, predicted",
        lines=too_little(summary),
        tables=[predicted_table(bench, summary, direction) for direction in directions],
    )
    yield _section(
        "What to use",
        parts=[_use_case(case, bench.order) for case in summary.use_cases],
    )
    yield _section("Recompute and batch", lines=advice(summary))
    yield _section("Conclusions", lines=conclusions(bench, summary))


def _section(
    title: str,
    *,
    lines: list[str] | None = None,
    plots: list[Plot] | None = None,
    tables: list[TextTable] | None = None,
    parts: list[ReportPart] | None = None,
) -> ReportSection:
    drawn = [table for table in tables or [] if table.rows]
    return ReportSection(title, lines or [], plots or [], drawn, parts or [])


def _use_case(case: UseCase, order: BenchOrder) -> ReportPart:
    """A range of lengths with the code of what it names."""
    chosen = {
        "the same model": case.exact,
        "another model, to be trained so": case.sparse,
    }
    code = "\n\n".join(
        f"# {kind}\n{CODE_PREAMBLES.get(IMPLEMENTATIONS[each.implementation].family, '')}"
        f"output = {order.code(each.implementation)}"
        for kind, each in chosen.items()
        if each is not None
    )
    start = format_tokens(case.from_tokens)
    to = case.to_tokens
    title = f"Beyond {start} tokens" if to is None else f"{start} to {format_tokens(to)} tokens"
    return ReportPart(title, use_case_lines(case), code)

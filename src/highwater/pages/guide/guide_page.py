"""The guide as one HTML page that needs neither network nor script, and as a Markdown document."""

import html
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from highwater.pages.answer_sentence import recommendation_answer
from highwater.pages.guide import guide_parts, guide_text
from highwater.pages.guide import guide_parts as guide_rungs
from highwater.pages.guide.guide import Guide, Place, chooser_json
from highwater.pages.guide.guide_parts import Section
from highwater.pages.guide.guide_rows import speed_tables
from highwater.pages.page import digest, page_script, page_template
from highwater.pages.text import escaped, markdown_list, markdown_table, plain


class Bar(NamedTuple):
    """How far one model gets on one number of GPUs."""

    label: str
    text: str
    percent: float
    """Length that was trained in full, in per cent of the longest bar of its section."""
    memory_only_percent: float
    """Length that memory alone holds beyond, in the same per cent."""


def guide_page(guide: Guide, places: Sequence[Place] = ()) -> str:
    """Write the whole page, with a chooser among ``places``. Everything is escaped but what is
    marked in our own text.
    """
    sections = guide_parts.sections(guide)
    script = page_script("chooser.js")
    return page_template("guide.html.j2").render(
        text=guide_text,
        introduction=guide_parts.introduction(guide),
        sources=guide_parts.source_words(guide),
        words=list(guide_parts.words(guide)),
        sections=sections,
        bars=[_bars(section) for section in sections],
        rungs=guide_rungs.rungs,
        gpus_heading=guide_parts.gpus_heading,
        only_with_offload=guide_parts.only_with_offload,
        only_tried=guide_parts.only_tried,
        default_budget=guide_parts.default_budget,
        choice_table=guide_parts.choice_table,
        summary=guide_parts.summary,
        contexts=list(guide_parts.long_contexts(guide)),
        budgets=guide_parts.budget_table(guide),
        origins=guide_parts.origin_table(guide),
        notes=guide.notes,
        places=places,
        data=chooser_json(places),
        script=script,
        script_digest=digest(script),
        opening=_opening(places),
        speeds=list(speed_tables(guide)),
    )


def _opening(places: Sequence[Place]) -> str:
    """The answer that the chooser opens with; empty without one."""
    if not places:
        return ""
    place = next((each for each in places if each.longest_tokens is not None), places[0])
    length = place.longest_tokens or place.answers[0].found.length_tokens
    return next(
        recommendation_answer(each.found)
        for each in place.answers
        if each.found.length_tokens == length
    )


def _bars(section: Section) -> list[Bar]:
    found = [
        (table, name, guide_rungs.longest(table, name))
        for table in section.tables
        for name in table.models
    ]
    reached = [[0 if each is None else each.capacity_tokens for each in pair] for *_, pair in found]
    unit = max(1, *(tokens for pair in reached for tokens in pair)) / 100
    return [
        Bar(
            label=f"{guide_parts.gpus_heading(table)}, {name}",
            text=guide_parts.reached_text(table, name),
            percent=round(full / unit, 1),
            memory_only_percent=round(max(0, memory_only - full) / unit, 1),
        )
        for (table, name, _), (full, memory_only) in zip(found, reached, strict=True)
    ]


_MANY_SOURCES = 12
"""Sources beyond which their table is folded away."""


def guide_markdown(guide: Guide) -> str:
    """Write the whole document."""
    sections = guide_parts.sections(guide)
    parts = [
        f"# {guide_text.TITLE}",
        escaped(guide_parts.introduction(guide)),
        markdown_list(guide_parts.source_words(guide)),
    ]
    parts += ["## At a glance", guide_text.GLANCE, *_glance(guide)]
    parts += [
        "## How to read it",
        markdown_list(_words(guide)),
        f"> **Note.** {guide_text.TRAINERS_GPUS}",
    ]
    for section in sections:
        parts += [f"## {escaped(section.heading)}", *_choices(section)]
    speeds = list(speed_tables(guide))
    parts += ["## Speed, predicted", guide_text.SPEED] if speeds else []
    for table in speeds:
        parts += [f"**{escaped(table.title)}**", markdown_table(table)]
    parts += ["## Past the native length", guide_text.LONG_CONTEXTS]
    for configuration, factors in guide_parts.long_contexts(guide):
        parts += [f"```yaml\n{configuration}```", factors]
    parts.append(guide_text.LONG_CONTEXTS_TRAINER)
    budgets = guide_parts.budget_table(guide)
    parts += [
        "## Memory and the token budget",
        guide_text.BUDGET,
        markdown_list(guide_text.BUDGETS),
    ]
    parts += [
        guide_text.BUDGET_OF_BOTH,
        guide_text.BUDGET_RULE,
        f"{budgets.title}:",
        markdown_table(budgets),
    ]
    parts += [
        "## Capacities",
        guide_text.CAPACITIES,
        *(part for section in sections for part in _capacities(section)),
    ]
    parts += [
        "## Best practices",
        "\n".join(f"{n}. {text}" for n, text in enumerate(guide_text.PRACTICES, 1)),
    ]
    parts += ["## Where the numbers come from", *_origins(guide)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _glance(guide: Guide) -> Iterator[str]:
    for table in guide_parts.glance_tables(guide):
        yield f"**{escaped(table.title)}**"
        yield markdown_table(table)


def _words(guide: Guide) -> Iterator[str]:
    yield from guide_parts.words(guide)
    if any(
        guide_parts.joined(table) != table for table in map(guide_parts.choice_table, guide.tables)
    ):
        yield guide_text.JOINED


def _choices(section: Section) -> Iterator[str]:
    """A part for each number of GPUs, its table folded away."""
    yield guide_parts.default_budget(section)
    for table in section.tables:
        yield f"### {guide_parts.gpus_heading(table)}"
        if table.gpus == 1:
            yield f"> {guide_text.ONE_GPU} {escaped(guide_parts.only_with_offload(table))}".rstrip()
        yield f"<details>\n<summary>{html.escape(plain(guide_parts.summary(table)))}</summary>"
        yield markdown_table(guide_parts.joined(guide_parts.choice_table(table)))
        yield escaped(guide_parts.only_tried(table))
        yield "</details>"


def _capacities(section: Section) -> Iterator[str]:
    yield f"### {escaped(section.heading)}"
    for table in guide_rungs.rungs(section.capacities):
        yield f"**{escaped(table.title)}**"
        yield markdown_table(table)


def _origins(guide: Guide) -> Iterator[str]:
    """The table of sources, folded away where there are many."""
    table = guide_parts.origin_table(guide)
    many = len(table.rows) > _MANY_SOURCES
    if many:
        yield f"<details>\n<summary>{len(table.rows)} sources</summary>"
    yield markdown_table(table)
    yield markdown_list(map(escaped, guide.notes))
    if many:
        yield "</details>"

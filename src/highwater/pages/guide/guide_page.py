"""The guide as one HTML page that needs neither network nor script, and as a Markdown document."""

import html
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from highwater.pages.answer_sentence import recommendation_answer
from highwater.pages.guide import guide_parts, guide_text
from highwater.pages.guide import guide_parts as guide_rungs
from highwater.pages.guide.guide import Guide, Place, chooser_json
from highwater.pages.guide.guide_parts import Section
from highwater.pages.guide.guide_rows import speed_tables
from highwater.pages.page import digest, page_script, page_template
from highwater.pages.text import TextTable, escaped, markdown_list, markdown_table, plain


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
    sections, text = guide_parts.sections(guide), guide_text
    speeds, budgets = list(speed_tables(guide)), guide_parts.budget_table(guide)
    parts = [f"# {text.TITLE}", escaped(guide_parts.introduction(guide))]
    parts.append(markdown_list(guide_parts.source_words(guide)))
    parts += ["## At a glance", text.GLANCE, *_tables(guide_parts.glance_tables(guide))]
    parts += [
        "## How to read it",
        markdown_list(_words(guide)),
        f"> **Note.** {text.TRAINERS_GPUS}",
    ]
    for section in sections:
        parts += [f"## {escaped(section.heading)}", *_choices(section)]
    parts += ["## Speed, predicted", text.SPEED, *_tables(speeds)] if speeds else []
    parts += ["## Past the native length", text.LONG_CONTEXTS]
    for configuration, factors in guide_parts.long_contexts(guide):
        parts += [f"```yaml\n{configuration}```", factors]
    parts += [text.LONG_CONTEXTS_TRAINER, "## Memory and the token budget", text.BUDGET]
    parts += [markdown_list(text.BUDGETS), text.BUDGET_OF_BOTH, text.BUDGET_RULE]
    parts += [f"{budgets.title}:", markdown_table(budgets), "## Capacities", text.CAPACITIES]
    for section in sections:
        rungs = guide_parts.rungs(section.capacities)
        parts += [f"### {escaped(section.heading)}", *_tables(rungs)]
    practices = "\n".join(f"{n}. {said}" for n, said in enumerate(text.PRACTICES, 1))
    parts += ["## Best practices", practices, "## Where the numbers come from", *_origins(guide)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _tables(tables: Iterable[TextTable]) -> Iterator[str]:
    for table in tables:
        yield f"**{escaped(table.title)}**"
        yield markdown_table(table)


def _words(guide: Guide) -> Iterator[str]:
    yield from guide_parts.words(guide)
    tables = list(map(guide_parts.choice_table, guide.tables))
    if any(guide_parts.joined(table) != table for table in tables):
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

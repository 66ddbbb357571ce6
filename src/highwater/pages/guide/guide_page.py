"""The guide as one HTML page that needs nothing else.

It needs no network, and is readable without script, on a phone, in the dark and on paper.
"""

from collections.abc import Sequence
from typing import NamedTuple

from highwater.pages.answer_sentence import recommendation_answer
from highwater.pages.guide import guide_parts, guide_rungs, guide_text
from highwater.pages.guide.chooser import Place, chooser_json
from highwater.pages.guide.guide import Guide
from highwater.pages.guide.guide_parts import Section
from highwater.pages.guide.guide_speed import speed_tables
from highwater.pages.page import digest, page_script, page_template


class Bar(NamedTuple):
    """How far one model gets on one number of GPUs."""

    label: str
    text: str
    percent: float
    """Length that was trained in full, in per cent of the longest bar of its section."""
    memory_only_percent: float
    """Length that memory alone holds beyond, in the same per cent."""


def guide_page(guide: Guide, places: Sequence[Place] = ()) -> str:
    """Write the whole page, with a chooser among ``places``.

    Everything is escaped but what is marked in our own text.
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

"""The rows of a guide, as ``highwater guide --json`` prints them, and the speed of its settings."""

from collections.abc import Iterator
from contextlib import suppress

from highwater.errors import HighwaterError
from highwater.model.model import load_model
from highwater.nouns.trainer import OURS
from highwater.pages.guide import guide_parts
from highwater.pages.guide.guide import Choice, Guide, GuideTable, farthest
from highwater.pages.text import TextTable
from highwater.speed import PredictedStep, predicted_step
from highwater.units import format_seconds, format_tokens


def choice_speed(
    guide: Guide, table: GuideTable, choice: Choice, length_tokens: int
) -> PredictedStep | None:
    """The time of a step with what the guide names for a length. None where nothing fits, of
    another trainer, of a model that nobody has the shape of, and of GPUs whose rates nobody knows.
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
    """Of each section whose speed can be predicted: GPUs by models, at the longest lengths."""
    for section in guide_parts.sections(guide):
        models = tuple(dict.fromkeys(name for table in section.tables for name in table.models))
        rows = [
            (str(table.gpus), *(_figure(guide, table, name) for name in models))
            for table in section.tables
        ]
        if any(entry != "-" for _, *entries in rows for entry in entries):
            yield TextTable(
                title=f"Tokens a second, predicted. {section.heading}",
                columns=("GPUs", *models),
                rows=tuple(rows),
                left_columns=0,
            )


def _figure(guide: Guide, table: GuideTable, model_name: str) -> str:
    """``1,038 at 1,044,480: 33m 33s a step``."""
    reached = farthest(table, model_name) if model_name in table.models else None
    if reached is None:
        return "-"
    length_tokens, choice = reached
    step = choice_speed(guide, table, choice, length_tokens)
    if step is None:
        return "-"
    return (
        f"{step.tokens_per_s:,.0f} at {format_tokens(length_tokens)}: "
        f"{format_seconds(step.time_s)} a step"
    )


GuideRow = dict[str, str | int | float | None]


def guide_rows(guide: Guide) -> list[GuideRow]:
    """Rows with the columns of the published guide, what each rests on, and how fast it is. There
    is a row for each length and model. A step's time is predicted; None where nobody knows.
    """
    return [
        _row(guide, table, length_tokens, choice)
        for table in guide.tables
        for length_tokens, choices in table.rows
        for choice in choices
    ]


def _row(guide: Guide, table: GuideTable, length_tokens: int, choice: Choice) -> GuideRow:
    step = choice_speed(guide, table, choice, length_tokens)
    return {
        "gpu": table.device_name,
        "gpus": table.gpus,
        "max_model_len": length_tokens,
        "model": choice.model_name,
        "settings": choice.label,
        "source": table.source,
        "training": table.training,
        "step_time_s": None if step is None else step.time_s,
        "tokens_per_s": None if step is None else step.tokens_per_s,
        "speed_source": None if step is None else "predicted",
    }

"""The rows of a guide, as ``highwater guide --json`` prints them."""

from highwater.pages.guide.guide import Choice, Guide, GuideTable
from highwater.pages.guide.guide_speed import choice_speed

GuideRow = dict[str, str | int | float | None]


def guide_rows(guide: Guide) -> list[GuideRow]:
    """Rows with the columns of the published guide, what each rests on, and how fast it is.

    There is a row for each length and model. A step's time is predicted; None where nobody knows.
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

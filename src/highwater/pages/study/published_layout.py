"""The published layout: answers as the published search prints them, in tables and in lines."""

from collections.abc import Sequence

import msgspec

from highwater.nouns.study import Cell, CellAnswer, Question, Study
from highwater.pages.study.tables import capacity_text, memory_only_text, place, provenance
from highwater.pages.text import plain
from highwater.pages.text_table import TextTable


def published_tables(studies: Sequence[Study]) -> tuple[TextTable, ...]:
    """The published layout, ``#GPU | SP | models``, for each rung and place.

    ``*`` is past the native length, ``-`` none, ``≥`` that no longer one failed. A figure that no
    trial told is left out, and a line without any.
    """
    groups: dict[str, list[tuple[Cell, Question, CellAnswer | None]]] = {}
    for study in studies:
        answers = {answer.cell: answer for answer in study.answers}
        for cell in study.question.cells:
            title = f"{cell.settings.label} ({place(study.question)}; {provenance(study.question)})"
            groups.setdefault(title, []).append((cell, study.question, answers.get(cell)))
    return tuple(_published_group(title, entries) for title, entries in groups.items())


def published_text(table: TextTable) -> str:
    """A table of the published layout as it was published."""
    grid = (table.columns, *table.rows)
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines = [
        " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in grid
    ]
    return "\n".join((table.title, *lines))


def published_line(question: Question, cell: Cell, answer: CellAnswer | None) -> str | None:
    """The line that users of the published search parse; None when no trial told the capacity."""
    if answer is None or answer.capacity_tokens is None:
        return None
    memory_only = (
        ""
        if answer.memory_only is None
        else f", memory_only_len = {answer.memory_only.length_tokens}"
    )
    return (
        f"model_name = {plain(question.model.name)}, trainer_gpu_num = {cell.layout.gpus}, "
        f"sp_num = {cell.layout.ulysses_degree}, "
        f"max_model_len = {answer.capacity_tokens}{memory_only}"
    )


def published_notes(question: Question, cell: Cell, answer: CellAnswer | None) -> tuple[str, ...]:
    """What a cell's line does not say, a number alone: that a longer length may fit, or of 0 that
    shorter ones were not tried, or why there is no line.
    """
    label = f"{plain(question.model.name)}, {cell.label_on(question.device)}"
    if answer is None or answer.capacity_tokens is None:
        why = "it has no answer" if answer is None else plain(answer.reason)
        return (f"{label}: no line, as no trial told its capacity: {why}",)
    if answer.reach_tokens == 0:
        return (
            f"{label}: 0: the start length itself, {question.grid.start_tokens:,} tokens, did not "
            f"fit, and nothing shorter was tried: ask again with a shorter start length",
        )
    least = "≥" if answer.is_at_least else ""
    return (f"{label}: {least}{answer.reach_tokens}: {plain(answer.reason)}",) if least else ()


def _published_figure(question: Question, answer: CellAnswer) -> str:
    """``131072*``, ``≥131072*``; with a memory-only proof ``131072* (643072* memory-only)``."""
    memory_only = memory_only_text(question, answer, none="", commas=False)
    least = "≥" if answer.is_at_least else ""
    capacity = capacity_text(question, answer, none="-", commas=False)
    return f"{capacity} ({least}{memory_only})" if memory_only else f"{least}{capacity}"


def _published_group(
    title: str, entries: Sequence[tuple[Cell, Question, CellAnswer | None]]
) -> TextTable:
    models = list(dict.fromkeys(plain(question.model.name) for _, question, _ in entries))
    figures = {
        (cell.layout, plain(question.model.name)): _published_figure(question, answer)
        for cell, question, answer in entries
        if answer is not None and answer.capacity_tokens is not None
    }
    layouts = sorted({layout for layout, _ in figures}, key=msgspec.structs.astuple)
    return TextTable(
        title=title,
        columns=("#GPU", "SP", *models),
        rows=tuple(
            (
                *(str(layout.gpus), layout.sharing),
                *(figures.get((layout, model), "") for model in models),
            )
            for layout in layouts
        ),
        left_columns=2 + len(models),
    )

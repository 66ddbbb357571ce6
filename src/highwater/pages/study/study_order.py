"""What ordered the trials of a search, in words.

Also what a report calls a prediction and a file.
"""

import os
from pathlib import Path

from highwater.pages.study.study_report import StudyReport


def ordered_by(report: StudyReport) -> str:
    """What ordered the trials, in words: as ``search.cell_search`` goes about it."""
    question, beginning = report.study.question, report.beginning
    named = "" if beginning is None else " and ".join(map(_prediction, beginning.predictions))
    if question.method == "linear":
        unheard = f"; {named} ordered nothing" if named else ""
        return f"its method: one length after the other{unheard}"
    first = (
        ", after a full trial of the shortest length, by whose time others are judged"
        if question.proof == "memory"
        else ""
    )
    if beginning is None:
        return _unpredicted(report) + first
    if beginning.reason is not None:
        return f"{named}{first}; {beginning.reason}"
    is_silent = any(cell.bracket and cell.begun_at_tokens is None for cell in report.cells)
    return (
        f"{named}{first}{f'; where that says nothing, {_unpredicted(report)}' if is_silent else ''}"
    )


def _unpredicted(report: StudyReport) -> str:
    """What orders the trials of a bisection without a prediction: ``search.start_length`` does."""
    question = report.study.question
    if question.cells[0].settings.token_budget_tokens is not None:
        return "its token budget, from the longest length that it holds"
    if report.predictions.reason is None:
        return "the formula"
    if question.memory_budget_bytes is None and question.device_total_bytes is None:
        return "its method, from the shortest length: nobody recorded how much memory there is"
    return "a guess of what a token takes up, which each answered cell corrects; no prediction"


def _prediction(named: str) -> str:
    if named == "trace":
        return "a trace made along the way"
    return f"the prediction {file_and_folder(named) if Path(named).is_absolute() else named}"


def short_name(named: str) -> str:
    """A prediction's name in a table: a file's name without its folder."""
    return {"formula": "the formula then", "trace": "a trace"}.get(named, Path(named).name)


def file_and_folder(path: str) -> str:
    """A file's name, then its folder, however it was typed.

    The folder is as seen from here, or from your own home directory without its name.
    """
    name, folder = Path(path).name, Path(path).parent.resolve()
    home, root = Path(os.environ.get("HOME", "~")).resolve(), Path("/")
    starts = {
        home: Path("~"),
        Path.cwd(): Path(),
        root: root,
    }  # the later of equal ones: a home of `/` is nobody's
    start = next(above for above in (folder, *folder.parents) if above in starts)
    folder = starts[start] / folder.relative_to(start)
    return name if folder == Path() else f"{name}, in {folder}"

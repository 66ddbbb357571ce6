"""The page about one study, of ``study.j2`` and the lines of ``study.txt.j2``: as HTML that needs
nothing else, as Markdown, as JSON, or its trials as CSV.

```python
import highwater

highwater.write_report("report.html", highwater.study_report("logs/Qwen3-0.6B/study-1a2b3c.jsonl"))
```
"""

import csv
import io
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from highwater.errors import UsageError
from highwater.memory.interval.calibration import least_residuals
from highwater.nouns.codec import to_builtins, to_json
from highwater.nouns.environment import ALLOCATOR_VARIABLES, Environment
from highwater.nouns.trial import Outcome
from highwater.pages.chart import SHAPES, bracket_chart, memory_picture
from highwater.pages.page import drawn_page, template_lines
from highwater.pages.study_answer import answer_table, place, provenance, study_answer
from highwater.pages.study_report import (
    OUTCOMES,
    CellReport,
    FailedTrial,
    Judgement,
    StudyReport,
    TrialReport,
)
from highwater.pages.table import TextTable, field_text, table_of, values_table
from highwater.pages.text import plain, plain_json
from highwater.store.directory import check_new_file, write_new_file
from highwater.units import format_bytes, format_tokens

FORMS = (".html", ".md", ".csv", ".json")
"""Suffixes of a report's file, one for each form."""


def write_report(path: str | Path, report: StudyReport) -> Path:
    """Write a report into a new file, in the form of its suffix: a self-contained page, Markdown,
    the trials as CSV, or everything as JSON. Raises HighwaterError for another suffix, and for a
    file that exists or cannot be written.
    """
    path = Path(path)
    check_report_file(path)
    write_new_file(path, report_text(report, path.suffix).encode(), flag="-o")
    return path


def report_text(report: StudyReport, form: str) -> str:
    """Return a report in one of the ``FORMS``."""
    if form == ".json":
        return plain_json(to_json(report, indent=2)) + "\n"
    return {".html": study_page, ".csv": study_csv}.get(form, study_markdown)(report)


def check_report_file(path: Path) -> None:
    """Raise UsageError for a suffix of no form, or a file that exists."""
    if path.suffix not in FORMS:
        raise UsageError(
            f"{path} ends in none of {', '.join(FORMS)}", hint="for example `-o report.html`"
        )
    check_new_file(path, flag="-o", name=f"report{path.suffix}")


def study_page(report: StudyReport) -> str:
    """Return the report as an HTML page."""
    return _drawn(report, "html")


def study_markdown(report: StudyReport) -> str:
    """Return the report as a Markdown document."""
    return _drawn(report, "md")


def _drawn(report: StudyReport, form: Literal["html", "md"]) -> str:
    return drawn_page(
        "study.j2",
        form=form,
        report=report,
        title=f"{report.study.question.model.name} on {place(report.study.question)}",
        answer=study_answer(report.study),
        state=state(report),
        answers=answers_table(report),
        peaks=memory_table(report),
        outcomes=OUTCOMES,
        failure_line=failure_line,
        closing=bracket_table(report),
        trials=trials_table(report),
        predicted=list(predicted_tables(report)),
        prediction_notes=prediction_notes(report),
        question=question_table(report),
        environments=list(environment_tables(report)),
        shapes=[(shape, OUTCOMES[outcome]) for outcome, shape in SHAPES.items()],
        notes=report.study.notes,
        odd=[
            f"{cell.label}: {text}"
            for cell in report.cells
            for text in (cell.answer.contradictions if cell.answer else ())
        ],
        brackets=[(cell, bracket_chart(cell, report)) for cell in report.cells],
        waiting=[cell.label for cell in report.cells if not cell.bracket],
        memory=memory_picture(report),
        has_intervals=any(each.predicted and each.predicted.interval for each in report.trials),
    )


_RUN = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""First characters that make a spreadsheet read a formula. Source: OWASP, CSV injection."""
_PREDICTED = (
    *("allocated_bytes", "reserved_bytes", "device_used_bytes", "low_bytes", "high_bytes", "fits"),
)
COLUMNS = (
    *("model", "device", "source"),
    *(
        name
        for name in TrialReport.__struct_fields__
        if name not in ("predicted", "beside_prediction")
    ),
    *(f"predicted_{name}" for name in _PREDICTED),
    "beside_prediction",
)
"""Columns; ``source``: whether figures that are not called predicted are measured or simulated."""


def study_csv(report: StudyReport) -> str:
    """Return a CSV with a row for each trial; unknown values are empty."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    question = report.study.question
    for trial in report.trials:
        row = to_builtins(trial)
        predicted = row.pop("predicted") or {}
        predicted |= predicted.pop("interval", None) or {}
        row |= {"model": question.model.name, "device": question.device_name}
        row |= {f"predicted_{name}": predicted.get(name) for name in _PREDICTED}
        row["source"] = report.label
        writer.writerow({name: _harmless(value) for name, value in row.items()})
    return text.getvalue()


def _harmless(value: object) -> object:
    """Make a value safe for spreadsheets: text on one line, with ``'`` before a formula."""
    if not isinstance(value, str):
        return value
    text = plain(value)
    return f"'{text}" if text.lstrip().startswith(_RUN) else text


_lines = partial(template_lines, "study.txt.j2")
_LONGEST_REASON = 240
"""Longest reason in a list, in characters; the failures have it in full."""
_BESIDE: dict[Judgement, str] = {
    "inside": "inside the interval",
    "below": "below the interval",
    "above": "above the interval",
    "ran out, as the upper end allows": "ran out, as the upper end allows",
}


def state(report: StudyReport) -> str:
    """Sentence on the progress of a search, and on whether anything was trained."""
    (line,) = _lines("state", report=report, provenance=provenance(report.study.question))
    return line


def failure_line(failed: FailedTrial) -> str:
    """Line on where a failed trial failed, and on its log."""
    (line,) = _lines("failure", failed=failed)
    return line


def answers_table(report: StudyReport) -> TextTable:
    """Table of the answers, with long reasons cut."""
    table = answer_table(report.study)
    notes = (
        note if len(note) <= _LONGEST_REASON else f"{note[:_LONGEST_REASON]}…"
        for note in table.footnotes
    )
    return replace(table, title=f"answers: {table.title}", footnotes=tuple(notes))


def _number(trial: TrialReport) -> str:
    number = f"{trial.number}, attempt {trial.attempt}" if trial.attempt > 1 else f"{trial.number}"
    return f"{number}, repeat {trial.repeat}" if trial.repeat else number


def trials_table(report: StudyReport) -> TextTable:
    """Table of all trials in the order of their starts."""
    return table_of(
        f"trials in their order, {report.label}",
        report.trials,
        ("trial", _number),
        ("cell", "cell"),
        ("proof", lambda trial: "memory-only" if trial.is_memory_only else "full"),
        ("outcome", "outcome_in_words"),
        ("length", "length_tokens"),
        ("tokens/s", "tokens_per_s"),
        ("MFU", "mfu"),
        ("step", "step_time_s"),
        ("to the first step", "launch_to_first_step_s"),
        ("whole trial", "wall_s"),
        names=4,
    )


def bracket_table(report: StudyReport) -> TextTable:
    """Table of the longest fit and the shortest failure of each cell after each trial."""
    return table_of(
        f"the bracket of each cell after each of its trials, {report.label}",
        [(step, report.trials[step.trial - 1]) for cell in report.cells for step in cell.bracket],
        ("cell", lambda each: each[1].cell),
        ("trial", lambda each: str(each[0].trial)),
        ("outcome", lambda each: each[1].outcome_in_words),
        ("length", lambda each: format_tokens(each[1].length_tokens)),
        ("longest that fit", lambda each: format_tokens(each[0].fits_tokens)),
        ("shortest that did not", lambda each: format_tokens(each[0].does_not_fit_tokens)),
    )


def memory_table(report: StudyReport) -> TextTable:
    """Table of the peaks of each trial's fullest rank; those of a failed trial up to its end."""
    is_gpu = report.study.question.device != "cpu"
    sampled = "" if report.study.question.foreign is None else ", sampled from outside"
    return table_of(
        f"memory at the peak of each trial, {report.label}{sampled}",
        report.trials,
        ("trial", "number"),
        ("cell", "cell"),
        ("outcome", "outcome_in_words"),
        ("length", "length_tokens"),
        ("allocated", "peak_allocated_bytes") if is_gpu else None,
        ("reserved" if is_gpu else "data segment", "peak_reserved_bytes"),
        ("device used", "device_used_bytes") if is_gpu else None,
        ("limit", "limit_bytes"),
        ("headroom", "headroom_bytes"),
        ("allocator retries", "allocator_retries") if is_gpu else None,
        footnotes=_lines("memory_notes", report=report, is_gpu=is_gpu),
    )


def predicted_tables(report: StudyReport) -> Iterator[TextTable]:
    """Yield the tables of predictions; none if nothing was predicted."""
    is_predicted = report.predictions.reason is None
    if is_predicted:
        yield predicted_trials(report)
    if is_predicted or _is_foretold(report):
        yield predicted_cells(report)


def predicted_trials(report: StudyReport) -> TextTable:
    """Table of each trial's memory beside the interval of the formula."""
    label = report.label
    return table_of(
        f"device used of the fullest GPU: predicted by formula, and {label}",
        report.trials,
        ("trial", "number"),
        ("cell", "cell"),
        ("outcome", "outcome_in_words"),
        ("length", "length_tokens"),
        ("predicted: interval", _interval),
        ("predicted: between its ends", "predicted.device_used_bytes"),
        (f"{label}: device used", _used),
        (f"{label} beside predicted", lambda trial: _BESIDE.get(trial.beside_prediction, "-")),
    )


def _interval(trial: TrialReport) -> str:
    around = trial.predicted and trial.predicted.interval
    if around is None:
        return "-"
    return f"{format_bytes(around.low_bytes)} to {format_bytes(around.high_bytes)}"


def _used(trial: TrialReport) -> str:
    if trial.outcome is Outcome.OUT_OF_MEMORY:
        return f"more than {format_bytes(trial.limit_bytes)}"
    is_fit = trial.outcome is not None and trial.outcome.is_fit
    return format_bytes(trial.device_used_bytes) if is_fit else "-"


def _is_foretold(report: StudyReport) -> bool:
    return any(cell.expected_tokens is not None for cell in report.cells)


def predicted_cells(report: StudyReport) -> TextTable:
    """Table of each cell's longest length beside what was predicted then and is today."""
    today, label = "predicted by today's formula", report.label
    return table_of(
        f"longest length of each cell: predicted, and {label}",
        report.cells,
        ("cell", "label"),
        (f"{today}: upper end fits", lambda cell: _tokens(cell, "predicted.capacity_tokens")),
        (f"{today}: likely", lambda cell: _tokens(cell, "predicted.likely_tokens")),
        ("predicted before its trials: likely", _expected) if _is_foretold(report) else None,
        (f"{label}: longest that fit", lambda cell: _tokens(cell, "longest_fit_tokens")),
        (f"{label}: next, did not", "next_tokens"),
        names=1,
    )


def _expected(cell: CellReport) -> str:
    """Length that was expected before the trials, with the source of the expectation."""
    if cell.expected_tokens is None or cell.expected_by is None:
        return "-"
    by = {"formula": "the formula then", "trace": "a trace"}.get(
        cell.expected_by, Path(cell.expected_by).name
    )
    return f"{_tokens(cell, 'expected_tokens')} by {by}"


def _tokens(cell: CellReport, path: str) -> str:
    text = field_text(cell, path)
    return "none" if text == "0" else text


def file_and_folder(path: str) -> str:
    """A file's name and folder, relative to the working folder or to the home as ``~``."""
    name, folder = Path(path).name, Path(path).parent.resolve()
    home, root = Path(os.environ.get("HOME", "~")).resolve(), Path("/")
    # if folders are equal the later entry counts: a home of `/` is none
    starts = {home: Path("~"), Path.cwd(): Path(), root: root}
    start = next(above for above in (folder, *folder.parents) if above in starts)
    folder = starts[start] / folder.relative_to(start)
    return name if folder == Path() else f"{name}, in {folder}"


def prediction_notes(report: StudyReport) -> tuple[str, ...]:
    """Notes on when predictions were made, and on what intervals promise and trials show."""
    known = report.predictions.calibration
    least = None if known is None else least_residuals(known.coverage)
    return _lines("prediction_notes", report=report, least=least)


def question_table(report: StudyReport) -> TextTable:
    """Table of the question, and of the settings that ordered its trials."""
    study = report.study
    longest_s = study.longest_timeout_s or 0
    shorter = Counter(limit_s for limit_s in study.answers_within_s if limit_s < longest_s)
    rows = _lines(
        "question",
        report=report,
        place=place(study.question),
        shorter=sorted(shorter.items(), reverse=True),
        unheard=any(cell.bracket and cell.begun_at_tokens is None for cell in report.cells),
        file_and_folder=file_and_folder,
    )
    return values_table("the question", rows)


def environment_tables(report: StudyReport) -> Iterator[TextTable]:
    """Yield tables of the environments that trials and searches recorded."""
    each = (f"{trial.rung}: {trial.allocator}" for trial in report.trials if trial.allocator)
    told = values_table(
        "what the trials said that they ran with",
        _lines("told_by_trials", report=report, allocators=list(dict.fromkeys(each))),
    )
    if told.rows:
        yield told
    environments = report.study.environments
    for number, found in enumerate(environments, 1):
        which = f", {number} of {len(environments)}" if len(environments) > 1 else ""
        yield values_table(f"where the search was started{which}", _environment(found))


def _environment(found: Environment) -> tuple[str, ...]:
    sizes = zip(found.gpu_names, found.gpu_memory_bytes, strict=True)
    counted = Counter(f"{name}, {format_bytes(size)}" for name, size in sizes)
    gpus = "; ".join(f"{count} x {each}" for each, count in counted.items())
    return _lines("environment", found=found, gpus=gpus, allocator_variables=ALLOCATOR_VARIABLES)

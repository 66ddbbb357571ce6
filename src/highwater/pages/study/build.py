"""A page about one study, from its file, its logs and what was predicted of it: as HTML that needs
nothing else, as Markdown, as JSON, or its trials as CSV.

```python
import highwater

highwater.write_report("report.html", highwater.study_report("logs/Qwen3-0.6B/study-1a2b3c.jsonl"))
```
"""

import csv
import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from highwater.errors import HighwaterError, UsageError
from highwater.nouns.codec import to_builtins, to_json
from highwater.nouns.study import Study
from highwater.nouns.trial import LogEnd, TrialResult
from highwater.pages.page import page_template
from highwater.pages.study import study_parts, study_predictions
from highwater.pages.study.study_answer import study_answer
from highwater.pages.study.study_commands import flag_value
from highwater.pages.study.study_parts import HEADINGS
from highwater.pages.study.study_pictures import SHAPES, bracket_picture, memory_picture
from highwater.pages.study.study_report import Beginning, StudyReport, TrialReport, assembled
from highwater.pages.text import (
    TextTable,
    escaped,
    fenced,
    markdown_list,
    markdown_table,
    plain,
    plain_json,
)
from highwater.search.predicted_study import predictions_of
from highwater.search.start_length import read_prediction
from highwater.store.directory import check_new_file, write_new_file
from highwater.store.journal import read_study
from highwater.store.logs import log_end

FORMS = (".html", ".md", ".csv", ".json")
"""Forms of a report, by the end of its file's name."""


def study_report(study: str | Path | Study) -> StudyReport:
    """Everything that is known of a study, finished or not.

    ``study`` is a file that ``find`` wrote, or what ``open_study`` returned. Each trial is
    predicted again by formula, in milliseconds. Logs are looked for where they were written and
    beside the study; of those that are there the last lines are taken. Nothing is run. Raises
    StudyError for a file that is no study, or is damaged.
    """
    read = study if isinstance(study, Study) else read_study(Path(study))

    def log_of(result: TrialResult) -> LogEnd:
        first = result.first_failed
        said = (
            "" if first is None or first.failure is None else first.failure.text.partition("\n")[0]
        )
        return log_end(result.log_path, read.path, said=said)

    return assembled(
        read, predictions=predictions_of(read), beginning=_beginning(read), log_of=log_of
    )


def write_report(path: str | Path, report: StudyReport) -> Path:
    """Write a report into a new file, in the form that its name ends with.

    It is a page that needs nothing else, Markdown, the trials, or everything. Raises HighwaterError
    for a file that is there already or cannot be written, and for other names.
    """
    path = Path(path)
    check_report_file(path)
    write_new_file(path, report_text(report, path.suffix).encode(), flag="-o")
    return path


def report_text(report: StudyReport, form: str) -> str:
    """A report in one of the ``FORMS``."""
    if form == ".json":
        return plain_json(to_json(report, indent=2)) + "\n"
    return {".html": study_page, ".csv": study_csv}.get(form, study_markdown)(report)


def check_report_file(path: Path) -> None:
    """Raise UsageError for a name of no form, and for a file that is there. Nothing that a user has
    is overwritten.
    """
    if path.suffix not in FORMS:
        raise UsageError(
            f"{path} ends in none of {', '.join(FORMS)}", hint="for example `-o report.html`"
        )
    check_new_file(path, flag="-o", name=f"report{path.suffix}")


def _beginning(study: Study) -> Beginning | None:
    """The prediction that the search was given; None: the formula. It is what was recorded of each
    cell; of schema 1 the prediction that the command names, as it is now.
    """
    recorded = [each for each in study.expectations if each.prediction != "formula"]
    device = study.question.device
    if recorded:
        return Beginning(
            predictions=tuple(dict.fromkeys(each.prediction for each in recorded)),
            likely_tokens={each.cell.label_on(device): each.likely_tokens for each in recorded},
        )
    named = flag_value("--prediction", study.command)
    if named in (None, "formula") or study.schema_version > 1:
        return None
    unread = partial(Beginning, predictions=(named,), likely_tokens={})
    if named == "trace":
        return unread(reason="its lengths were not recorded")
    beside = Path(study.path or named).parent / Path(named).name
    path = next((place for place in (Path(named), beside) if place.is_file()), None)
    if path is None:
        return unread(reason="it is not found from here, nor beside the study")
    try:
        found = read_prediction(path, study.question)
    except HighwaterError as error:
        return unread(reason=error.problem.replace(str(path), path.name))
    likely_tokens = {each.cell.label_on(device): each.likely_edge_tokens for each in found.cells}
    return Beginning(predictions=(named,), likely_tokens=likely_tokens)


def study_page(report: StudyReport) -> str:
    """Write the whole page. Everything in it is escaped but what is marked in our own text."""
    return page_template("study.html.j2").render(
        report=report,
        answer=study_answer(report.study),
        parts=study_parts,
        question=study_predictions,
        predictions=study_predictions,
        headings=study_parts.HEADINGS,
        shapes=[(shape, study_parts.OUTCOMES[outcome]) for outcome, shape in SHAPES.items()],
        notes=study_parts.notes(report),
        environment=list(study_predictions.environment_tables(report)),
        brackets=[(cell, bracket_picture(cell, report)) for cell in report.cells],
        memory=memory_picture(report),
        predicted=list(study_predictions.predicted_tables(report)),
        has_intervals=any(
            trial.predicted is not None and trial.predicted.interval is not None
            for trial in report.trials
        ),
    )


def study_markdown(report: StudyReport) -> str:
    """Write the whole document."""
    notes = study_parts.notes(report)
    sections = {
        "answers": (*_drawn(study_parts.answers_table(report)), markdown_list(study_parts.WORDS)),
        "memory": _drawn(study_parts.memory_table(report)),
        "failures": _failures(report),
        "brackets": _brackets(report),
        "trials": _drawn(study_parts.trials_table(report)),
        "predicted": (
            *(
                part
                for table in study_predictions.predicted_tables(report)
                for part in _drawn(table)
            ),
            markdown_list(map(escaped, study_predictions.prediction_notes(report))),
        ),
        "commands": _commands(report),
        "question": (markdown_table(study_predictions.question_table(report)),),
        "environment": (
            *(
                part
                for table in study_predictions.environment_tables(report)
                for part in _drawn(table)
            ),
            study_predictions.no_environment(report) or "",
        ),
        **({"notes": (markdown_list(map(escaped, notes)),)} if notes else {}),
    }
    parts = [f"# {escaped(study_parts.title(report))}", study_parts.state(report)]
    for name, own in sections.items():
        parts += [f"## {HEADINGS[name]}", *own]
    parts.append(study_parts.made_by(report))
    return "\n\n".join(filter(None, parts)) + "\n"


def _drawn(table: TextTable) -> Iterator[str]:
    yield f"**{escaped(table.title)}**"
    yield markdown_table(table)
    yield markdown_list(map(escaped, table.footnotes))


def _brackets(report: StudyReport) -> Iterator[str]:
    if report.trials:
        yield from _drawn(study_parts.bracket_table(report))
    waiting = [escaped(cell.label) for cell in report.cells if not cell.bracket]
    yield f"Not searched yet: {'; '.join(waiting)}." if waiting else ""
    found = study_parts.not_monotone(report)
    yield "Not monotone:" if found else ""
    yield markdown_list(map(escaped, found))


def _failures(report: StudyReport) -> Iterator[str]:
    if not report.failures:
        yield study_parts.NO_FAILURES
    for failed in report.failures:
        yield f"### {escaped(study_parts.failure_heading(failed))}"
        yield escaped(study_parts.failure_lines(failed))
        yield fenced(failed.text)
        if failed.log.lines:
            yield "The last lines of its log:"
            yield fenced("\n".join(map(plain, failed.log.lines)))


def _commands(report: StudyReport) -> Iterator[str]:
    for command in report.commands:
        yield f"{escaped(command.what)}:"
        yield fenced(plain(command.text))


_RUN = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""First characters by which spreadsheets tell formulas. Source: OWASP, CSV injection."""
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
"""Columns; ``source`` says whether those not called predicted were measured or simulated."""


def study_csv(report: StudyReport) -> str:
    """Write a row for each trial; what is unknown is empty."""
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
    """A harmless value: text on one line, and quoted where it begins like a formula."""
    if not isinstance(value, str):
        return value
    text = plain(value)
    return f"'{text}" if text.lstrip().startswith(_RUN) else text

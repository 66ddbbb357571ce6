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
from pathlib import Path

from highwater.errors import HighwaterError, UsageError
from highwater.nouns.codec import to_builtins, to_json
from highwater.nouns.study import Study
from highwater.nouns.trial import LogEnd, TrialResult
from highwater.pages.page import page_template
from highwater.pages.study import (
    study_parts,
    study_predictions,
)
from highwater.pages.study import (
    study_predictions as study_question,
)
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
    # here, so that no other command, and no other form, waits for the templates
    if form == ".html":
        return study_page(report)
    if form == ".csv":
        return study_csv(report)
    if form == ".json":
        return plain_json(to_json(report, indent=2)) + "\n"

    return study_markdown(report)


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
    if recorded:
        device = study.question.device
        likely_tokens = {each.cell.label_on(device): each.likely_tokens for each in recorded}
        return Beginning(
            predictions=tuple(dict.fromkeys(each.prediction for each in recorded)),
            likely_tokens=likely_tokens,
        )
    named = flag_value("--prediction", study.command)
    if named in (None, "formula") or study.schema_version > 1:
        return None
    if named == "trace":
        return Beginning(
            predictions=(named,), likely_tokens={}, reason="its lengths were not recorded"
        )
    beside = Path(study.path or named).parent / Path(named).name
    path = next((place for place in (Path(named), beside) if place.is_file()), None)
    if path is None:
        return Beginning(
            predictions=(named,),
            likely_tokens={},
            reason="it is not found from here, nor beside the study",
        )
    try:
        found = read_prediction(path, study.question)
    except HighwaterError as error:
        return Beginning(
            predictions=(named,),
            likely_tokens={},
            reason=error.problem.replace(str(path), path.name),
        )
    device = study.question.device
    likely_tokens = {
        predicted.cell.label_on(device): predicted.likely_edge_tokens for predicted in found.cells
    }
    return Beginning(predictions=(named,), likely_tokens=likely_tokens)


def study_page(report: StudyReport) -> str:
    """Write the whole page. Everything in it is escaped but what is marked in our own text."""
    return page_template("study.html.j2").render(
        report=report,
        answer=study_answer(report.study),
        parts=study_parts,
        question=study_question,
        predictions=study_predictions,
        headings=study_parts.HEADINGS,
        shapes=[(shape, study_parts.OUTCOMES[outcome]) for outcome, shape in SHAPES.items()],
        notes=study_parts.notes(report),
        environment=list(study_question.environment_tables(report)),
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
    parts = [f"# {escaped(study_parts.title(report))}", study_parts.state(report)]
    parts += [f"## {HEADINGS['answers']}", *_drawn(study_parts.answers_table(report))]
    parts.append(markdown_list(study_parts.WORDS))
    parts += [f"## {HEADINGS['memory']}", *_drawn(study_parts.memory_table(report))]
    parts += [f"## {HEADINGS['failures']}", *_failures(report)]
    parts += [f"## {HEADINGS['brackets']}", *_brackets(report)]
    parts += [f"## {HEADINGS['trials']}", *_drawn(study_parts.trials_table(report))]
    parts += [f"## {HEADINGS['predicted']}", *_predicted(report)]
    parts += [f"## {HEADINGS['commands']}", *_commands(report)]
    question = markdown_table(study_question.question_table(report))
    parts += [f"## {HEADINGS['question']}", question]
    parts += [f"## {HEADINGS['environment']}", *_environment(report)]
    notes = study_parts.notes(report)
    parts += [f"## {HEADINGS['notes']}", markdown_list(map(escaped, notes))] if notes else []
    parts.append(study_parts.made_by(report))
    return "\n\n".join(filter(None, parts)) + "\n"


def _drawn(table: TextTable) -> Iterator[str]:
    yield f"**{escaped(table.title)}**"
    yield markdown_table(table)
    yield markdown_list(map(escaped, table.footnotes))


def _environment(report: StudyReport) -> Iterator[str]:
    for table in study_question.environment_tables(report):
        yield from _drawn(table)
    yield study_question.no_environment(report) or ""


def _brackets(report: StudyReport) -> Iterator[str]:
    if report.trials:
        yield from _drawn(study_parts.bracket_table(report))
    waiting = [escaped(cell.label) for cell in report.cells if not cell.bracket]
    yield f"Not searched yet: {'; '.join(waiting)}." if waiting else ""
    found = study_parts.not_monotone(report)
    yield "Not monotone:" if found else ""
    yield markdown_list(map(escaped, found))


def _predicted(report: StudyReport) -> Iterator[str]:
    for table in study_predictions.predicted_tables(report):
        yield from _drawn(table)
    yield markdown_list(map(escaped, study_predictions.prediction_notes(report)))


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
_NESTED = ("predicted", "beside_prediction")
COLUMNS = (
    "model",
    "device",
    "source",
    *(name for name in TrialReport.__struct_fields__ if name not in _NESTED),
    "predicted_allocated_bytes",
    "predicted_reserved_bytes",
    "predicted_device_used_bytes",
    "predicted_low_bytes",
    "predicted_high_bytes",
    "predicted_fits",
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
        row: dict[str, object] = {
            "model": question.model.name,
            "device": question.device_name,
            "source": report.label,
        }
        writer.writerow({name: _harmless(value) for name, value in (row | _columns(trial)).items()})
    return text.getvalue()


def _columns(trial: TrialReport) -> dict[str, object]:
    row = to_builtins(trial)
    predicted = row.pop("predicted") or {}
    around = predicted.pop("interval", None) or {}
    return row | {
        "predicted_allocated_bytes": predicted.get("allocated_bytes"),
        "predicted_reserved_bytes": predicted.get("reserved_bytes"),
        "predicted_device_used_bytes": predicted.get("device_used_bytes"),
        "predicted_low_bytes": around.get("low_bytes"),
        "predicted_high_bytes": around.get("high_bytes"),
        "predicted_fits": predicted.get("fits"),
    }


def _harmless(value: object) -> object:
    """A harmless value: text on one line, and quoted where it begins like a formula."""
    if not isinstance(value, str):
        return value
    text = plain(value)
    return f"'{text}" if text.lstrip().startswith(_RUN) else text

"""A page about one study, from its file, its logs and what was predicted of it: as HTML that needs
nothing else, as Markdown, as JSON, or its trials as CSV.

```python
import highwater

highwater.write_report("report.html", highwater.study_report("logs/Qwen3-0.6B/study-1a2b3c.jsonl"))
```
"""

import csv
import io
from functools import partial
from pathlib import Path
from typing import Literal

from highwater.errors import HighwaterError, UsageError
from highwater.nouns.codec import to_builtins, to_json
from highwater.nouns.study import Study
from highwater.nouns.trial import LogEnd, TrialResult
from highwater.pages import study_tables
from highwater.pages.chart import SHAPES, bracket_chart, memory_picture
from highwater.pages.page import drawn_page
from highwater.pages.study_answer import study_answer
from highwater.pages.study_commands import flag_value
from highwater.pages.study_report import Beginning, StudyReport, TrialReport, assembled
from highwater.pages.text import plain, plain_json
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
    """Write the whole page."""
    return _drawn(report, "html")


def study_markdown(report: StudyReport) -> str:
    """Write the whole document."""
    return _drawn(report, "md")


def _drawn(report: StudyReport, form: Literal["html", "md"]) -> str:
    return drawn_page(
        "study.j2",
        form=form,
        report=report,
        answer=study_answer(report.study),
        parts=study_tables,
        shapes=[(shape, study_tables.OUTCOMES[outcome]) for outcome, shape in SHAPES.items()],
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

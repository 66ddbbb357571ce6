"""A page about one study, from its file, its logs and what was predicted of it.

It is written to a file.

```python
import highwater

highwater.write_report("report.html", highwater.study_report("logs/Qwen3-0.6B/study-1a2b3c.jsonl"))
```
"""

from pathlib import Path

from highwater import api
from highwater.errors import HighwaterError, UsageError
from highwater.nouns.codec import to_json
from highwater.nouns.study import Study
from highwater.nouns.trial import LogEnd, TrialResult
from highwater.pages.study.study_commands import flag_value
from highwater.pages.study.study_report import Beginning, StudyReport, assembled
from highwater.pages.text import plain_json
from highwater.search.predicted_start import read_prediction
from highwater.search.predicted_study import predictions_of
from highwater.store.directory import check_new_file, write_new_file
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
    read = study if isinstance(study, Study) else api.open_study(study)

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
        from highwater.pages.study.study_page import study_page

        return study_page(report)
    if form == ".csv":
        from highwater.pages.study.study_csv import study_csv

        return study_csv(report)
    if form == ".json":
        return plain_json(to_json(report, indent=2)) + "\n"
    from highwater.pages.study.study_markdown import study_markdown

    return study_markdown(report)


def check_report_file(path: Path) -> None:
    """Raise UsageError for a name of no form, and for a file that is there.

    Nothing that a user has is overwritten.
    """
    if path.suffix not in FORMS:
        raise UsageError(
            f"{path} ends in none of {', '.join(FORMS)}", hint="for example `-o report.html`"
        )
    check_new_file(path, flag="-o", name=f"report{path.suffix}")


def _beginning(study: Study) -> Beginning | None:
    """The prediction that the search was given; None: the formula.

    It is what was recorded of each cell; of schema 1 the prediction that the command names, as it
    is now.
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

"""The report of a study as a Markdown document."""

from collections.abc import Iterator

from highwater.pages.markdown import escaped, fenced, markdown_list, markdown_table
from highwater.pages.study import study_parts, study_predictions, study_question
from highwater.pages.study.study_parts import HEADINGS
from highwater.pages.study.study_report import StudyReport
from highwater.pages.text import plain
from highwater.pages.text_table import TextTable


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

"""``highwater report``: a page about one study."""

import argparse
import shlex
from pathlib import Path

from highwater import api
from highwater.cli import console
from highwater.cli.commands import newest_study
from highwater.errors import EXIT_ANSWERED
from highwater.pages.study import build as reporting
from highwater.pages.study.study_answer import study_answer
from highwater.pages.study.study_commands import resumed
from highwater.pages.study.study_report import StudyReport
from highwater.pages.study.tables import answer_table
from highwater.store.directory import free_name


def report(arguments: argparse.Namespace) -> int:
    """Print the report, or write it and print the answers."""
    output = None if arguments.output is None else Path(arguments.output)
    if output is not None:
        reporting.check_report_file(output)
    study = (
        api.open_study(arguments.study)
        if arguments.study
        else newest_study(Path(arguments.log_dir))
    )
    console.notes(study.notes)
    made = reporting.study_report(study)
    if output is not None:
        console.talk(f"the report: {reporting.write_report(output, made)}")
    if arguments.json:
        console.answer_json(made)
        return EXIT_ANSWERED
    if output is None:
        console.answer(reporting.report_text(made, ".md").rstrip("\n"))
    else:
        console.answer(f"{study_answer(study)}\n")
        console.answer_table(answer_table(study))
    console.next_command(_after(made, output))
    return EXIT_ANSWERED


def _after(made: StudyReport, output: Path | None) -> str:
    """Go on with a search that is not finished; else the report as a page, or the study in another
    form.
    """
    study = made.study
    if not study.complete and study.command:
        return f"{shlex.join(resumed(study))}  (answers the rest)"
    path = shlex.quote(study.path or "")
    if output is None:
        return f"highwater report {path} -o {free_name('report.html')}"
    return f"highwater show {path} --as published"

"""The report of a study as one HTML page that needs nothing else: no network and no script."""

from highwater.pages.page import page_template
from highwater.pages.study import study_parts, study_predictions, study_question
from highwater.pages.study.study_answer import study_answer
from highwater.pages.study.study_pictures import SHAPES, bracket_picture, memory_picture
from highwater.pages.study.study_report import StudyReport


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

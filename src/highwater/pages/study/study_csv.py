"""The trials of a study as CSV, one row each.

Text that a spreadsheet would run as a formula is made text.
"""

import csv
import io

from highwater.nouns.codec import to_builtins
from highwater.pages.study.study_report import StudyReport, TrialReport
from highwater.pages.text import plain

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
    """A harmless value: text on one line, and quoted where it begins like a formula.

    Numbers stay numbers.
    """
    if not isinstance(value, str):
        return value
    text = plain(value)
    return f"'{text}" if text.lstrip().startswith(_RUN) else text

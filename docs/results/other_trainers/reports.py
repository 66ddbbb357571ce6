"""Public reports of what trainers took, or did not fit in, beside what is predicted of them.

    python docs/results/other_trainers/reports.py

prints the table of ``reports.csv``, whose ``asked`` are the words after ``highwater predict``.
"""

import csv
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import highwater
from highwater.cli.flags import named_model, typed_place
from highwater.cli.grammar import parse
from highwater.memory.capacity import Prediction
from highwater.units import GIB, format_tokens

REPORTS = Path(__file__).with_name("reports.csv")


class Compared(NamedTuple):
    """A report, and what is predicted of it."""

    reported: dict[str, str]
    fits: bool | None = None
    """True if it is predicted to; None: nothing was predicted."""
    reserved_bytes: int | None = None
    """Bytes that the allocator is predicted to hold; the least, of what fits with no settings."""
    missing: str = ""
    """What the report does not say, or the prediction does not know."""

    @property
    def off(self) -> float | None:
        """The error of the figure, as a share; None where there are no two."""
        if self.reserved_bytes is None or not self.reported["peak_gib"] or not self.fits:
            return None
        return self.reserved_bytes / GIB / float(self.reported["peak_gib"]) - 1


def compared() -> list[Compared]:
    """Every report, in the order of the file."""
    with REPORTS.open(encoding="utf-8") as file:
        return [_compared(row) for row in csv.DictReader(file)]


def _compared(row: dict[str, str]) -> Compared:
    if not row["asked"]:
        return Compared(row, missing=row["missing"])
    found = predicted(row["asked"])
    fits = found.answer is not None
    least = min(each.footprint.reserved_bytes for each in found.cells)
    reserved_bytes = found.explained.footprint.reserved_bytes if fits else least
    all_kernels = predicted(row["asked"].replace("--liger loss", "")).explained.footprint
    missing = row["missing"].format(f"{all_kernels.reserved_bytes / GIB:.1f}")
    return Compared(row, fits, reserved_bytes, missing)


def predicted(asked: str) -> Prediction:
    """The prediction that these words ask for."""
    arguments = parse(("predict", *shlex.split(asked)))
    model, settings = named_model(arguments, [], example="")
    place: dict[str, Any] = typed_place(arguments)
    return highwater.predict(model, length=arguments.length, **place, **settings)


def table() -> str:
    """The table in Markdown."""
    head = ("report", "what", "reported", "predicted", "off", "missing")
    lines = [head, ("---",) * len(head), *map(_line, compared())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _line(each: Compared) -> tuple[str, ...]:
    row = each.reported
    length = f", {format_tokens(int(row['length_tokens']))} tokens" if row["length_tokens"] else ""
    gpus = f"{row['gpus'] or '?'} x {row['gpu'] or '?'}"
    size = f", {row['peak_gib']} GiB" if row["peak_gib"] else ""
    outcome = {"FIT": "fits", "OUT_OF_MEMORY": "out of memory"}.get(row["outcome"], "out of host")
    said = "-"
    if each.fits is not None and each.reserved_bytes is not None:
        figure = f", {each.reserved_bytes / GIB:.1f} GiB" if "HOST" not in row["outcome"] else ""
        said = f"{'fits' if each.fits else 'does not fit'}{figure}"
    return (
        row["source"],
        f"{row['model']}, {row['training']}{length}, {gpus}",
        f"{outcome}{size}",
        said,
        "" if each.off is None else f"{each.off:+.1%}",
        each.missing,
    )


if __name__ == "__main__":
    print(table())

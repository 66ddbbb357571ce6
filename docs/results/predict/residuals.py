"""Residuals that come with the package, from the development trials of ``traced.json``; never from
one that is held out.

``python docs/results/predict/residuals.py`` (no GPU, no trace) writes
``src/highwater/memory/interval/residuals.json``: traced and by formula, of every trial of an H200
that was there while tracer and formula were being made.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import highwater
from highwater.memory.formula.constants import Footprint
from highwater.memory.formula.formula import likely_footprint
from highwater.memory.formula.layers import Step
from highwater.memory.interval.residuals import Residual, residual
from highwater.nouns.codec import to_json
from highwater.nouns.trial import TrialResult, TrialSpec

ROWS = Path(__file__).with_name("traced.json")
STUDIES = Path(__file__).parents[1] / "find"
TARGET = Path(__file__).parents[3] / "src" / "highwater" / "memory" / "interval" / "residuals.json"


def main() -> None:
    """Write them."""
    TARGET.write_text(text(), encoding="utf-8")


def text() -> str:
    """One residual on a line."""
    return "[\n" + ",\n".join(to_json(each) for each in residuals()) + "\n]\n"


def residuals() -> list[Residual]:
    """Traced ones first."""
    development = list(told())
    traced = [
        residual(
            spec, result, "trace", row["traced"]["peak_reserved_bytes"] + formula.outside_bytes
        )
        for row, spec, result, formula in development
        if row["traced"]["fits"]
    ]
    by_formula = [
        residual(spec, result, "formula", formula.needed_bytes, cached_bytes=formula.cached_bytes)
        for _, spec, result, formula in development
    ]
    return [each for each in (*traced, *by_formula) if each is not None]


def told() -> Iterator[tuple[dict[str, Any], TrialSpec, TrialResult, Footprint]]:
    """The rows that are not held out, with their trials and what the formula says."""
    rows: dict[str, dict[str, Any]] = json.loads(ROWS.read_text())
    for name in sorted({row["study"] for row in rows.values() if not row["held_out"]}):
        study = highwater.open_study(STUDIES / f"{name}.jsonl")
        shape = study.question.model.shape
        for trial in study.trials:
            row, spec = rows.get(f"{name}/{trial.spec.key}"), trial.spec
            if (
                row is not None
                and not row["held_out"]
                and trial.result is not None
                and not trial.repeat
            ):
                yield (
                    row,
                    spec,
                    trial.result,
                    likely_footprint(
                        Step(shape, spec.settings, spec.layout, length_tokens=spec.length_tokens)
                    ),
                )


if __name__ == "__main__":
    main()

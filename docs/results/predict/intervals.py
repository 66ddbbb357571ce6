"""Intervals beside the trials that are held out: how many lie within, and how many of those that
were said to fit did.

``python docs/results/predict/intervals.py`` (no GPU, no trace). Held out are the trials that
``traced.json`` calls so; what comes with the package was not learned from them. By formula, by
formula with each search judged by an interval that learned from the other held-out ones too, as
``--calibrate`` does, and by the traces as ``traced.json`` first had them.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import highwater
from highwater.memory.formula.formula import likely_footprint
from highwater.memory.formula.layers import Step
from highwater.memory.interval.calibration import Factors, factors_of, interval
from highwater.memory.interval.residuals import (
    PredictionMethod,
    Residual,
    bundled_residuals,
    residual,
    study_residuals,
)
from highwater.nouns.settings import Allocator
from highwater.nouns.study import Study
from highwater.nouns.trial import Outcome, TrialResult, TrialSpec

ROWS = Path(__file__).with_name("traced.json")
STUDIES = Path(__file__).parents[1] / "find"
ALLOCATORS: tuple[Allocator, ...] = ("native", "expandable")
HEADINGS = (
    "by",
    "learned from",
    "allocator",
    "trials",
    "not above",
    "not below",
    "measured over predicted",
    "said to fit",
    "ran out",
)


@dataclass(slots=True)
class Tally:
    """What became of the trials of one row."""

    shares: list[float] = field(default_factory=list)
    not_above: int = 0
    not_below: int = 0
    said_to_fit: int = 0
    ran_out: int = 0
    """Of those that were said to fit."""

    def add(
        self,
        spec: TrialSpec,
        result: TrialResult,
        method: PredictionMethod,
        needed_bytes: int,
        factors: Factors,
        *,
        cached_bytes: int = 0,
    ) -> None:
        """One trial that tells."""
        found = residual(spec, result, method, needed_bytes, cached_bytes=cached_bytes)
        if found is not None:
            self.shares.append(found.factor)
            self.not_above += found.factor <= factors.upper
            self.not_below += found.factor >= factors.lower
        given = max(
            (rank.budget.budget_bytes for rank in result.ranks if rank.budget is not None),
            default=0,
        )
        if interval(needed_bytes, factors).high_bytes <= given:
            self.said_to_fit += 1
            self.ran_out += result.outcome is Outcome.OUT_OF_MEMORY


def main() -> None:
    """A row for each way to predict, and each allocator."""
    rows: dict[str, dict[str, Any]] = json.loads(ROWS.read_text())
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}")
    ways: tuple[tuple[PredictionMethod, bool], ...] = (
        ("formula", False),
        ("formula", True),
        ("trace", False),
    )
    for method, from_others in ways:
        for allocator in ALLOCATORS:
            tally = judged(method, allocator, from_others, rows)
            if tally.shares:
                learned = "the other searches too" if from_others else "what comes along"
                counts = map(str, (len(tally.shares), tally.not_above, tally.not_below))
                shares = f"{min(tally.shares):.3f} to {max(tally.shares):.3f}"
                fits = map(str, (tally.said_to_fit, tally.ran_out))
                print(f"| {' | '.join((method, learned, allocator, *counts, shares, *fits))} |")


def judged(
    method: PredictionMethod,
    allocator: Allocator,
    from_others: bool,
    rows: dict[str, dict[str, Any]],
) -> Tally:
    """Every held-out trial that tells."""
    tally = Tally()
    studies = held_out()
    shipped = bundled_residuals()
    for name, study in studies.items():
        others = (
            [
                each
                for other in studies.values()
                if other is not study
                for each in study_residuals(other)
            ]
            if from_others
            else []
        )
        factors = factors_of(
            [
                each.factor
                for each in dict.fromkeys((*shipped, *others))
                if is_of(each, method, allocator)
            ],
            allocator,
        )
        for trial in study.trials:
            spec, result, row = trial.spec, trial.result, rows.get(f"{name}/{trial.spec.key}")
            if (
                factors is None
                or result is None
                or trial.repeat
                or not result.outcome.tells
                or row is None
                or not row["held_out"]
                or spec.settings.allocator != allocator
            ):
                continue
            formula = likely_footprint(
                Step(
                    study.question.model.shape,
                    spec.settings,
                    spec.layout,
                    length_tokens=spec.length_tokens,
                )
            )
            if method == "formula":
                tally.add(
                    spec,
                    result,
                    method,
                    formula.needed_bytes,
                    factors,
                    cached_bytes=formula.cached_bytes,
                )
            elif row["judged"]["fits"]:
                predicted = row["judged"]["peak_reserved_bytes"] + formula.outside_bytes
                tally.add(spec, result, method, predicted, factors)
    return tally


def is_of(each: Residual, method: PredictionMethod, allocator: Allocator) -> bool:
    """Of this way to predict and this allocator."""
    return (each.method, each.allocator) == (method, allocator)


def held_out() -> dict[str, Study]:
    """Searches that were predicted before they were measured, by name."""
    paths = [
        path
        for path in sorted(STUDIES.glob("*.jsonl"))
        if path.with_suffix(".prediction.json").is_file()
    ]
    return {path.stem: highwater.open_study(path) for path in paths}


if __name__ == "__main__":
    main()

"""Predictions of the formula beside every full trial in the studies of docs/results/find; prints a table and how many were right.

``python docs/results/predict/compare.py`` (no GPU).
"""

import statistics
from collections.abc import Iterator
from pathlib import Path

import highwater
from highwater.prediction.formula import Footprint, footprint
from highwater.spec.trial import Outcome, TrialResult, TrialSpec
from highwater.units import GIB, format_tokens

STUDIES = Path(__file__).parents[1] / "find"
_PAIR = ("predicted", "measured", "off by")
HEADINGS = ("model", "rung", "length", "peak in", *(f"allocated: {name}" for name in _PAIR), *(f"used: {name}" for name in _PAIR))


def main() -> None:
    """A row per trial that fit, then the errors by allocator, then how many lengths were told right."""
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}")
    errors: dict[str, list[float]] = {}
    false_fits: dict[str, int] = {}
    false_failures: dict[str, int] = {}
    for spec, result, predicted in told():
        allocator, fit = spec.settings.allocator, result.outcome is Outcome.FIT
        said_fit = predicted.device_used_bytes <= usable_bytes(result)
        false_fits[allocator] = false_fits.get(allocator, 0) + (said_fit and not fit)
        false_failures[allocator] = false_failures.get(allocator, 0) + (fit and not said_fit)
        if fit:
            print(row(spec, predicted, result))
            errors.setdefault(allocator, []).append(abs(predicted.device_used_bytes / used_bytes(result) - 1))
    for allocator, values in errors.items():
        print(
            f"\n{allocator}: device used off by {statistics.median(values):.2%} (median), {max(values):.2%} (most); "
            f"predicted to fit, but ran out: {false_fits[allocator]}; predicted to run out, but fit: {false_failures[allocator]}"
        )


def told() -> Iterator[tuple[TrialSpec, TrialResult, Footprint]]:
    """Full trials that say whether their length fits, and what the formula says of them."""
    for path in sorted(STUDIES.glob("*.jsonl")):
        study = highwater.open_study(path)
        for trial in study.trials:
            spec, result = trial.spec, trial.result
            if result is not None and result.outcome in (Outcome.FIT, Outcome.OUT_OF_MEMORY):
                shape = study.question.model.shape
                yield spec, result, footprint(shape, spec.settings, spec.layout, length_tokens=spec.length_tokens)


def usable_bytes(result: TrialResult) -> int:
    """The budget of the fullest rank: a part of the card, or all that its driver gives."""
    return max(rank.budget.budget_bytes for rank in result.ranks if rank.budget is not None)


def used_bytes(result: TrialResult) -> int:
    """Of the fullest rank."""
    return max(rank.memory.device_used_bytes or 0 for rank in result.ranks)


def row(spec: TrialSpec, predicted: Footprint, result: TrialResult) -> str:
    """Both peaks side by side."""
    allocated = max(rank.memory.peak_allocated_bytes or 0 for rank in result.ranks)
    pairs = ((predicted.allocated_bytes, allocated), (predicted.device_used_bytes, used_bytes(result)))
    figures = [f"{ours / GIB:.2f} | {known / GIB:.2f} | {ours / known - 1:+.2%}" for ours, known in pairs]
    names = (spec.model_name, spec.settings.label, format_tokens(spec.length_tokens), predicted.peak.name)
    return f"| {' | '.join((*names, *figures))} |"


if __name__ == "__main__":
    main()

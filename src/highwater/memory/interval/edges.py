"""Edges: residuals of trials that are watched from outside, of each search the longest length that
fit and the shortest that ran out.

Such a trial reports no bytes of its allocator, and what the driver reports of it at a bound
includes what the allocator only keeps. What it tells is its outcome: the longest that fit needs
what it was given at the most, the shortest that ran out needs more. The formula is taken to be as
far off at both, which are next to each other, so that how far lies between two numbers.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from highwater.errors import UsageError
from highwater.memory.formula.breakdown import Footprint
from highwater.memory.interval.residuals import Residual, leave_out, refuse_unlike, traits_of
from highwater.nouns.hardware import kind_of
from highwater.nouns.study import Cell, Question, RecordedTrial, Study
from highwater.nouns.trial import Outcome, TrialSpec

FootprintOf = Callable[[TrialSpec], Footprint]
"""What a formula says of one trial."""


def edge_residuals(study: Study, footprint_of: FootprintOf) -> tuple[Residual, ...]:
    """The residuals of a study's cells, one for each that was bracketed.

    Raises UsageError for trials of another kind than predictions are about, and for a study without
    an edge.
    """
    refuse_unlike(study)
    edges = (_edge(study, cell) for cell in study.question.cells)
    told = (_residual(study.question, *edge, footprint_of) for edge in edges if edge is not None)
    found = tuple(each for each in told if each is not None)
    if not found:
        raise UsageError(
            f"{study.path} has no edge: no length that fit beside a longer one that ran out of "
            "memory",
            hint=leave_out(study),
        )
    return found


def _edge(study: Study, cell: Cell) -> tuple[RecordedTrial, RecordedTrial] | None:
    """The shortest trial of a cell that ran out, behind the longest below it that fit; None where
    there are not both.
    """
    trials = sorted(study.trials_of(cell), key=lambda trial: trial.spec.length_tokens)
    ran_out = next((each for each in trials if _ended(each, Outcome.OUT_OF_MEMORY)), None)
    if ran_out is None:
        return None
    fits = (
        each
        for each in reversed(trials)
        if _ended(each, Outcome.FIT) and each.spec.length_tokens < ran_out.spec.length_tokens
    )
    fit = next(fits, None)
    return None if fit is None else (fit, ran_out)


def _ended(trial: RecordedTrial, outcome: Outcome) -> bool:
    return trial.result is not None and trial.result.outcome is outcome


def _residual(
    question: Question, fit: RecordedTrial, ran_out: RecordedTrial, footprint_of: FootprintOf
) -> Residual | None:
    """The residual of one edge: what the trial that fit needs at the most, and at the least. None
    where nobody recorded what its GPUs have.
    """
    spec, there, beyond = fit.spec, footprint_of(fit.spec), footprint_of(ran_out.spec)
    most_bytes = _given_bytes(question, fit, there)
    given_bytes = _given_bytes(question, ran_out, beyond)
    if most_bytes is None or given_bytes is None:
        return None
    least = Fraction(given_bytes * there.needed_bytes, beyond.needed_bytes)
    traits: dict[str, Any] = {
        each.field: each.value for each in traits_of(spec.settings, spec.layout)
    }
    return Residual(
        method="formula",
        trial=spec.key,
        measured_bytes=most_bytes,
        at_least_bytes=min(most_bytes, int(least)),
        predicted_bytes=there.needed_bytes,
        device_name=question.device_name,
        model_name=spec.model_name,
        length_tokens=spec.length_tokens,
        allocator=spec.settings.allocator,
        **traits,
    )


def _given_bytes(question: Question, trial: RecordedTrial, there: Footprint) -> int | None:
    """The most that a trial was given of a GPU: all of it, or what its allocator might hold and
    what is predicted outside, which no bound holds back. None where nobody recorded it.
    """
    total_bytes = question.device_total_bytes
    if total_bytes is None:
        return None
    kind = kind_of(question.device_name)
    usable_bytes = (kind and kind.usable_bytes) or total_bytes
    budgets = [] if trial.result is None else [rank.budget for rank in trial.result.ranks]
    caps = [budget.allocator_cap_bytes for budget in budgets if budget is not None]
    if not caps:
        return min(total_bytes, usable_bytes)
    # The bound is a share of the card, and PyTorch takes it of what is left of that for programs.
    return min(caps) * min(total_bytes, usable_bytes) // total_bytes + there.outside_bytes

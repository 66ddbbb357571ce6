"""Calibration: the errors of predictions against trials, and the next prediction's interval from
them.

Split conformal prediction: given n residuals and a new one exchangeable with them, the new one is
at most the k-th smallest in k of n + 1 cases, whatever their distribution. Source: Lei, G'Sell,
Rinaldo, Tibshirani, Wasserman 2018, https://arxiv.org/abs/1604.04173, section 2.2.

A foreign trainer's trial reports no bytes of its allocator, but the longest that fit needs at most
the memory it was given, the shortest that ran out more. The formula's error is assumed equal at
both, which bounds it from both sides: such a residual is an edge.
"""

import math
import statistics
from collections.abc import Sequence
from fractions import Fraction

from highwater.memory.formula.constants import Footprint
from highwater.memory.formula.formula import Formula
from highwater.memory.interval.residuals import (
    PredictionMethod,
    Residual,
    residual_of,
    step_of,
    traits_of,
    unfit,
)
from highwater.nouns.codec import Record
from highwater.nouns.hardware import kind_name, kind_of
from highwater.nouns.settings import Allocator
from highwater.nouns.study import Cell, Question, RecordedTrial, Study
from highwater.nouns.trial import Outcome

COVERAGE = 0.95
"""Share of trials that each end of an interval is to cover: those whose memory is not above the
upper end, and those whose memory is not below the lower one."""
LEAST_WIDENING = 0.005
"""Least share of the prediction by which an end is moved beyond the extreme residual if there are
too few residuals for the coverage. Chosen, not measured, before any interval was judged: a handful
of trials that agree to the byte say nothing about other machines."""


class Factors(Record, frozen=True, kw_only=True):
    """Both ends of an interval, as factors of the predicted bytes: 0.95 and 1.08."""

    allocator: Allocator
    coverage: float
    """Share of trials that each end is to cover; both together cover at least 2 x coverage - 1."""
    lower: float
    """The lower end, at most 1: a prediction is in its own interval."""
    upper: float
    """The upper end, at least 1."""
    residuals: int
    """Number of residuals that the ends were learned from."""
    is_widened: bool
    """True if residuals are too few for the coverage, so that an assumption moves the ends out."""


class Interval(Record, frozen=True, kw_only=True):
    """Bytes between which a GPU's use should lie, as ``nvidia-smi`` would show it."""

    low_bytes: int
    high_bytes: int
    coverage: float
    """Share of trials that each end is to cover."""
    residuals: int
    is_widened: bool
    """True if there are too few residuals for the coverage: see ``Factors``."""


class Calibration(Record, frozen=True, kw_only=True):
    """Recorded trials that intervals are learned from, and traits of the question that none has."""

    coverage: float
    factors: tuple[Factors, ...]
    """Ends of the intervals, one entry for each allocator asked about."""
    own_trials: int
    """Number of residuals from the user's own studies."""
    edges: int = 0
    """Number of residuals that are edges: known only between two bounds."""
    device_names: tuple[str, ...]
    model_names: tuple[str, ...]
    gpus: tuple[int, ...]
    objectives: tuple[str, ...]
    unlike: tuple[str, ...]
    """Words for traits of the question that no trial had: for these the coverage is not shown."""

    def of(self, allocator: Allocator) -> Factors | None:
        """The interval's factors with this allocator; None if the question has no such cell."""
        return next((factors for factors in self.factors if factors.allocator == allocator), None)


def calibrate(
    question: Question,
    method: PredictionMethod,
    *,
    bundled: Sequence[Residual],
    own: Sequence[Residual] = (),
) -> Calibration:
    """Learn the intervals of a question's predictions; each trial counts once, even if named twice.
    For an allocator without trials all trials count, and it is listed in ``unlike``.
    """
    known: dict[object, Residual] = {}
    for each in (*bundled, *own):
        if each.method == method:
            known.setdefault((each.trial, each.device_name, each.measured_bytes), each)
    both = list(known.values())
    allocators: dict[Allocator, None] = dict.fromkeys(
        cell.settings.allocator for cell in question.cells
    )

    def learned(allocator: Allocator) -> Factors | None:
        alike = [residual for residual in both if residual.allocator == allocator] or both
        least = [residual.least_factor for residual in alike]
        return factors_of([residual.factor for residual in alike], allocator, least=least)

    used = [residual for residual in both if residual.allocator in allocators] or both
    return Calibration(
        coverage=COVERAGE,
        factors=tuple(factors for factors in map(learned, allocators) if factors is not None),
        own_trials=sum(residual not in bundled for residual in used) if own else 0,
        edges=sum(residual.at_least_bytes is not None for residual in used),
        device_names=tuple(dict.fromkeys(residual.device_name for residual in used)),
        model_names=tuple(dict.fromkeys(residual.model_name for residual in used)),
        gpus=tuple(sorted({residual.gpus for residual in used})),
        objectives=tuple(dict.fromkeys(residual.objective for residual in used)),
        unlike=_unlike(question, used),
    )


def factors_of(
    residuals: Sequence[float],
    allocator: Allocator,
    coverage: float = COVERAGE,
    *,
    least: Sequence[float] = (),
) -> Factors | None:
    """The ends that follow from residuals, each measured over predicted; None without residuals.

    The upper end is the k-th smallest, k = ceil((n + 1) x coverage), the lower end the k-th
    largest. If k is above n, n residuals are too few: the extremes are moved outward as far as
    tails that fall off exponentially would need, and by at least ``LEAST_WIDENING``.

    For residuals that are known only between two bounds, ``residuals`` are the upper bounds, from
    which the upper end is learned, and ``least`` the lower bounds, from which the lower end is: so
    each end covers no less, whatever the true values.
    """
    # below 0.5 the lower end would be above the upper one
    assert 0.5 <= coverage < 1  # noqa: S101
    if not residuals:
        return None
    most, fewest = sorted(residuals), sorted(least or residuals)
    count, rank = len(most), math.ceil((len(most) + 1) * Fraction(str(coverage)))
    is_widened = rank > count
    rank = min(rank, count)
    lower, upper = fewest[count - rank], most[rank - 1]
    if is_widened:
        beyond = math.log(1 / (1 - coverage)) / math.log(count + 1) - 1
        lower -= max(beyond * (statistics.median(fewest) - lower), LEAST_WIDENING)
        upper += max(beyond * (upper - statistics.median(most)), LEAST_WIDENING)
    return Factors(
        allocator=allocator,
        coverage=coverage,
        lower=min(1.0, max(0.0, lower)),
        upper=max(1.0, upper),
        residuals=count,
        is_widened=is_widened,
    )


def least_residuals(coverage: float) -> int:
    """Fewest trials from which an interval's end covers this share without being widened."""
    share = Fraction(str(coverage))
    return math.ceil(share / (1 - share))


def interval(predicted_bytes: int, factors: Factors) -> Interval:
    """The interval around a prediction in bytes, rounded outward."""
    return Interval(
        low_bytes=math.floor(predicted_bytes * Fraction(factors.lower)),
        high_bytes=math.ceil(predicted_bytes * Fraction(factors.upper)),
        coverage=factors.coverage,
        residuals=factors.residuals,
        is_widened=factors.is_widened,
    )


def most_predicted_bytes(room_bytes: int, factors: Factors) -> int:
    """Largest prediction in bytes whose pessimistic end still fits into ``room_bytes``."""
    return math.floor(room_bytes / Fraction(factors.upper))


def _unlike(question: Question, residuals: Sequence[Residual]) -> tuple[str, ...]:
    """Words for the question's GPU, model and traits of its cells that no residual's trial had."""
    fields = Residual.__struct_fields__
    known = {(field, getattr(residual, field)) for residual in residuals for field in fields}
    known |= {("kind", kind_name(residual.device_name)) for residual in residuals}
    kind = kind_name(question.device_name)
    asked: list[tuple[str, str, object]] = [
        (kind, "kind", kind),
        (question.model.name, "model_name", question.model.name),
    ]
    traits = (each for cell in question.cells for each in traits_of(cell.settings, cell.layout))
    asked += [(each.words, each.field, each.value) for each in traits]
    unlike = (
        words for words, field, value in asked if value is not False and (field, value) not in known
    )
    return tuple(dict.fromkeys(unlike))


def edge_residuals(study: Study, formula: Formula) -> tuple[Residual, ...]:
    """One comparison for each cell of a study whose edge is known; UsageError if none is."""
    edges = (_edge(study, cell) for cell in study.question.cells)
    told = (_residual(study.question, *edge, formula) for edge in edges if edge is not None)
    found = tuple(each for each in told if each is not None)
    if not found:
        what = "has no edge: no length that fit beside a longer one that ran out of memory"
        raise unfit(study, what)
    return found


def _edge(study: Study, cell: Cell) -> tuple[RecordedTrial, RecordedTrial] | None:
    """Longest trial of a cell that fit, and the shortest longer one that ran out; or None."""
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
    question: Question, fit: RecordedTrial, ran_out: RecordedTrial, formula: Formula
) -> Residual | None:
    """Comparison of a cell's edge with its prediction; None if its GPUs' memory is unknown."""
    there, beyond = (formula(step_of(question.model.shape, each.spec)) for each in (fit, ran_out))
    most_bytes = _given_bytes(question, fit, there)
    given_bytes = _given_bytes(question, ran_out, beyond)
    if most_bytes is None or given_bytes is None:
        return None
    least = Fraction(given_bytes * there.needed_bytes, beyond.needed_bytes)
    return residual_of(
        fit.spec,
        method="formula",
        measured_bytes=most_bytes,
        at_least_bytes=min(most_bytes, int(least)),
        predicted_bytes=there.needed_bytes,
        device_name=question.device_name,
    )


def _given_bytes(question: Question, trial: RecordedTrial, there: Footprint) -> int | None:
    """Upper bound of the GPU memory that a trial could use, in bytes: the whole card, or the
    allocator's limit plus the memory predicted outside the allocator. None if not recorded.
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
    # The limit is a share of the card, which PyTorch applies to the part usable by programs.
    return min(caps) * min(total_bytes, usable_bytes) // total_bytes + there.outside_bytes

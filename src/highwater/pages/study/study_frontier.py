"""The frontier of a study: each cell as far as its trials went, with what they measured."""

from highwater.pages.frontier import Frontier, Point, Reach
from highwater.pages.study.study_report import CellReport, StudyReport, TrialReport
from highwater.spec.settings_words import settings_in_words
from highwater.spec.study import RANK_WORDS
from highwater.units import format_bytes


def study_frontier(report: StudyReport) -> Frontier:
    """Every cell in the order of the question, the longest length that fit drawn."""
    question = report.study.question
    limits = [trial.limit_bytes for trial in report.trials if trial.limit_bytes]
    lengths = [trial.length_tokens for trial in report.trials]
    return Frontier(
        rows=tuple(_reach(cell, report) for cell in report.cells),
        native_length_tokens=question.grid.native_length_tokens,
        device_bytes=min(limits, default=question.memory_budget_bytes or 0),
        shortest_tokens=question.grid.start_tokens,
        longest_asked_tokens=max(lengths, default=question.grid.start_tokens),
        rank_word=RANK_WORDS[question.device][0],
        scales_positions=question.foreign is None,
    )


def _reach(cell: CellReport, report: StudyReport) -> Reach:
    trials = [report.trials[step.trial - 1] for step in cell.bracket]
    fitting = [trial for trial in trials if trial.counts_as_fit]
    trained = max((t.length_tokens for t in fitting if not t.is_memory_only), default=0)
    reach = max((trial.length_tokens for trial in fitting), default=0)
    fails = cell.bracket[-1].does_not_fit_tokens if cell.bracket else None
    words = settings_in_words(cell.cell.settings, cell.cell.layout)
    gpus = cell.cell.layout.gpus
    several = len({each.cell.layout.gpus for each in report.cells}) > 1
    return Reach(
        cell=cell.cell,
        words=f"{gpus} GPUs: {words}" if several else words,
        label=cell.label,
        trained_tokens=trained,
        reach_tokens=reach,
        fails_tokens=fails,
        is_at_least=fails is None,
        source=report.label,
        points=tuple(_points(fitting, report.label)),
        asked=_asked(cell, report, fails),
    )


def _points(fitting: list[TrialReport], source: str) -> list[Point]:
    """One point for each length: of several trials the one that left least."""
    found: dict[int, TrialReport] = {}
    for trial in sorted(fitting, key=_left, reverse=True):
        found[trial.length_tokens] = trial
    return [
        Point(
            length_tokens=tokens,
            left_bytes=trial.headroom_bytes,
            step_time_s=None if trial.is_memory_only else trial.step_time_s,
            tokens_per_s=None if trial.is_memory_only else trial.tokens_per_s,
            speed_source=source,
        )
        for tokens, trial in sorted(found.items())
    ]


def _left(trial: TrialReport) -> int:
    return trial.headroom_bytes or 0


def _asked(cell: CellReport, report: StudyReport, fails: int | None) -> str | None:
    """What the shortest trial that did not fit asked for."""
    numbers = {step.trial for step in cell.bracket}
    for failed in report.failures:
        if failed.trial in numbers and failed.length_tokens == fails:
            requested = report.trials[failed.trial - 1].requested_bytes
            if failed.out_of_memory is not None:
                return failed.out_of_memory
            return None if requested is None else f"no room for {format_bytes(requested)}"
    return None

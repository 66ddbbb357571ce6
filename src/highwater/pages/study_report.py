"""Report on one study, as data: from its file, its logs and predictions for it.

Figures of trials are measured, or simulated if the question is; all others are predicted.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from highwater.errors import HighwaterError
from highwater.nouns.codec import Record, from_builtins, to_builtins
from highwater.nouns.environment import ALLOCATOR_VARIABLES
from highwater.nouns.secrets import without_secrets
from highwater.nouns.settings import short_settings
from highwater.nouns.study import Cell, CellAnswer, RecordedTrial, Study, UnprovenAnswer
from highwater.nouns.trial import LogEnd, Outcome, RankReport, TrialResult
from highwater.pages.study_commands import (
    Command,
    commands,
    flag_value,
    request_line,
    requested_bytes,
)
from highwater.search.predicted_study import (
    PredictedCell,
    PredictedTrial,
    Predictions,
    predictions_of,
)
from highwater.search.start_length import read_prediction
from highwater.store.journal import read_study
from highwater.store.logs import log_end
from highwater.version import __version__

OUTCOMES: dict[Outcome | None, str] = {
    Outcome.FIT: "fit",
    Outcome.MEMORY_ONLY_FIT: "memory-only fit",
    Outcome.OUT_OF_MEMORY: "out of memory",
    Outcome.HOST_OUT_OF_MEMORY: "host out of memory",
    Outcome.TIMEOUT: "timed out",
    Outcome.CRASHED: "crashed",
    None: "no end recorded",
}

Judgement = Literal["inside", "below", "above", "ran out, as the upper end allows", "unknown"]
"""A measured figure compared with its interval; a trial that ran out gives only a lower bound."""


class TrialReport(Record, frozen=True, kw_only=True):
    """One launch of a trial in a report; peaks are those of the fullest GPU."""

    number: int
    """Number from 1, by order of start."""
    cell: str
    rung: str
    gpus: int
    ulysses_degree: int
    ring_degree: int
    replicate_degree: int
    length_tokens: int
    is_memory_only: bool
    attempt: int
    repeat: int
    outcome: Outcome | None
    """Outcome of the trial; None if no end is recorded."""
    counts_as_fit: bool
    """True if the trial fit, with the headroom that was asked for."""
    reason: str
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    """Peak of reserved memory; on the CPU the largest data segment."""
    device_used_bytes: int | None = None
    requested_bytes: int | None = None
    """Request that had no room on the rank that ran out first; None: none, or unknown."""
    limit_bytes: int | None = None
    """Limit of one GPU: the budget if there is one, else the card."""
    headroom_bytes: int | None = None
    """Bytes left by a trial that fit; None if it did not fit, or unknown."""
    allocator_retries: int | None = None
    allocator: str | None = None
    """Settings of the caching allocator, as the trial reported them."""
    attention_kernel: str | None = None
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    launch_to_first_step_s: float | None = None
    wall_s: float | None = None
    log_path: str | None = None
    predicted: PredictedTrial | None = None
    beside_prediction: Judgement = "unknown"

    @property
    def lacks_headroom(self) -> bool:
        """True if the trial fit, but left less than the requested headroom."""
        return self.outcome is not None and self.outcome.is_fit and not self.counts_as_fit

    @property
    def outcome_in_words(self) -> str:
        """The outcome in words; for a fit that does not count, with the reason."""
        return f"{OUTCOMES[self.outcome]}{', too little headroom' if self.lacks_headroom else ''}"


class BracketStep(Record, frozen=True, kw_only=True):
    """Longest fit and shortest failure of a cell after one of its trials."""

    trial: int
    fits_tokens: int | None
    """The longest length that has fit so far; None if none has."""
    does_not_fit_tokens: int | None
    """The shortest length above ``fits_tokens`` that has not fit so far; None if there is none."""


class CellReport(Record, frozen=True, kw_only=True):
    """One cell in a report: its answer, and how its trials closed in on it."""

    label: str
    cell: Cell
    answer: CellAnswer | None
    """The answer that the cell's trials prove; None if its search has not ended, or the trials do
    not prove the study's answer."""
    unproven: UnprovenAnswer | None = None
    """The study's answer that its trials do not prove; None otherwise."""
    bracket: tuple[BracketStep, ...]
    predicted: PredictedCell | None = None
    """Prediction of the formula, by the version that made the report."""
    expected_tokens: int | None = None
    """Longest length that was likely to fit before the cell's first trial, as the study recorded
    it; for older studies, by the prediction that the command names."""
    expected_by: str | None = None
    """Source of ``expected_tokens``: ``formula`` as it was then, ``trace``, or a file."""
    begun_at_tokens: int | None = None
    """Length that the search began with; None for a linear search, which uses no prediction."""

    @property
    def longest_fit_tokens(self) -> int | None:
        """Longest length that fit, by the answer or so far; None if unknown."""
        if self.answer is not None:
            return self.answer.reach_tokens
        return self.bracket[-1].fits_tokens if self.bracket else None

    @property
    def next_tokens(self) -> int | None:
        """Shortest length above ``longest_fit_tokens`` that did not fit; None if unknown."""
        if self.answer is not None:
            return self.answer.does_not_fit_tokens
        return self.bracket[-1].does_not_fit_tokens if self.bracket else None


class FailedTrial(Record, frozen=True, kw_only=True):
    """A trial that did not fit or proved nothing, with the error and the log's end."""

    trial: int
    cell: str
    length_tokens: int
    outcome: Outcome
    rank: int | None
    phase: str | None
    text: str
    """Error text of the rank that failed first; without one, the reason."""
    out_of_memory: str | None
    """Sentence on what had no room, what was alive and which setting to try; None: unknown."""
    log_path: str | None
    log: LogEnd
    """The log's end when the report was made."""


class Beginning(Record, frozen=True, kw_only=True):
    """What was predicted before a search, and so ordered its trials."""

    predictions: tuple[str, ...]
    """Each prediction that was named: ``trace``, or a file."""
    likely_tokens: dict[str, int]
    """Likely lengths by cell; empty if they are not known any more."""
    reason: str | None = None
    """Why the likely lengths are not known; None if they are."""


class StudyReport(Record, frozen=True, kw_only=True):
    """Everything known about a study, as data for its page and its JSON."""

    schema_version: int = 1
    highwater_version: str = __version__
    """Version that made the report."""
    label: Literal["measured", "simulated"]
    """Source of every figure that is not called predicted."""
    is_complete: bool
    versions: dict[str, tuple[str, ...]]
    """Versions of each package that trials reported."""
    device_names: tuple[str, ...]
    """Names of the devices that trials reported."""
    cells: tuple[CellReport, ...]
    trials: tuple[TrialReport, ...]
    failures: tuple[FailedTrial, ...]
    predictions: Predictions
    beginning: Beginning | None = None
    """Predictions that ordered the search's trials; None if none did."""
    commands: tuple[Command, ...]
    study: Study
    """The study as it was read, without what looks like a secret."""


def study_report(study: str | Path | Study) -> StudyReport:
    """Collect everything known about a study, finished or not.

    ``study`` is a file that ``find`` wrote, or the result of ``open_study``. Each trial is
    predicted again by formula, in milliseconds. Logs are looked up at their recorded paths and
    beside the study, for their last lines. No trial is run. Raises StudyError for a file that is no
    study, or is damaged.
    """
    return assembled(study if isinstance(study, Study) else read_study(Path(study)), _log_of)


def assembled(study: Study, log_of: Callable[[Study, TrialResult], LogEnd]) -> StudyReport:
    """Make the report of a loaded study; ``log_of`` finds the end of a trial's log."""
    predictions, beginning = predictions_of(study), _beginning(study)
    logs = {
        number: log_of(study, trial.result)
        for number, trial in enumerate(study.trials, 1)
        if trial.result is not None and not trial.result.outcome.is_fit
    }
    study = from_builtins(_without_secrets(to_builtins(study)), Study)
    if beginning is not None:
        beginning = beginning.replace(
            predictions=tuple(map(without_secrets, beginning.predictions))
        )
    pairs = enumerate(zip(study.trials, predictions.trials, strict=True), 1)
    trials = tuple(_trial(study, number, *pair) for number, pair in pairs)
    results = [trial.result for trial in study.trials if trial.result is not None]
    numbered: dict[Cell, list[tuple[int, RecordedTrial]]] = {}
    for number, trial in enumerate(study.trials, 1):
        numbered.setdefault(trial.cell, []).append((number, trial))
    return StudyReport(
        label=study.question.figures,
        is_complete=study.complete,
        versions=study.versions,
        device_names=tuple(
            dict.fromkeys(rank.device_name for r in results for rank in r.ranks if rank.device_name)
        ),
        cells=tuple(
            _cell(study, cell, numbered.get(cell, ()), predicted, beginning)
            for cell, predicted in zip(study.question.cells, predictions.cells, strict=True)
        ),
        trials=trials,
        failures=tuple(_failures(study, trials, logs)),
        predictions=predictions,
        beginning=beginning,
        commands=commands(study),
        study=study,
    )


def _log_of(study: Study, result: TrialResult) -> LogEnd:
    first = result.first_failed
    failure = None if first is None else first.failure
    said = "" if failure is None else failure.text.partition("\n")[0]
    return log_end(result.log_path, study.path, said=said)


def _beginning(study: Study) -> Beginning | None:
    """Prediction that ordered the search, as recorded or read from its file; None: the formula."""
    recorded = [each for each in study.expectations if each.prediction != "formula"]
    device = study.question.device
    if recorded:
        return Beginning(
            predictions=tuple(dict.fromkeys(each.prediction for each in recorded)),
            likely_tokens={each.cell.label_on(device): each.likely_tokens for each in recorded},
        )
    named = flag_value("--prediction", study.command)
    if named in (None, "formula") or study.schema_version > 1:
        return None
    unread = partial(Beginning, predictions=(named,), likely_tokens={})
    if named == "trace":
        return unread(reason="its lengths were not recorded")
    beside = Path(study.path or named).parent / Path(named).name
    path = next((place for place in (Path(named), beside) if place.is_file()), None)
    if path is None:
        return unread(reason="it is not found from here, nor beside the study")
    try:
        found = read_prediction(path, study.question)
    except HighwaterError as error:
        return unread(reason=error.problem.replace(str(path), path.name))
    likely_tokens = {each.cell.label_on(device): each.likely_edge_tokens for each in found.cells}
    return Beginning(predictions=(named,), likely_tokens=likely_tokens)


def _without_secrets(value: object) -> object:
    """Copy a study's values without secrets; names of trials are too short to be any."""
    match value:
        case str():
            return without_secrets(value)
        case dict():
            # Data is named as module:function, which has to stay so.
            return {key: v if key == "data" else _without_secrets(v) for key, v in value.items()}
        case list() | tuple():
            return [_without_secrets(inner) for inner in value]
        case _:
            return value


_OF_A_LAYOUT = ("gpus", "ulysses_degree", "ring_degree", "replicate_degree")
_OF_A_RESULT = (
    *("outcome", "reason", "peak_reserved_bytes", "step_time_s", "tokens_per_s", "mfu"),
    *("launch_to_first_step_s", "wall_s", "log_path"),
)
"""Fields that a trial's report copies from its layout and its result."""


def _trial(
    study: Study, number: int, recorded: RecordedTrial, predicted: PredictedTrial | None
) -> TrialReport:
    spec, result = recorded.spec, recorded.result
    started = TrialReport(
        number=number,
        cell=recorded.cell.label_on(study.question.device),
        rung=short_settings(spec.settings),
        **{name: getattr(spec.layout, name) for name in _OF_A_LAYOUT},
        length_tokens=spec.length_tokens,
        is_memory_only=spec.is_memory_only,
        attempt=recorded.attempt,
        repeat=recorded.repeat,
        outcome=None,
        counts_as_fit=False,
        reason="it started, and no end is recorded: it is running, or was interrupted",
        limit_bytes=spec.memory_budget_bytes or study.question.device_total_bytes,
        predicted=predicted,
    )
    if result is None:
        return started
    memories = [rank.memory for rank in result.ranks]
    first = result.ranks[0] if result.ranks else RankReport(rank=0)
    limits = [
        rank.budget.budget_bytes if rank.budget else rank.memory.device_total_bytes
        for rank in result.ranks
    ]
    told = first.allocator_settings
    ended = started.replace(
        **{name: getattr(result, name) for name in _OF_A_RESULT},
        counts_as_fit=study.question.counts_as_fit(result),
        peak_allocated_bytes=_most(memory.peak_allocated_bytes for memory in memories),
        device_used_bytes=_most(memory.device_used_bytes for memory in memories),
        requested_bytes=requested_bytes(result),
        limit_bytes=min(
            (limit for limit in limits if limit is not None), default=started.limit_bytes
        ),
        headroom_bytes=result.headroom_bytes if result.outcome.is_fit else None,
        allocator_retries=_most(memory.allocator_retries for memory in memories),
        allocator=next((told[name] for name in ALLOCATOR_VARIABLES if name in told), None),
        attention_kernel=first.attention_kernel,
    )
    return ended.replace(beside_prediction=judged(ended))


def judged(trial: TrialReport) -> Judgement:
    """Judge measured memory by its interval; a trial that ran out needed more than its limit."""
    around = None if trial.predicted is None else trial.predicted.interval
    if around is None or trial.outcome is None:
        return "unknown"
    if trial.outcome is Outcome.OUT_OF_MEMORY and trial.limit_bytes is not None:
        allows = around.high_bytes > trial.limit_bytes
        return "ran out, as the upper end allows" if allows else "above"
    if not trial.outcome.is_fit or trial.device_used_bytes is None:
        return "unknown"
    if trial.device_used_bytes < around.low_bytes:
        return "below"
    return "inside" if trial.device_used_bytes <= around.high_bytes else "above"


def _cell(
    study: Study,
    cell: Cell,
    trials: Sequence[tuple[int, RecordedTrial]],
    predicted: PredictedCell | None,
    beginning: Beginning | None,
) -> CellReport:
    label = cell.label_on(study.question.device)
    recorded = next((each for each in study.expectations if each.cell == cell), None)
    given_tokens, named = None, None
    if beginning is not None and label in beginning.likely_tokens:
        given_tokens, named = beginning.likely_tokens[label], beginning.predictions[-1]
    return CellReport(
        label=label,
        cell=cell,
        answer=study.answer_of(cell),
        unproven=study.unproven_of(cell),
        bracket=tuple(_bracket(study, trials)),
        predicted=predicted,
        expected_tokens=given_tokens if recorded is None else recorded.likely_tokens,
        expected_by=named if recorded is None else recorded.prediction,
        begun_at_tokens=given_tokens if study.question.method == "bisect" else None,
    )


def _bracket(study: Study, trials: Iterable[tuple[int, RecordedTrial]]) -> Iterator[BracketStep]:
    """Yield the bracket after each trial of a cell; trials that prove nothing do not move it."""
    longest = 0
    fails: list[int] = []
    for number, trial in trials:
        tokens = trial.spec.length_tokens
        if trial.result is not None and trial.result.outcome.tells:
            if study.question.counts_as_fit(trial.result):
                longest = max(longest, tokens)
            else:
                insort(fails, tokens)
        above = bisect_right(fails, longest)
        shortest = fails[above] if above < len(fails) else None
        yield BracketStep(trial=number, fits_tokens=longest or None, does_not_fit_tokens=shortest)


def _failures(
    study: Study, trials: Iterable[TrialReport], logs: Mapping[int, LogEnd]
) -> Iterator[FailedTrial]:
    for reported, recorded in zip(trials, study.trials, strict=True):
        result, log = recorded.result, logs.get(reported.number)
        if result is None or log is None:
            continue
        first = result.first_failed
        failure = None if first is None else first.failure
        yield FailedTrial(
            trial=reported.number,
            cell=reported.cell,
            length_tokens=reported.length_tokens,
            outcome=result.outcome,
            rank=None if first is None else first.rank,
            phase=None if failure is None else failure.phase,
            text=result.reason if failure is None else failure.text,
            out_of_memory=request_line(result, recorded.spec.settings, recorded.spec.layout),
            log_path=result.log_path,
            log=LogEnd(lines=tuple(map(without_secrets, log.lines)), reason=log.reason),
        )


def _most(counts: Iterable[int | None]) -> int | None:
    return max((count for count in counts if count is not None), default=None)

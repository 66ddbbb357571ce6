"""Predicted study: the formula's interval for each trial and capacity for each cell of a study.
Also: return a complete study on a machine without GPUs, where no search can run.
"""

import shlex
import sys
from contextlib import suppress
from pathlib import Path

from highwater.errors import HighwaterError, MachineError, ModelError, StudyError
from highwater.memory.capacity import MemoryLimit
from highwater.memory.formula.formula import refuse_unknown_family
from highwater.memory.interval.calibration import Calibration, Interval
from highwater.memory.interval.residuals import bundled_residuals
from highwater.memory.predictor import predict_at, predict_cells
from highwater.memory.trainers import MEMORY, calibration_of
from highwater.nouns.cluster import Cluster
from highwater.nouns.codec import Record
from highwater.nouns.plan_notes import prompt_notes
from highwater.nouns.request import Request
from highwater.nouns.study import Cell, Question, Study
from highwater.nouns.trainer import OURS
from highwater.nouns.trial import TrialSpec
from highwater.search.tried_settings import searched
from highwater.store.journal import read_study
from highwater.trials.probe import probe
from highwater.units import format_seconds
from highwater.version import __version__


class PredictedTrial(Record, frozen=True, kw_only=True):
    """Memory of one trial's fullest GPU by today's formula, and its interval."""

    allocated_bytes: int
    reserved_bytes: int
    device_used_bytes: int
    """Predicted bytes, inside the interval: as likely too high as too low."""
    interval: Interval | None
    """Interval of the memory that the driver reports; None if no trials were recorded."""
    fits: bool
    """True if even the upper end of the interval fits."""
    peak_phase: str


class PredictedCell(Record, frozen=True, kw_only=True):
    """Longest lengths in tokens that today's formula predicts for a cell of a recorded study."""

    capacity_tokens: int
    """Longest length for which even the upper end of the interval fits."""
    likely_tokens: int
    """Longest length for which the prediction itself fits."""


class Predictions(Record, frozen=True, kw_only=True):
    """A study's trials and cells by today's formula, or the reason why there are none."""

    trials: tuple[PredictedTrial | None, ...]
    """Predictions in the order of the study's trials; all None if ``reason`` is given."""
    cells: tuple[PredictedCell | None, ...]
    """Predictions in the order of the question's cells."""
    calibration: Calibration | None = None
    shared_trials: int = 0
    """Trials of this study from which the intervals were learned: they cannot test them."""
    reason: str | None = None
    """Why there are no predictions; None if there are."""
    highwater_version: str = __version__
    """Version of highwater whose formula made the predictions."""


def predictions_of(study: Study) -> Predictions:
    """Predict every trial and cell of a study by today's formula, or give the reason why not."""
    question = study.question
    reason = obstacle(question)
    if reason is not None:
        nothing, of_no_cell = (None,) * len(study.trials), (None,) * len(question.cells)
        return Predictions(trials=nothing, cells=of_no_cell, reason=reason)
    assert question.memory_bytes is not None, "it is no obstacle"  # noqa: S101
    memory_limit = MemoryLimit(
        device_bytes=question.memory_bytes, host_bytes=question.host_memory_bytes
    )
    known = calibration_of(question, OURS)
    told = (trial for trial in study.trials if trial.result and not trial.result.simulated)
    keys = {trial.spec.key for trial in told}
    learned = {residual.trial for residual in bundled_residuals() if residual.method == "formula"}
    return Predictions(
        trials=tuple(
            _of_trial(question, trial.spec, memory_limit, known) for trial in study.trials
        ),
        cells=tuple(
            PredictedCell(
                capacity_tokens=found.capacity_tokens, likely_tokens=found.likely_edge_tokens
            )
            for found in predict_cells(question, memory_limit, MEMORY[OURS].predictor, known)
        ),
        calibration=known,
        shared_trials=len(keys & learned),
    )


def obstacle(question: Question) -> str | None:
    """Reason why the formula cannot be compared with a question's trials; None if it can."""
    if question.foreign is not None:
        title = question.foreign.title
        return f"{title} trained, and nobody tells what its allocator only keeps"
    return unlike_trials(question)


def unlike_trials(question: Question) -> str | None:
    """Reason why no trainer's formula applies to a question's trials; None if one does."""
    if question.device != "cuda":
        return "trials ran on the CPU, and the formula is about GPUs"
    if question.data is not None:
        return "trials read data of their own, and the formula is about synthetic sequences"
    if question.memory_budget_bytes is None and question.device_total_bytes is None:
        return "nobody recorded how much memory a GPU has"
    try:
        refuse_unknown_family(question.model)
    except ModelError as error:
        return error.problem
    return None


def _of_trial(
    question: Question, spec: TrialSpec, memory_limit: MemoryLimit, known: Calibration | None
) -> PredictedTrial:
    cell = Cell(layout=spec.layout, settings=spec.settings)
    factors = None if known is None else known.of(spec.settings.allocator)
    predictor = MEMORY[OURS].predictor(question, cell, memory_limit)
    found = predict_at(predictor, spec.length_tokens, factors)
    return PredictedTrial(
        allocated_bytes=found.footprint.allocated_bytes,
        reserved_bytes=found.footprint.reserved_bytes,
        device_used_bytes=found.device_used_bytes,
        interval=found.interval,
        fits=found.capacity_tokens > 0,
        peak_phase=found.peak_phase,
    )


def completed_study(request: Request) -> Study | None:
    """Return the named study if it asks the same question and has all answers in time; else None.

    Only if no GPU is visible: elsewhere the search is resumed and finds its trials recorded.
    Nothing is run or written. Raises MachineError for a study of the same question that is not
    finished, or not under this time limit: it cannot be resumed here.
    """
    if request.study is None or request.dry_run or request.device == "cpu":
        return None
    if request.on_ray or probe().gpus:
        return None
    study = _study_in(Path(request.study))
    if study is None or study.question.device != "cuda" or study.question.simulated:
        return None
    asked = None
    with suppress(HighwaterError):  # its question on a machine with the study's GPUs
        where = Cluster(
            gpus=max(cell.layout.machine_gpus for cell in study.question.cells),
            device_name=study.question.device_name,
            device_bytes=study.question.device_total_bytes or 0,
        )
        machine = where.machine().replace(  # its host memory is assumed to suffice
            host_memory_total_bytes=sys.maxsize, host_memory_available_bytes=sys.maxsize
        )
        asked = searched(gone_on(request)[0], machine, study.question.cells).question
    if asked is None or asked.key != study.question.key:
        return None
    limit_s = asked.timeout_s
    answers = study.answers_within(limit_s)
    open_cells = len(study.question.cells) - sum(not answer.is_undecided for answer in answers)
    shown = f"highwater show {shlex.quote(request.study)}"
    if open_cells:
        is_late = len(answers) < len(study.answers)
        within = f" in {format_seconds(limit_s)} a trial" if is_late else ""
        cells = f"{open_cells} of {len(study.question.cells)} cells without a final answer{within}"
        raise MachineError(
            f"no GPU is visible, and the search in {request.study} is not finished: {cells}",
            hint=f"`{shown}` shows what it has; the same command goes on with it on "
            f"{study.question.device_name}",
        )
    none_needed = f"no GPU is visible, and none is needed: {request.study} has every answer"
    return study.replace(notes=(f"{none_needed}; nothing is run", *study.notes))


def _study_in(path: Path) -> Study | None:
    """Read the study in a regular file; None if that fails, as errors are reported later."""
    with suppress(StudyError, OSError):
        return read_study(path) if path.is_file() else None
    return None


def cells_of_study(request: Request) -> tuple[Cell, ...]:
    """Cells of the study that a request goes on with; empty if it names none."""
    study = None if request.study is None else _study_in(Path(request.study))
    return () if study is None else study.question.cells


def gone_on(request: Request) -> tuple[Request, tuple[str, ...]]:
    """Return the request with its study's prompt length, if it names none itself; and notes."""
    if request.study is None or request.prompt_tokens is not None:
        return request, ()
    path = Path(request.study)
    study = _study_in(path)
    if study is None:
        return request, ()
    prompt_tokens = study.question.prompt_tokens
    prompted = request.replace(prompt_tokens=prompt_tokens)
    return prompted, prompt_notes(path, study.question)

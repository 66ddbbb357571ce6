"""How each trainer's memory is predicted: what its module says, and what is made of that."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

import msgspec

from highwater.memory.capacity import CellPrediction, MemoryLimit
from highwater.memory.formula.constants import MachineConstants
from highwater.memory.formula.formula import Formula
from highwater.memory.interval.calibration import Calibration, calibrate
from highwater.memory.interval.residuals import PredictionMethod, Residual, study_residuals
from highwater.memory.predictor import (
    Asked,
    FormulaPredictor,
    Predictor,
    PredictorOf,
    predict_cells,
)
from highwater.model.model import ModelShape
from highwater.nouns.study import Cell, Question, Study
from highwater.nouns.trainer import (
    OURS,
    REGISTRY,
    TRAINERS,
    TrainerName,
    TrainerParts,
    known_runs,
    predicted_trainer,
)
from highwater.nouns.trial import TrialSpec
from highwater.speed import predicted_step

_NO_INTERVAL = "nobody recorded its trials: a prediction without an interval"


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledReplay:
    """Traces that come with the package: their replay answers some cells instead of a formula."""

    covers: Callable[[ModelShape, Cell], bool]
    """Whether there is a trace of a model's cell."""
    predictor: PredictorOf
    """The replay of such a cell."""
    accuracy: str
    """What is known of its errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """How one trainer's memory is predicted."""

    formula: Formula
    """The trainer's memory in closed form."""
    accuracy: str
    """What is known of the formula's errors, besides what intervals say."""
    of_adapters: str | None = None
    """What is known besides of the formula's errors, of LoRA."""
    residuals: Callable[[], tuple[Residual, ...]] | None = None
    """Recorded trials of it, from which intervals are learned. None: nobody recorded any."""
    learn: Callable[[Study, MachineConstants | None], tuple[Residual, ...]] | None = None
    """What a user's own study of it teaches, given their constants. None: it is not run here."""
    is_timed: bool = False
    """Whether the time of its steps is predicted."""
    replay: BundledReplay | None = None
    """Traces that answer some cells; None: every cell is answered by the formula."""
    fixed_fields: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: {}
    """The fields of ``Request`` that all its trials have, given the others that were named."""
    refuse: Callable[[TrialSpec, ModelShape], None] | None = None
    """Raises UsageError for what it cannot be told. None: it is told anything."""

    def by_formula(self, *asked: *tuple[Question, Cell, MemoryLimit]) -> FormulaPredictor:
        """The closed form of a question's cell, in a memory limit; of each length once."""
        return FormulaPredictor(cache(self.formula), *asked)

    def predictor(self, question: Question, cell: Cell, limit: MemoryLimit) -> Predictor:
        """The bundled replay of a cell; its closed form where there is none, or a rollout."""
        if self.replay and not limit.rollout and self.replay.covers(question.model.shape, cell):
            return self.replay.predictor(question, cell, limit)
        return self.by_formula(question, cell, limit)


def _composed(memory: TrainerMemory, name: str) -> TrainerMemory:
    """The memory of a trainer that composes another's step, and whose trials teach by its law."""
    taught = partial(study_residuals, trainer=cast(TrainerName, name), formula=memory.formula)
    return replace(memory, learn=taught)


MEMORY: Mapping[TrainerName, TrainerMemory] = TrainerParts(TrainerName, "MEMORY", _composed)
"""How the memory of each trainer is predicted, by the name that ``--trainer`` takes."""


def refused_settings(trainer: TrainerName, named: Mapping[str, Any]) -> list[str]:
    """The settings that a trainer does not take; what it always does may be named as well."""
    always = MEMORY[trainer].fixed_fields(named)
    refused = TRAINERS[trainer].refused(named)
    return [name for name in refused if name not in always or named[name] != always[name]]


def predict_by_formula(
    question: Question,
    memory_limit: MemoryLimit,
    trainer: TrainerName,
    known: Calibration | None,
    *,
    asked: Asked = "everything",
) -> tuple[CellPrediction, ...]:
    """Every cell of a question, in its order: in closed form, or by replay of a bundled trace."""
    row = MEMORY[trainer]
    cells = predict_cells(question, memory_limit, row.predictor, known, asked)
    return tuple(_with_step(question, cell) for cell in cells) if row.is_timed else cells


def predictor_of(question: Question, cell: Cell, usable_bytes: int) -> FormulaPredictor | None:
    """By the formula of the trainer that is asked about; None for one without a formula of its own:
    of its trials its configuration alone says which loss they have.
    """
    memory_limit = MemoryLimit(device_bytes=usable_bytes, host_bytes=question.host_memory_bytes)
    trainer = OURS if question.foreign is None else predicted_trainer(question.foreign.trainer)
    if trainer is None or REGISTRY[trainer].trains_by is not None:
        return None
    return MEMORY[trainer].by_formula(question, cell, memory_limit)


def _with_step(question: Question, cell: CellPrediction) -> CellPrediction:
    """A cell that our engine trains, with the time of a step where it fits, if only just."""
    may_fit = cell.capacity_tokens == 0 and cell.risk is not None
    length_tokens = cell.likely_edge_tokens if may_fit else cell.capacity_tokens
    if not length_tokens:
        return cell
    step = predicted_step(
        *(question.model.shape, cell.cell.settings, cell.cell.layout),
        length_tokens=length_tokens,
        device_name=question.device_name,
    )
    return msgspec.structs.replace(cell, step=step)


def calibration_of(
    question: Question,
    trainer: TrainerName,
    *,
    method: PredictionMethod = "formula",
    own: Sequence[Residual] = (),
) -> Calibration | None:
    """What a question's intervals are learned from; None where there are no trials, nor ``own``."""
    residuals = MEMORY[trainer].residuals
    bundled = residuals() if residuals else ()
    return calibrate(question, method, bundled=bundled, own=own) if bundled or own else None


def replayed_cells(question: Question, trainer: TrainerName, limit: MemoryLimit) -> int:
    """How many cells of a question are answered by replay: none beside a rollout."""
    replay, shape = MEMORY[trainer].replay, question.model.shape
    if replay is None or limit.rollout is not None:
        return 0
    return sum(replay.covers(shape, cell) for cell in question.cells)


def accuracy(
    question: Question, trainer: TrainerName, replayed: int, known: Calibration | None
) -> str:
    """What is known of the errors where ``replayed`` of the cells are answered by replay."""
    row, cells = MEMORY[trainer], question.cells
    alone = row.accuracy if known else f"{row.accuracy}; {_NO_INTERVAL}"
    if REGISTRY[trainer].trains_by is not None:
        alone = f"{known_runs(trainer, known.own_trials if known else 0)}; that step is {alone}"
    if cells[0].settings.lora is not None and row.of_adapters is not None:
        return f"{alone}; {row.of_adapters}"
    if row.replay is None or not replayed:
        return alone
    others = _NO_INTERVAL if replayed == len(cells) else f"the others {alone}"
    return f"{row.replay.accuracy}; {others}"


def by_replay(replayed: int, cells: int) -> str:
    """How many of so many cells a replay answered, in words."""
    if not replayed:
        return f"no cell by replay of a trace that comes with the package: all {cells} by formula"
    others = "" if replayed == cells else ", the others by formula"
    return f"{replayed} of {cells} cells by replay of a trace that comes with the package{others}"

"""Memory prediction by trainer: the constant ``MEMORY`` of each trainer's module, and its use.

The modules are in ``highwater/trainers``. ``predict_untraced`` makes a ``TrainerMemory.predictor``
for each cell; its ``FormulaPredictor.at`` calls the trainer's ``TrainerMemory.formula``. In
``trainers/highwater.py`` that is ``likely_footprint`` (``memory/formula/formula.py``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

from highwater.memory.capacity import CellPrediction, MemoryLimit
from highwater.memory.formula.constants import MachineConstants
from highwater.memory.formula.formula import Formula
from highwater.memory.interval.calibration import Calibration, calibrate
from highwater.memory.interval.residuals import PredictionMethod, Residual, study_residuals
from highwater.memory.predictor import (
    Extent,
    FormulaPredictor,
    Predictor,
    PredictorOf,
    predict_cells,
)
from highwater.model.model import ModelShape
from highwater.nouns.study import Cell, Question, Study
from highwater.nouns.trainer import (
    FOREIGN,
    IN_PLACE,
    OURS,
    REGISTRY,
    TRAINERS,
    TrainerName,
    TrainerParts,
    known_runs,
    predicted_trainer,
    trainer_title,
)
from highwater.nouns.trial import TrialSpec
from highwater.speed import predicted_step

UNTIMED = "no time of "
"""Beginning of a note that the time of a trainer's steps, and thus their cost, is unknown."""
_NO_INTERVAL = "nobody recorded its trials: a prediction without an interval"


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledReplay:
    """Traces that come with the package, for cells that are answered by replay."""

    covers: Callable[[ModelShape, Cell], bool]
    """Returns whether there is a trace for a model's cell."""
    predictor: PredictorOf
    """Makes the replay of such a cell."""
    accuracy: str
    """Sentence on the errors of such replays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """How one trainer's memory is predicted: its formula, its replays, its recorded trials."""

    formula: Formula
    """The trainer's memory in closed form."""
    accuracy: str
    """Sentence on the formula's errors, besides the intervals."""
    of_adapters: str | None = None
    """A further sentence on the formula's errors with LoRA."""
    residuals: Callable[[], tuple[Residual, ...]] | None = None
    """Returns residuals of recorded trials, to learn intervals from. None: no trials recorded."""
    learn: Callable[[Study, MachineConstants | None], tuple[Residual, ...]] | None = None
    """Returns residuals of a user's own study, given their constants. None: no trial runs here."""
    is_timed: bool = False
    """True if the time of the trainer's steps is predicted."""
    replay: BundledReplay | None = None
    """Traces that answer some cells; None: every cell is answered by the formula."""
    fixed_fields: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: {}
    """Returns the fields of ``Request`` that all the trainer's trials have, given those named."""
    refuse: Callable[[TrialSpec, ModelShape], None] | None = None
    """Raises UsageError for a trial that the trainer's file cannot express. None: it has all."""

    def by_formula(self, question: Question, cell: Cell, limit: MemoryLimit) -> FormulaPredictor:
        """Predictor by formula of a cell; each length is computed once."""
        return FormulaPredictor(cache(self.formula), question, cell, limit)

    def predictor(self, question: Question, cell: Cell, limit: MemoryLimit) -> Predictor:
        """Predictor of a cell by replay; by formula if it has no trace, or a rollout beside it."""
        if self.replay and not limit.rollout and self.replay.covers(question.model.shape, cell):
            return self.replay.predictor(question, cell, limit)
        return self.by_formula(question, cell, limit)


def _composed(memory: TrainerMemory, name: str) -> TrainerMemory:
    """How another trainer's step is predicted for ``name``, with ``name``'s own residuals."""
    taught = partial(study_residuals, trainer=cast(TrainerName, name), formula=memory.formula)
    return replace(memory, learn=taught if name in FOREIGN else None)


MEMORY: Mapping[TrainerName, TrainerMemory] = TrainerParts(TrainerName, "MEMORY", _composed)
"""How the memory of each trainer is predicted, by the name that ``--trainer`` takes: ``MEMORY`` of
its module, which is imported at the first use, for ``highwater`` ``trainers/highwater.py``."""


def refused_settings(trainer: TrainerName, named: Mapping[str, Any]) -> list[str]:
    """Names of the given settings that a trainer does not take, except at values it always has:
    its own, and those that leave everything on the GPU.
    """
    always = {**IN_PLACE, **MEMORY[trainer].fixed_fields(named)}
    refused = TRAINERS[trainer].refused(named)
    return [name for name in refused if name not in always or named[name] != always[name]]


def untimed(trainer: TrainerName) -> tuple[str, ...]:
    """Note that the time of a trainer's steps is not predicted; none if it is."""
    leave = f"leave `--trainer {trainer}` out for this engine's"
    said = f"{UNTIMED}{trainer_title(trainer)}'s step is predicted: {leave}"
    return () if MEMORY[trainer].is_timed else (said,)


def predict_untraced(
    question: Question,
    memory_limit: MemoryLimit,
    trainer: TrainerName,
    known: Calibration | None,
    *,
    extent: Extent = "everything",
) -> tuple[CellPrediction, ...]:
    """Predict every cell of a question, in its order, without a new trace: by the trainer's closed
    form, or by replay of a trace that comes with the package.
    """
    memory = MEMORY[trainer]
    cells = predict_cells(question, memory_limit, memory.predictor, known, extent)
    return tuple(_with_step(question, cell) for cell in cells) if memory.is_timed else cells


def formula_of_trials(question: Question, cell: Cell, usable_bytes: int) -> FormulaPredictor | None:
    """The trainer's formula predictor; None if only its configuration tells which loss it has."""
    memory_limit = MemoryLimit(device_bytes=usable_bytes, host_bytes=question.host_memory_bytes)
    trainer = OURS if question.foreign is None else predicted_trainer(question.foreign.trainer)
    if trainer is None or REGISTRY[trainer].trains_by is not None:
        return None
    return MEMORY[trainer].by_formula(question, cell, memory_limit)


def _with_step(question: Question, cell: CellPrediction) -> CellPrediction:
    """The cell with the time of a step, if a length fits or may fit."""
    may_fit = cell.capacity_tokens == 0 and cell.risk is not None
    length_tokens = cell.likely_edge_tokens if may_fit else cell.capacity_tokens
    if not length_tokens:
        return cell
    step = predicted_step(
        question.model.shape,
        cell.cell.settings,
        cell.cell.layout,
        length_tokens=length_tokens,
        device_name=question.device_name,
        micro_batches=question.micro_batches if cell.cell.settings.accumulates else 1,
    )
    return cell.replace(step=step)


def calibration_of(
    question: Question,
    trainer: TrainerName,
    *,
    method: PredictionMethod = "formula",
    own: Sequence[Residual] = (),
) -> Calibration | None:
    """Learn a question's intervals from recorded trials and ``own`` residuals; None without any."""
    residuals = MEMORY[trainer].residuals
    bundled = residuals() if residuals else ()
    return calibrate(question, method, bundled=bundled, own=own) if bundled or own else None


def replayed_cells(question: Question, trainer: TrainerName, limit: MemoryLimit) -> int:
    """Number of a question's cells that are answered by replay; 0 if there is a rollout."""
    replay, shape = MEMORY[trainer].replay, question.model.shape
    if replay is None or limit.rollout is not None:
        return 0
    return sum(replay.covers(shape, cell) for cell in question.cells)


def accuracy(
    question: Question, trainer: TrainerName, replayed: int, known: Calibration | None
) -> str:
    """Sentence on how far predictions were off; ``replayed`` cells were answered by replay."""
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
    """Note on the number of cells, of ``cells``, that were answered by replay."""
    if not replayed:
        return f"no cell by replay of a trace that comes with the package: all {cells} by formula"
    others = "" if replayed == cells else ", the others by formula"
    return f"{replayed} of {cells} cells by replay of a trace that comes with the package{others}"

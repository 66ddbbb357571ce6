"""Score: a trainer's predictions beside a table of known capacities, in steps of its grid."""

from collections.abc import Callable

from highwater.errors import UsageError
from highwater.prediction.capacity import CellPrediction, Room, predict_cells
from highwater.prediction.shipped import predict_trinity
from highwater.spec.codec import Noun
from highwater.spec.events import Trainer
from highwater.spec.published import CapacityTable, rung_name
from highwater.spec.study import Cell, Question

_Predict = Callable[[Question, Room], tuple[CellPrediction, ...]]


class SettingsScore(Noun, frozen=True, kw_only=True):
    """How predictions of one rung of a known table compare with it."""

    settings: str
    """As the table calls the rung."""
    cells: int
    exact: int
    within_one_step: int
    """Of the grid, the exact ones included."""


class Miss(Noun, frozen=True, kw_only=True):
    """A cell whose prediction is not what the table has."""

    settings: str
    device_name: str
    model_name: str
    cell: Cell
    known_tokens: int
    predicted_tokens: int
    steps_off: int
    """Of the grid; above 0: predicted too long."""


class Score(Noun, frozen=True, kw_only=True):
    """A trainer's predictions beside a table of known capacities."""

    per_settings: tuple[SettingsScore, ...]
    misses: tuple[Miss, ...]
    replayed_cells: int = 0
    """Cells that were answered by replay of a trace; the others by the closed form."""
    closed_form: tuple[SettingsScore, ...] = ()
    """Where cells were replayed: what the closed form alone has."""


def score(table: CapacityTable, trainer: Trainer) -> Score:
    """Predict every cell of a table, without intervals, and compare. Raises UsageError for a GPU whose memory nobody has read."""
    if trainer == "highwater":
        return _score(table, lambda question, room: predict_cells(question, room, trainer))
    alone = _score(table, lambda question, room: predict_cells(question, room, trainer))
    found = _score(table, predict_trinity)
    return Score(
        per_settings=found.per_settings,
        misses=found.misses,
        replayed_cells=found.replayed_cells,
        closed_form=alone.per_settings if found.replayed_cells else (),
    )


def _score(table: CapacityTable, predict: _Predict) -> Score:
    steps: dict[str, list[int]] = {}
    misses: list[Miss] = []
    replayed_cells = 0
    for question in table.questions:
        if question.device_total_bytes is None:
            raise UsageError(
                f"the memory of {question.device_name} is not in the catalog", hint="`highwater predict --help` lists its GPUs"
            )
        for predicted in predict(question, Room(device_bytes=question.device_total_bytes)):
            known_tokens = table.capacity_tokens[question.model.name, predicted.cell]
            off = question.grid.index_at_most(predicted.capacity_tokens) - question.grid.index_at_most(known_tokens)
            name = rung_name(predicted.cell.settings)
            steps.setdefault(name, []).append(off)
            replayed_cells += predicted.replayed is not None
            if off:
                misses.append(_miss(name, question, predicted, known_tokens, off))
    scores = (
        SettingsScore(settings=name, cells=len(offs), exact=offs.count(0), within_one_step=sum(abs(off) <= 1 for off in offs))
        for name, offs in steps.items()
    )
    return Score(per_settings=tuple(scores), misses=tuple(misses), replayed_cells=replayed_cells)


def _miss(name: str, question: Question, predicted: CellPrediction, known_tokens: int, off: int) -> Miss:
    return Miss(
        settings=name,
        device_name=question.device_name,
        model_name=question.model.name,
        cell=predicted.cell,
        known_tokens=known_tokens,
        predicted_tokens=predicted.capacity_tokens,
        steps_off=off,
    )

"""A trainer's predictions beside a table of known capacities, in steps of its grid."""

from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from highwater.errors import UsageError
from highwater.memory.capacity import CellPrediction, MemoryLimit
from highwater.memory.predictor import predict_cells
from highwater.memory.question import memory_limit_of
from highwater.memory.trainers import MEMORY, predict_by_formula
from highwater.nouns.capacities import CapacityTable, rung_name
from highwater.nouns.cluster import Cluster, own_memory, refuse_small_gpu
from highwater.nouns.codec import Record
from highwater.nouns.study import Cell, Question
from highwater.nouns.trainer import OURS, TrainerName

_Predict = Callable[[Question, MemoryLimit], tuple[CellPrediction, ...]]


class SettingsAccuracy(Record, frozen=True, kw_only=True):
    """How predictions of one rung of a known table compare with it."""

    settings: str
    """The rung, as the table calls it."""
    cells: int
    exact: int
    within_one_step: int
    """Cells predicted within one step of the grid, the exact ones included."""


class Miss(Record, frozen=True, kw_only=True):
    """A cell whose prediction is not what the table has."""

    settings: str
    device_name: str
    model_name: str
    cell: Cell
    known_tokens: int
    predicted_tokens: int
    steps_off: int
    """Steps of the grid from the table's length to the predicted one; above 0: too long."""


class TableAccuracy(Record, frozen=True, kw_only=True):
    """A trainer's predictions beside a table of known capacities."""

    per_settings: tuple[SettingsAccuracy, ...]
    misses: tuple[Miss, ...]
    trainer: TrainerName = OURS
    replayed_cells: int = 0
    """Cells that were answered by replay of a trace."""
    formula_cells: int = 0
    """Cells that were answered by the closed form: all others."""
    closed_form: tuple[SettingsAccuracy, ...] = ()
    """Scores of the closed form alone, where cells were replayed; empty where none was."""


def table_accuracy(
    table: CapacityTable, trainer: TrainerName, memory_limits: Mapping[str, MemoryLimit]
) -> TableAccuracy:
    """Predict every cell of a table, without intervals, and compare; limits by kind of GPU."""
    row = MEMORY[trainer]
    by_formula = partial(predict_cells, predictor_of=row.by_formula)
    alone = _accuracy(table, trainer, memory_limits, by_formula)
    if row.replay is None:
        return alone
    by_replay = partial(predict_by_formula, trainer=trainer, known=None)
    found = _accuracy(table, trainer, memory_limits, by_replay)
    return msgspec.structs.replace(
        found, closed_form=alone.per_settings if found.replayed_cells else ()
    )


def memory_limits_of(
    table: CapacityTable,
    *,
    gpu_memory_bytes: int | None = None,
    host_memory: str | int | None = None,
    reserved: str | int = 0,
) -> dict[str, MemoryLimit]:
    """The memory of each kind of GPU in a table; a named one is of the kind that no catalog has, or
    of the only kind. Raises UsageError where it is unknown, or one would stand for several.
    """
    memories = {question.device_name: question.device_total_bytes for question in table.questions}
    if gpu_memory_bytes is not None:
        refuse_small_gpu(gpu_memory_bytes)
        meant = [name for name, memory in memories.items() if memory is None] or list(memories)
        if len(meant) > 1:
            raise UsageError(
                f"one memory for {' and '.join(meant)}", hint="give a CSV for each kind of GPU"
            )
        memories[meant[0]] = gpu_memory_bytes
    memory_limits: dict[str, MemoryLimit] = {}
    for name, memory in memories.items():
        if memory is None:
            hint = f"add {own_memory(name)}; `highwater gpus` lists the kinds that need none"
            raise UsageError(f"the memory of {name} is not in the catalog", hint=hint)
        where = Cluster(gpus=1, device_name=name, device_bytes=memory)
        memory_limits[name] = memory_limit_of(
            where, host_memory=host_memory, reserved=reserved, knows_host=False
        )
    return memory_limits


def _accuracy(
    table: CapacityTable,
    trainer: TrainerName,
    memory_limits: Mapping[str, MemoryLimit],
    predict: _Predict,
) -> TableAccuracy:
    steps: dict[str, list[int]] = {}
    misses: list[Miss] = []
    replayed_cells = 0
    for question in table.questions:
        index_at_most = question.grid.index_at_most
        for predicted in predict(question, memory_limits[question.device_name]):
            known_tokens = table.known_tokens(question, predicted.cell)
            off = index_at_most(predicted.capacity_tokens) - index_at_most(known_tokens)
            name = rung_name(predicted.cell.settings)
            steps.setdefault(name, []).append(off)
            replayed_cells += predicted.replayed is not None
            if off:
                misses.append(
                    Miss(
                        settings=name,
                        device_name=question.device_name,
                        model_name=question.model.name,
                        cell=predicted.cell,
                        known_tokens=known_tokens,
                        predicted_tokens=predicted.capacity_tokens,
                        steps_off=off,
                    )
                )
    scores = (
        SettingsAccuracy(
            settings=name,
            cells=len(offs),
            exact=offs.count(0),
            within_one_step=sum(abs(off) <= 1 for off in offs),
        )
        for name, offs in steps.items()
    )
    return TableAccuracy(
        per_settings=tuple(scores),
        misses=tuple(misses),
        trainer=trainer,
        replayed_cells=replayed_cells,
        formula_cells=sum(map(len, steps.values())) - replayed_cells,
    )

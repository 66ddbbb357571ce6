"""Predictions for a trainer beside a table of its known capacities, in steps of the table's grid.

``python benchmarks/table_accuracy.py tests/data/published_capacity_a100_80gb.csv`` (no GPU, no
trace; half a minute on one CPU core) predicts every known cell of a table, of Trinity-RFT's trainer
or another ``--trainer``, counts those that are exact and within one step, and names each that
differs. ``highwater/memory/capacity_table.py`` says which columns a table has.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from highwater.errors import UsageError
from highwater.memory.capacity import CellPrediction, MemoryLimit
from highwater.memory.capacity_table import PUBLISHED_TRAINER, rung_name, table_capacities
from highwater.memory.predictor import predict_cells
from highwater.memory.trainers import MEMORY, by_replay, predict_untraced
from highwater.model.model import load_model
from highwater.nouns.codec import Record
from highwater.nouns.hardware import gpu_catalog
from highwater.nouns.study import Cell, Question, counted_ranks, usual_grid
from highwater.nouns.trainer import OURS, TRAINERS, TrainerName
from highwater.pages.table import TextTable, plain_table, table_of
from highwater.units import format_tokens


def main() -> None:
    """Print how many cells of a table are predicted right, and those that are not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", type=Path, help="CSV file of known capacities")
    parser.add_argument("--trainer", choices=TRAINERS, default=PUBLISHED_TRAINER)
    arguments = parser.parse_args()
    found = table_accuracy(read_capacity_table(arguments.table), arguments.trainer)
    print(plain_table(accuracy_table(found, name=f"{arguments.table}, {arguments.trainer}")))


class CapacityTable(Record, frozen=True, kw_only=True):
    """A table of known capacities, in tokens: for each GPU kind and model, those of its cells."""

    questions: tuple[Question, ...]
    """One question for each GPU and model, its cells in the table's order."""
    capacity_tokens: dict[tuple[str, str, Cell], int]
    """Capacities by GPU, model as the table names it, and cell; 0 if nothing fits."""

    def known_tokens(self, question: Question, cell: Cell) -> int:
        """The longest length in tokens that the table has for this cell."""
        return self.capacity_tokens[question.device_name, question.model.name, cell]


def read_capacity_table(path: Path) -> CapacityTable:
    """Read the known capacities of a CSV file, for GPUs and models of the catalog. Raises the
    errors of ``table_capacities``.
    """
    known = [each for each in table_capacities(path) if each.does_not_fit_tokens is not None]
    cells: dict[tuple[str, str], list[Cell]] = {}
    for each in known:
        cells.setdefault((each.device_name, each.model_name), []).append(each.cell)
    return CapacityTable(
        questions=tuple(_question(gpu, model, own) for (gpu, model), own in cells.items()),
        capacity_tokens={
            (each.device_name, each.model_name, each.cell): each.capacity_tokens for each in known
        },
    )


def _question(gpu: str, model_name: str, cells: Sequence[Cell]) -> Question:
    """The question for one GPU and model; the model keeps the table's name, which may be a path."""
    model = load_model(model_name).replace(name=model_name)
    return Question(
        model=model,
        device="cuda",
        device_name=gpu,
        device_total_bytes=next(
            (kind.usable_bytes for kind in gpu_catalog() if kind.name == gpu), None
        ),
        memory_budget_bytes=None,
        cells=tuple(cells),
        grid=usual_grid(model.shape.native_length_tokens),
        simulated=True,
    )


def memory_limits_of(table: CapacityTable) -> dict[str, MemoryLimit]:
    """The memory of each kind of GPU in a table, by name, and hosts without bound. Raises
    UsageError for a kind that is not in the catalog.
    """
    limits: dict[str, MemoryLimit] = {}
    for question in table.questions:
        name, memory = question.device_name, question.device_total_bytes
        if memory is None:
            hint = "`highwater gpus` lists the kinds that are"
            raise UsageError(f"the memory of {name} is not in the catalog", hint=hint)
        limits[name] = MemoryLimit(device_bytes=memory)
    return limits


class SettingsAccuracy(Record, frozen=True, kw_only=True):
    """How many cells of a table with these settings were predicted right, or a step off."""

    settings: str
    """Name of the rung in the table."""
    cells: int
    exact: int
    within_one_step: int
    """Cells predicted within one step of the grid, the exact ones included."""


class Miss(Record, frozen=True, kw_only=True):
    """A cell whose predicted capacity differs from the table's."""

    settings: str
    device_name: str
    model_name: str
    cell: Cell
    known_tokens: int
    predicted_tokens: int
    steps_off: int
    """Steps of the grid from the table's length to the predicted one; above 0: too long."""


class TableAccuracy(Record, frozen=True, kw_only=True):
    """A trainer's predictions compared with a table of known capacities."""

    per_settings: tuple[SettingsAccuracy, ...]
    misses: tuple[Miss, ...]
    trainer: TrainerName = OURS
    replayed_cells: int = 0
    """Cells that were answered by replay of a trace."""
    formula_cells: int = 0
    """Cells that were answered by the closed form: all but ``replayed_cells``."""
    closed_form: tuple[SettingsAccuracy, ...] = ()
    """Scores of the closed form alone, for all cells, if any was replayed; else empty."""


_Predict = Callable[[Question, MemoryLimit], tuple[CellPrediction, ...]]


def table_accuracy(table: CapacityTable, trainer: TrainerName) -> TableAccuracy:
    """Predict the longest length of every cell in a table, without intervals, and count how many
    agree with the table.
    """
    memory_limits, row = memory_limits_of(table), MEMORY[trainer]
    by_formula = partial(predict_cells, make_predictor=row.by_formula)
    alone = _accuracy(table, trainer, memory_limits, by_formula)
    if row.replay is None:
        return alone
    replayed = partial(predict_untraced, trainer=trainer, known=None)
    found = _accuracy(table, trainer, memory_limits, replayed)
    return found.replace(closed_form=alone.per_settings if found.replayed_cells else ())


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


def accuracy_table(found: TableAccuracy, *, name: str) -> TextTable:
    """Table of hits and near hits for each rung of a known table; footnotes name each miss."""
    closed = {row.settings: row for row in found.closed_form}
    cells = found.replayed_cells + found.formula_cells
    is_replayed = MEMORY[found.trainer].replay is not None
    notes = (by_replay(found.replayed_cells, cells),) if is_replayed else ()
    return table_of(
        f"predicted against {name}",
        found.per_settings,
        ("settings", "settings"),
        ("cells", "cells"),
        ("exact", "exact"),
        ("within one step", "within_one_step"),
        ("closed form: exact", lambda row: str(closed[row.settings].exact)) if closed else None,
        ("within one step", lambda row: str(closed[row.settings].within_one_step))
        if closed
        else None,
        footnotes=(*notes, *map(_missed, found.misses)),
        names=1,
    )


def _missed(miss: Miss) -> str:
    layout = miss.cell.layout
    return (
        f"{miss.settings}, {miss.device_name}, {miss.model_name}, "
        f"{counted_ranks(layout.gpus, 'cuda')}{layout.suffix}: known "
        f"{format_tokens(miss.known_tokens)}, predicted {format_tokens(miss.predicted_tokens)}"
    )


if __name__ == "__main__":
    main()

"""Tables of known capacities, and a trainer's predictions compared with a table, in steps of its
grid.

A table is a CSV with the columns gpu, settings, gpus, sp, model, max_model_len (0: nothing fits;
empty: unknown); other columns are ignored. ``read_capacity_table`` leaves unknown capacities out;
``table_capacities`` returns them, without a ``does_not_fit_tokens``.
"""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from highwater.errors import UsageError
from highwater.memory.capacity import CellPrediction, MemoryLimit
from highwater.memory.predictor import predict_cells
from highwater.memory.question import memory_limit_of
from highwater.memory.trainers import MEMORY, predict_untraced
from highwater.model.model import Model, load_model
from highwater.nouns.capacities import Capacity
from highwater.nouns.cluster import Cluster, own_memory, refuse_small_gpu
from highwater.nouns.codec import SETTINGS_BYTES, Record, read_file
from highwater.nouns.hardware import gpu_catalog
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell, Question, counted_ranks, usual_grid
from highwater.nouns.trainer import OURS, TrainerName

_NOTHING_SET = Settings(
    strategy="fsdp", objective="grpo", entropy="full", sequences_per_micro_batch=2, save_hf="last"
)
_ENV = _NOTHING_SET.replace(allocator="expandable")
_OFFLOAD = _ENV.replace(strategy="fsdp2", offload=True)
PUBLISHED_TRAINER: TrainerName = "trinity"
"""The trainer whose capacities are in the published tables."""
PUBLISHED_SETTINGS: Mapping[str, Settings] = {
    "vanilla": _NOTHING_SET,
    "env": _ENV,
    "env+offload": _OFFLOAD,
    "env+offload+never": _OFFLOAD.replace(save_hf="never"),
}
"""The settings of each rung by its published name: Trinity-RFT's script and guide."""

_COLUMNS = ("gpu", "settings", "gpus", "sp", "model", "max_model_len")

_LONGEST_TOKENS = 16 * 1024**2
"""Longest capacity that a table may have: a guide page has a row for each step up to it."""


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
    """Read a CSV file of capacities, for GPUs and models of the catalog. Raises UsageError for a
    file that is no such table, ModelError for an unknown model.
    """
    rows = [row for row in _read_rows(path) if row.tokens is not None]
    capacity_tokens = {row.place: row.tokens for row in rows if row.tokens is not None}
    if not rows:
        raise _no_table(path, "it has no row with a capacity")
    cells: dict[tuple[str, str], list[Cell]] = {}
    for row in rows:
        cells.setdefault((row.device_name, row.model_name), []).append(row.cell)
    questions = tuple(_question(gpu, model, own) for (gpu, model), own in cells.items())
    return CapacityTable(questions=questions, capacity_tokens=capacity_tokens)


def table_capacities(path: Path) -> tuple[Capacity, ...]:
    """Capacities in a CSV file, unknown ones too. The next length of the published grid counts as
    not fitting: the published search stopped there. Raises the errors of ``read_capacity_table``.
    """
    rows = _read_rows(path)
    models = {name: load_model(name) for name in dict.fromkeys(row.model_name for row in rows)}
    return tuple(_capacity(row, models[row.model_name], path) for row in rows)


def rung_name(settings: Settings) -> str:
    """Name of these settings in the published tables. Raises StopIteration without a name."""
    return next(name for name, known in PUBLISHED_SETTINGS.items() if known == settings)


class _Row(NamedTuple):
    device_name: str
    model_name: str
    cell: Cell
    tokens: int | None
    """Capacity; None if unknown."""
    line: int
    """Number of the row's line in the file."""

    @property
    def place(self) -> tuple[str, str, Cell]:
        """Key of the row: GPU, model and cell."""
        return self.device_name, self.model_name, self.cell


def _capacity(row: _Row, model: Model, path: Path) -> Capacity:
    native_tokens = model.shape.native_length_tokens
    grid = usual_grid(native_tokens)
    next_tokens = None if row.tokens is None else grid.length(grid.index_at_most(row.tokens) + 1)
    return Capacity(
        model_name=row.model_name,
        config_digest=model.config_digest,
        native_length_tokens=native_tokens,
        device_name=row.device_name,
        cell=row.cell,
        capacity_tokens=row.tokens or 0,
        does_not_fit_tokens=next_tokens,
        source="published",
        trainer=PUBLISHED_TRAINER,
        found_in=str(path),
    )


def _read_rows(path: Path) -> list[_Row]:
    """Read every row of a table. Raises UsageError for another file, and for one without rows."""
    try:
        text = read_file(path, most_bytes=SETTINGS_BYTES).decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=""))
        missing = [column for column in _COLUMNS if column not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"it has no column {', '.join(missing)}")
        rows = [_row(row, reader.line_num) for row in reader]
    except OSError as error:
        problem = f"the table {path} cannot be read: {error.strerror}"
        raise UsageError(
            problem, hint=f"name a CSV with the columns {', '.join(_COLUMNS)}"
        ) from error
    except (ValueError, csv.Error) as error:
        raise _no_table(path, str(error)) from error
    if not rows:
        raise _no_table(path, "it has no row")
    seen: dict[tuple[str, str, Cell], _Row] = {}
    for row in (row for row in rows if row.tokens is not None):
        before = seen.setdefault(row.place, row)
        if before is not row:
            degrees = f"{counted_ranks(row.cell.layout.gpus, 'cuda')}{row.cell.layout.suffix}"
            place = (
                f"{row.device_name}, {rung_name(row.cell.settings)}, {degrees}, {row.model_name}"
            )
            problem = (
                f"{path}: lines {before.line} and {row.line} are both about {place}: "
                f"{before.tokens} and {row.tokens}"
            )
            raise UsageError(problem, hint="keep one of them")
    return rows


def _row(row: Mapping[str, str | None], line: int) -> _Row:
    """Read one row. Raises ValueError for an invalid row, UsageError for an impossible degree."""
    device_name, rung, gpus, sp, model_name, tokens = (row[column] for column in _COLUMNS)
    if not device_name or not model_name or gpus is None or sp is None:
        raise ValueError(f"line {line} lacks a gpu, a count, a degree or a model")
    if rung is None or rung not in PUBLISHED_SETTINGS:
        raise ValueError(
            f"line {line}: settings {rung!r} are none of {', '.join(PUBLISHED_SETTINGS)}"
        )
    known = _whole(tokens, "max_model_len", line) if tokens and tokens.strip() else None
    if known is not None and not 0 <= known <= _LONGEST_TOKENS:
        raise ValueError(f"line {line} has a capacity of {known}")
    layout = Layout(gpus=_whole(gpus, "gpus", line), ulysses_degree=_whole(sp, "sp", line))
    cell = Cell(layout=layout, settings=PUBLISHED_SETTINGS[rung])
    return _Row(device_name=device_name, model_name=model_name, cell=cell, tokens=known, line=line)


def _whole(text: str, column: str, line: int) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"line {line}: {column} {text!r} is no whole number") from error


def _no_table(path: Path, why: str) -> UsageError:
    return UsageError(
        f"{path} is not a capacity table: {why}",
        hint=f"give a CSV with the columns {', '.join(_COLUMNS)}",
    )


def _question(gpu: str, model_name: str, cells: Sequence[Cell]) -> Question:
    """The question for one GPU and model; the model keeps the table's name, which may be a path."""
    model = load_model(model_name).replace(name=model_name)
    native_tokens = model.shape.native_length_tokens
    return Question(
        model=model,
        device="cuda",
        device_name=gpu,
        device_total_bytes=next(
            (kind.usable_bytes for kind in gpu_catalog() if kind.name == gpu), None
        ),
        memory_budget_bytes=None,
        cells=tuple(cells),
        grid=usual_grid(native_tokens),
        simulated=True,
    )


_Predict = Callable[[Question, MemoryLimit], tuple[CellPrediction, ...]]


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


def table_accuracy(
    table: CapacityTable, trainer: TrainerName, memory_limits: Mapping[str, MemoryLimit]
) -> TableAccuracy:
    """Predict the longest length of every cell in a table, without intervals, and count how many
    agree with the table. ``memory_limits``: memory of each kind of GPU, by its name.
    """
    row = MEMORY[trainer]
    by_formula = partial(predict_cells, make_predictor=row.by_formula)
    alone = _accuracy(table, trainer, memory_limits, by_formula)
    if row.replay is None:
        return alone
    by_replay = partial(predict_untraced, trainer=trainer, known=None)
    found = _accuracy(table, trainer, memory_limits, by_replay)
    return found.replace(closed_form=alone.per_settings if found.replayed_cells else ())


def memory_limits_of(
    table: CapacityTable,
    *,
    gpu_memory_bytes: int | None = None,
    host_memory: str | int | None = None,
    reserved: str | int = 0,
) -> dict[str, MemoryLimit]:
    """The memory of each kind of GPU in a table, by name. ``gpu_memory_bytes``: of the kind that is
    not in the catalog, or the only kind. Raises UsageError for unknown memory or several kinds.
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

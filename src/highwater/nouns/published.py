"""Published: capacity tables of other trainers, CSV to questions and answers or to capacities, and
what they call a rung.

A table is a CSV with the columns gpu, settings, gpus, sp, model, max_model_len (0: nothing fits;
empty: unknown); others are not read. As questions, cells that are unknown are left out; as
capacities they are said to be unknown.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from highwater.errors import UsageError
from highwater.model.model import Model, load_model
from highwater.nouns.capacities import Capacity
from highwater.nouns.codec import Record
from highwater.nouns.files import SETTINGS_BYTES, read_file
from highwater.nouns.hardware import gpu_catalog
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.study import PUBLISHED_STEP_TOKENS, Cell, Grid, Question, counted_ranks
from highwater.nouns.trainer import TrainerName

_VANILLA = Settings(
    strategy="fsdp", objective="grpo", entropy="full", sequences_per_micro_batch=2, save_hf="last"
)
_ENV = msgspec.structs.replace(_VANILLA, allocator="expandable")
_OFFLOAD = msgspec.structs.replace(_ENV, strategy="fsdp2", offload=True)
PUBLISHED_TRAINER: TrainerName = "trinity"
"""The trainer whose capacities the published tables have."""
PUBLISHED_SETTINGS: Mapping[str, Settings] = {
    "vanilla": _VANILLA,
    "env": _ENV,
    "env+offload": _OFFLOAD,
    "env+offload+never": msgspec.structs.replace(_OFFLOAD, save_hf="never"),
}
"""The settings of each rung, by the published tables' name for it. Source: Trinity-RFT's
length-test script and its guide."""

_COLUMNS = ("gpu", "settings", "gpus", "sp", "model", "max_model_len")
_CEILING_TOKENS = 1024**2
"""Longer than any published capacity: a table says that something failed above each."""

_LONGEST_TOKENS = 16 * 1024**2
"""Longest capacity that a table may hold: a guide has a row for each step up to it."""


class CapacityTable(Record, frozen=True, kw_only=True):
    """Known capacities, as questions and as their answers."""

    questions: tuple[Question, ...]
    """One question for each GPU and model, its cells in the table's order."""
    capacity_tokens: dict[tuple[str, str, Cell], int]
    """Capacities by GPU, model as the table names it, and cell; 0 where nothing fits."""

    def known_tokens(self, question: Question, cell: Cell) -> int:
        """The capacity of a cell of one of the questions."""
        return self.capacity_tokens[question.device_name, question.model.name, cell]


def read_capacity_table(path: Path) -> CapacityTable:
    """The capacity table in a CSV file, for GPUs and models of the catalog.

    Raises UsageError for a file that is no such table, ModelError for a model that is not known.
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
    """What the capacity table in a CSV file says of each cell, in its order, the unknown cells too.
    The next length of the published grid is known not to fit: that is where the published search
    stopped. Errors as for ``read_capacity_table``.
    """
    rows = _read_rows(path)
    models = {name: load_model(name) for name in dict.fromkeys(row.model_name for row in rows)}
    return tuple(_capacity(row, models[row.model_name], path) for row in rows)


def published_grid(native_length_tokens: int) -> Grid:
    """The lengths of the published tables, for a model of this native length."""
    return Grid(
        start_tokens=PUBLISHED_STEP_TOKENS,
        step_tokens=PUBLISHED_STEP_TOKENS,
        native_length_tokens=native_length_tokens,
        beyond_step_tokens=max(1, native_length_tokens // 4),
        max_tokens=_CEILING_TOKENS,
    )


def rung_name(settings: Settings) -> str:
    """What the published tables call these settings. Raises StopIteration for others."""
    return next(name for name, known in PUBLISHED_SETTINGS.items() if known == settings)


class _Row(NamedTuple):
    """One row of a table."""

    device_name: str
    model_name: str
    cell: Cell
    tokens: int | None
    """The capacity; None where it is unknown."""
    line: int
    """The line of the file that the row is on."""

    @property
    def place(self) -> tuple[str, str, Cell]:
        """The GPU, the model and the cell that the row is about."""
        return self.device_name, self.model_name, self.cell


def _capacity(row: _Row, model: Model, path: Path) -> Capacity:
    native_tokens = model.shape.native_length_tokens
    grid = published_grid(native_tokens)
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
    """Every row; raises UsageError for a file that is no such table, or has none."""
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
    _refuse_twice(path, rows)
    return rows


def _refuse_twice(path: Path, rows: Sequence[_Row]) -> None:
    """Raise UsageError for two rows that know a capacity of one place."""
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


def _row(row: Mapping[str, str | None], line: int) -> _Row:
    """One row of the file; raises ValueError for none, UsageError for a degree that cannot be."""
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
    """The question about the model as the table names it, which may be a directory."""
    model = msgspec.structs.replace(load_model(model_name), name=model_name)
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
        grid=published_grid(native_tokens),
        simulated=True,
    )

"""Tables of known capacities: CSV files with the columns gpu, settings, gpus, sp, model,
max_model_len (0: nothing fits; empty: unknown); other columns are ignored.
"""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from highwater.errors import UsageError
from highwater.model.model import Model, load_model
from highwater.nouns.capacities import Capacity
from highwater.nouns.codec import SETTINGS_BYTES, read_file
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell, counted_ranks, usual_grid
from highwater.nouns.trainer import TrainerName

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


def table_capacities(path: Path) -> tuple[Capacity, ...]:
    """Capacities in a CSV file; unknown ones too, without a ``does_not_fit_tokens``. Else that is
    the next length of the published grid: the published search stopped there. Raises UsageError for
    a file that is no such table, ModelError for an unknown model.
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

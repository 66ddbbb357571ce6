"""Published: capacity tables of other trainers, CSV to questions and answers, and what they call a rung.

A table is a CSV with the columns gpu, settings, gpus, sp, model, max_model_len (0: nothing fits; empty: unknown, left out).
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from highwater.errors import UsageError
from highwater.spec.codec import Noun
from highwater.spec.hardware import gpu_catalog
from highwater.spec.layout import Layout
from highwater.spec.model import load_model
from highwater.spec.settings import Settings
from highwater.spec.study import PUBLISHED_STEP_TOKENS, Cell, Grid, Question

_VANILLA = Settings(strategy="fsdp", objective="grpo", entropy="full", sequences_per_micro_batch=2, save_hf="last")
_ENV = msgspec.structs.replace(_VANILLA, allocator="expandable")
_OFFLOAD = msgspec.structs.replace(_ENV, strategy="fsdp2", offload=True)
PUBLISHED_SETTINGS: Mapping[str, Settings] = {
    "vanilla": _VANILLA,
    "env": _ENV,
    "env+offload": _OFFLOAD,
    "env+offload+never": msgspec.structs.replace(_OFFLOAD, save_hf="never"),
}
"""What the published tables call a rung. Source: Trinity-RFT's length-test script and its guide."""

_COLUMNS = ("gpu", "settings", "gpus", "sp", "model", "max_model_len")
_CEILING_TOKENS = 1024**2
"""Longer than any published capacity: a table says that something failed above each."""


class CapacityTable(Noun, frozen=True, kw_only=True):
    """Known capacities, as questions and as their answers."""

    questions: tuple[Question, ...]
    """One for each GPU and model, cells in the table's order."""
    capacity_tokens: dict[tuple[str, Cell], int]
    """By model name and cell; 0 where nothing fits."""


def read_capacity_table(path: Path) -> CapacityTable:
    """The capacity table in a CSV file, for GPUs and models of the catalog.

    Raises UsageError for a file that is no such table, ModelError for a model that is not known.
    """
    try:
        rows = _read_rows(path)
        capacity_tokens = {(row["model"], _cell(row)): int(row["max_model_len"]) for row in rows}
    except (OSError, TypeError, ValueError, csv.Error) as error:
        hint = f"give a CSV with the columns {', '.join(_COLUMNS)}"
        raise UsageError(f"{path} is not a capacity table: {error}", hint=hint) from error
    cells: dict[tuple[str, str], list[Cell]] = {}
    for row in rows:
        cells.setdefault((row["gpu"], row["model"]), []).append(_cell(row))
    questions = tuple(_question(gpu, model, own) for (gpu, model), own in cells.items())
    return CapacityTable(questions=questions, capacity_tokens=capacity_tokens)


def rung_name(settings: Settings) -> str:
    """What the published tables call these settings. Raises StopIteration for others."""
    return next(name for name, known in PUBLISHED_SETTINGS.items() if known == settings)


def _read_rows(path: Path) -> list[dict[str, str]]:
    """The rows whose capacity is known. Raises ValueError for a file that has none."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = [column for column in _COLUMNS if column not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"it has no column {', '.join(missing)}")
        rows = [row for row in reader if row["max_model_len"]]
    if not rows:
        raise ValueError("it has no row with a capacity")
    return rows


def _cell(row: Mapping[str, str]) -> Cell:
    if row["settings"] not in PUBLISHED_SETTINGS:
        raise ValueError(f"settings {row['settings']!r} are none of {', '.join(PUBLISHED_SETTINGS)}")
    layout = Layout(gpus=int(row["gpus"]), ulysses_degree=int(row["sp"]))
    return Cell(layout=layout, settings=PUBLISHED_SETTINGS[row["settings"]])


def _question(gpu: str, model_name: str, cells: Sequence[Cell]) -> Question:
    model = load_model(model_name)
    native_tokens = model.shape.native_length_tokens
    return Question(
        model=model,
        device="cuda",
        device_name=gpu,
        device_total_bytes=next((kind.usable_bytes for kind in gpu_catalog() if kind.name == gpu), None),
        memory_budget_bytes=None,
        cells=tuple(cells),
        grid=Grid(
            start_tokens=PUBLISHED_STEP_TOKENS,
            step_tokens=PUBLISHED_STEP_TOKENS,
            native_length_tokens=native_tokens,
            beyond_step_tokens=native_tokens // 4,
            max_tokens=_CEILING_TOKENS,
        ),
        simulated=True,
    )

"""Compare: how many trials each search method needs for the same answers, on capacity tables that are known.

Every method really asks a runner, trial by trial: usually a simulated one that answers from the table. The published scan is
Trinity-RFT's: upwards, one step at a time, each cell from the longest length that a smaller cell of its rung reached.

A table is a CSV with the columns gpu, settings, gpus, sp, model, max_model_len (0: nothing fits; empty: unknown, left out).
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from highwater.errors import UsageError
from highwater.search.campaign import CellAnswered, campaign
from highwater.search.guess import unknown_trainer_guess
from highwater.search.ordering import carried_start
from highwater.spec.codec import Noun
from highwater.spec.hardware import gpu_catalog
from highwater.spec.layout import Layout
from highwater.spec.model import load_model
from highwater.spec.protocols import Runner
from highwater.spec.settings import Settings
from highwater.spec.study import PUBLISHED_STEP_TOKENS, Cell, CellAnswer, Grid, Method, Question
from highwater.spec.trial import Outcome

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


class MethodCount(Noun, frozen=True, kw_only=True):
    """What one method took."""

    method: str
    trials: int
    trials_by_model: dict[str, int]
    differing_cells: tuple[str, ...]
    """Cells whose capacity is not the one that ``highwater, bisect`` found; empty when the methods agree."""


def compare(questions: Sequence[Question], runner: Runner) -> tuple[MethodCount, ...]:
    """The trials that each method takes for the same questions: the published scan's first, ours last.

    ``floor`` runs nothing: an honest answer takes the trial that fits and the one above it that does not, or only the latter.
    """
    ours = [_search(question, runner, "bisect") for question in questions]
    methods = {
        "published scan": [_published_scan(question, runner, carry=False) for question in questions],
        "published scan, carried start": [_published_scan(question, runner, carry=True) for question in questions],
        "highwater, linear": [_search(question, runner, "linear") for question in questions],
        "floor": [[_with_fewest_trials(answer) for answer in answers] for answers in ours],
        "highwater, bisect": ours,
    }
    return tuple(_count(method, questions, answers, ours) for method, answers in methods.items())


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


def _search(question: Question, runner: Runner, method: Method) -> list[CellAnswer]:
    asked = msgspec.structs.replace(question, method=method)
    return [event.answer for event in campaign(asked, runner, guess=unknown_trainer_guess) if isinstance(event, CellAnswered)]


def _published_scan(question: Question, runner: Runner, *, carry: bool) -> list[CellAnswer]:
    """Trinity-RFT's search, which believes its carried start: where that fails, it reports that nothing fits."""
    answers: list[CellAnswer] = []
    for cell in question.cells:
        first = (carried_start(question, cell, answers) if carry else None) or 1
        index = first
        while index <= question.grid.size and _fits(question, cell, index, runner):
            index += 1
        answers.append(
            CellAnswer(
                cell=cell,
                capacity_tokens=question.grid.length(index - 1) if index > first else 0,
                does_not_fit_tokens=question.grid.length(index) if index <= question.grid.size else None,
                limit="memory" if index <= question.grid.size else "ceiling",
                reason="published scan",
                trials=min(index, question.grid.size) - first + 1,
            )
        )
    return answers


def _fits(question: Question, cell: Cell, index: int, runner: Runner) -> bool:
    return runner.run(question.trial(cell, question.grid.length(index))).outcome is Outcome.FIT


def _with_fewest_trials(answer: CellAnswer) -> CellAnswer:
    fewest = bool(answer.capacity_tokens) + (answer.does_not_fit_tokens is not None)
    return msgspec.structs.replace(answer, trials=fewest)


def _count(
    method: str, questions: Sequence[Question], answers: Sequence[Sequence[CellAnswer]], expected: Sequence[Sequence[CellAnswer]]
) -> MethodCount:
    by_model: dict[str, int] = {}
    differing: list[str] = []
    for question, found, right in zip(questions, answers, expected, strict=True):
        name = question.model.name
        by_model[name] = by_model.get(name, 0) + sum(answer.trials for answer in found)
        pairs = zip(found, right, strict=True)
        differing += [f"{name}, {a.cell.label}" for a, b in pairs if a.capacity_tokens != b.capacity_tokens]
    return MethodCount(method=method, trials=sum(by_model.values()), trials_by_model=by_model, differing_cells=tuple(differing))


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

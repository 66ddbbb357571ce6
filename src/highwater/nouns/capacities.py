"""Capacities: the longest length of one model on some GPUs with some settings, whoever found it:
a study, a prediction, or a published table.

A table is a CSV with the columns gpu, settings, gpus, sp, model, max_model_len (0: nothing fits;
empty: unknown); others are not read. As questions, cells that are unknown are left out; as
capacities they are said to be unknown.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from highwater.errors import UsageError
from highwater.model.model import Model, load_model
from highwater.nouns.cells import simplicity
from highwater.nouns.codec import SETTINGS_BYTES, Record, read_file
from highwater.nouns.hardware import gpu_catalog, kind_name
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.study import (
    PUBLISHED_STEP_TOKENS,
    Cell,
    Grid,
    Limit,
    Question,
    Study,
    counted_ranks,
)
from highwater.nouns.trainer import OURS, AnyTrainer, TrainerName
from highwater.nouns.trial import Outcome
from highwater.units import format_bytes

_OF_MEMORY: tuple[Limit, ...] = ("memory", "host_memory")
"""Ends of a search that say what does not fit."""
Source = Literal["measured", "simulated", "predicted", "published"]
"""Trials, a memory law in their place, a prediction of this project, or somebody else's table."""


class Capacity(Record, frozen=True, kw_only=True):
    """One cell's bracket: lengths known to fit, and lengths known not to.

    Between the two are those of which nobody knows (docs/decisions/018).
    """

    model_name: str
    config_digest: str | None
    """Digest of the model's config; None: an older file does not say."""
    native_length_tokens: int
    device_name: str
    """Kind of GPU, as in the catalog where it is known. ``A100-80GB``; ``H200-141GB with 79.15
    GiB`` under a memory budget."""
    cell: Cell
    capacity_tokens: int
    """The longest length that fits; 0: none is known to."""
    does_not_fit_tokens: int | None = None
    """The shortest length known not to fit; None: nobody knows of one."""
    odd_tokens: tuple[int, ...] = ()
    """Lengths whose own trials said the opposite of the bracket. Outcomes are not always
    monotone."""
    margin_bytes: int = 0
    """Bytes that a length has to leave of a GPU's memory to count as one that fits, where they were
    asked for."""
    is_memory_only: bool = False
    """Memory holds it; trained in full was less, or nothing."""
    source: Source
    trainer: AnyTrainer = OURS
    """The trainer whose step it is."""
    command: str | None = None
    """The command that started it, where that is a user's own."""
    found_in: str
    """File that says so, or the command that predicts it."""

    def fits(self, length_tokens: int) -> bool | None:
        """Whether this length fits, by its own trials before the bracket; None: nobody knows."""
        fails = self.does_not_fit_tokens
        if self.capacity_tokens < length_tokens and (fails is None or length_tokens < fails):
            return None
        if length_tokens not in self.odd_tokens and not self._follows(length_tokens):
            return None
        return (length_tokens <= self.capacity_tokens) != (length_tokens in self.odd_tokens)

    def _follows(self, length_tokens: int) -> bool:
        """Whether the bracket tells of a length that it does not end at. With a token budget a
        shorter length may pack more tokens than a longer one that fit, and a longer one fewer than
        one that did not: of such a length nobody knows.
        """
        settings, degree = self.cell.settings, self.cell.layout.context_degree
        if settings.token_budget_tokens is None:
            return True

        def packed(tokens: int) -> int:
            return tokens * settings.sequences(tokens, context_degree=degree)

        if length_tokens <= self.capacity_tokens:
            return packed(length_tokens) <= packed(self.capacity_tokens)
        fails = self.does_not_fit_tokens
        return packed(length_tokens) == 0 or fails is None or packed(length_tokens) >= packed(fails)


def simplest(capacities: tuple[Capacity, ...], length_tokens: int) -> Capacity | None:
    """The simplest capacity of one model on some GPUs that trains a length; None: none does."""
    return next((each for each in in_order(capacities) if each.fits(length_tokens)), None)


def may_be_simpler(
    capacities: tuple[Capacity, ...], length_tokens: int, found: Capacity | None
) -> bool:
    """Whether nobody knows if a simpler cell than ``found``, or any cell, trains a length."""
    known = {capacity.cell for capacity in capacities if capacity.fits(length_tokens) is not None}
    unknown = (capacity.cell for capacity in capacities if capacity.cell not in known)
    return any(found is None or simplicity(cell) < simplicity(found.cell) for cell in unknown)


def in_order(capacities: tuple[Capacity, ...]) -> list[Capacity]:
    """The capacities, simplest first; of one cell what was trained in full first."""
    return sorted(capacities, key=lambda each: (simplicity(each.cell), each.is_memory_only))


def study_capacities(study: Study) -> tuple[Capacity, ...]:
    """What a study knows of each cell of its question."""
    return tuple(
        capacity for cell in study.question.cells for capacity in cell_capacities(study, cell)
    )


def cell_capacities(study: Study, cell: Cell) -> tuple[Capacity, ...]:
    """A cell's answer as capacities, or what its trials say so far; memory-only apart."""
    answer = study.answer_of(cell)
    if answer is None:
        memory_only = study.longest_fit_tokens(cell, Outcome.MEMORY_ONLY_FIT)
        fits = study.longest_fit_tokens(cell)
        fails = _shortest_failure(study, cell, max(fits or 0, memory_only or 0))
    else:
        memory_only = None if answer.memory_only is None else answer.memory_only.length_tokens
        fits = answer.capacity_tokens
        fails = answer.does_not_fit_tokens if answer.limit in _OF_MEMORY else None
    found = (_of_study(study, cell, fits or 0, fails),)
    if memory_only is None:
        return found
    return (*found, _of_study(study, cell, memory_only, fails, is_memory_only=True))


def kind_with_memory(device_name: str, device_bytes: int | None) -> str:
    """The catalog's name of a GPU, and its memory where that is not the whole card's."""
    name = kind_name(device_name)
    return name if device_bytes is None else f"{name} with {format_bytes(device_bytes)}"


def _of_study(
    study: Study, cell: Cell, fits: int, fails: int | None, *, is_memory_only: bool = False
) -> Capacity:
    question: Question = study.question
    return Capacity(
        model_name=question.model.name,
        config_digest=question.model.config_digest,
        native_length_tokens=question.model.shape.native_length_tokens,
        device_name=kind_with_memory(question.device_name, question.memory_budget_bytes),
        cell=cell,
        capacity_tokens=fits,
        does_not_fit_tokens=fails,
        odd_tokens=_odd_tokens(study, cell, fits, fails),
        margin_bytes=question.margin_bytes,
        is_memory_only=is_memory_only,
        source=question.figures,
        trainer=OURS if question.foreign is None else question.foreign.trainer,
        command=None if question.foreign is None else question.foreign.typed or None,
        found_in=study.path or "a search that was not recorded",
    )


def _shortest_failure(study: Study, cell: Cell, longest_fit: int) -> int | None:
    """The shortest length beyond the longest fit that a trial says does not fit. It ran out of
    memory, or left less of it than was asked for.
    """
    failed = (
        trial.spec.length_tokens
        for trial in study.trials_of(cell)
        if trial.result is not None
        and trial.result.outcome.tells
        and not study.question.counts_as_fit(trial.result)
    )
    return min((tokens for tokens in failed if tokens > longest_fit), default=None)


def _odd_tokens(study: Study, cell: Cell, fits: int, fails: int | None) -> tuple[int, ...]:
    """Lengths whose trials say the opposite of the bracket; of several trials all have to fit."""
    told: dict[int, bool] = {}
    for trial in study.trials_of(cell):
        if trial.result is not None and trial.result.outcome.tells:
            tokens = trial.spec.length_tokens
            told[tokens] = told.get(tokens, True) and study.question.counts_as_fit(trial.result)
    odd = (
        tokens
        for tokens, is_fit in told.items()
        if (fails is not None and tokens >= fails if is_fit else tokens <= fits)
    )
    return tuple(sorted(odd))


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

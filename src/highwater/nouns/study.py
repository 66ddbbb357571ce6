"""Studies: a study's question (Question, Cell, Grid), its answers and trials, and its headroom."""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, Literal

from highwater.errors import UsageError
from highwater.model.model import Model
from highwater.nouns.codec import Record, key_of
from highwater.nouns.declaration import MOST_LENGTHS, MOST_REPEATS
from highwater.nouns.environment import Environment
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import EXPERT_TILE_TOKENS, TILED_EXPERTS, Layout
from highwater.nouns.settings import NOTHING_SET, Settings, short_settings
from highwater.nouns.trainer import ForeignTrainer
from highwater.nouns.trial import PROMPT_TOKENS, Device, Outcome, TrialResult, TrialSpec
from highwater.units import GIB, format_tokens

PUBLISHED_STEP_TOKENS = 4096
CEILING_TOKENS = 1024**2


class Grid(Record, frozen=True, kw_only=True):
    """The lengths that a search may try: from ``start_tokens`` on, in steps."""

    start_tokens: int
    step_tokens: int
    native_length_tokens: int
    beyond_step_tokens: int
    """Step past the native length."""
    max_tokens: int
    """Ceiling of the search: longer lengths are not tried."""

    def __post_init__(self) -> None:
        """Raise UsageError for a grid without a length."""
        if min(self.start_tokens, self.step_tokens, self.beyond_step_tokens) < 1:
            raise UsageError(
                "the grid of lengths has a step or a start below 1",
                hint="for example `--start-length 4096 --resolution 4096`",
            )
        if self.start_tokens < 2:
            raise UsageError(
                f"a start length of {self.start_tokens} token",
                hint="use `--start-length 2` or more",
            )
        if self.max_tokens < self.start_tokens:
            raise UsageError(
                f"the longest length to try, {self.max_tokens}, is below the start length "
                f"{self.start_tokens}",
                hint=f"use `--start-length {self.max_tokens}`",
            )
        if self.size > MOST_LENGTHS:
            coarser = -(-(self.max_tokens - self.start_tokens) // (MOST_LENGTHS - 1))
            raise UsageError(
                f"there are {format_tokens(self.size)} lengths to try up to "
                f"{format_tokens(self.max_tokens)}, and {format_tokens(MOST_LENGTHS)} is the most",
                hint=f"use `--resolution {coarser}` or more",
            )

    @property
    def size(self) -> int:
        """Number of lengths on the grid."""
        return self.index_at_most(self.max_tokens)

    def length(self, index: int) -> int:
        """Tokens of the length number ``index``; 1 is the start length."""
        within = self._indices_up_to_native
        if index <= within:
            return self.start_tokens + (index - 1) * self.step_tokens
        last = self.start_tokens + (within - 1) * self.step_tokens
        return last + (index - within) * self.beyond_step_tokens

    def index_at_most(self, tokens: int) -> int:
        """Number of the longest length that has at most ``tokens``; 0 if none has."""
        if tokens < self.start_tokens:
            return 0
        within = self._indices_up_to_native
        last = self.length(within)
        if tokens < last:
            return (tokens - self.start_tokens) // self.step_tokens + 1
        return within + (tokens - last) // self.beyond_step_tokens

    @property
    def _indices_up_to_native(self) -> int:
        """Number of grid lengths up to the first that is native or longer."""
        below = self.native_length_tokens - self.start_tokens
        return 1 + max(0, -(-below // self.step_tokens))


STUDY_SCHEMA_VERSION = 3
"""Version of a study that is begun now. Those of version 1 have no ``cell_expected`` lines, those
of version 2 no checksums: they are read, and resumed without any."""

RANK_WORDS: dict[Device, tuple[str, str]] = {
    "cuda": ("GPU", "GPUs"),
    "cpu": ("process", "processes"),
}
"""A user's words for a rank, and several, on each device."""


def usual_grid(
    native_length_tokens: int,
    *,
    start_tokens: int = PUBLISHED_STEP_TOKENS,
    resolution_tokens: int | None = None,
    max_tokens: int = CEILING_TOKENS,
) -> Grid:
    """Grid of lengths for a model of this native length: the published tables' grid, or the given
    step and maximum; past the native length steps are a quarter of it.
    """
    return Grid(
        start_tokens=start_tokens,
        step_tokens=resolution_tokens or PUBLISHED_STEP_TOKENS,
        native_length_tokens=native_length_tokens,
        beyond_step_tokens=resolution_tokens or max(1, native_length_tokens // 4),
        max_tokens=max_tokens,
    )


def counted_ranks(count: int, device: Device) -> str:
    """A number of ranks in words: ``1 GPU``, ``2 processes``."""
    return f"{count} {RANK_WORDS[device][count != 1]}"


Method = Literal["bisect", "linear"]
Proof = Literal["full", "memory"]
Limit = Literal["memory", "host_memory", "ceiling", "time", "inconclusive"]


class Cell(Record, frozen=True, kw_only=True):
    """Settings on a layout of GPUs: a study looks for the longest length of each cell."""

    layout: Layout
    settings: Settings

    def changed(self, **settings: Any) -> "Cell":
        """The cell with some of its settings changed."""
        changed = self.settings.replace(**settings)
        return self.replace(settings=changed)

    @property
    def words(self) -> str:
        """The settings and degrees in words: ``expandable, chunked loss, Ulysses 2``."""
        told, degrees = short_settings(self.settings), self.layout.degrees
        return ", ".join(degrees if degrees and told == NOTHING_SET else (told, *degrees))

    @property
    def label(self) -> str:
        """The cell with its GPUs: ``expandable, chunked loss, 4 GPUs, Ulysses 2``."""
        return self.label_on("cuda")

    def label_on(self, device: Device) -> str:
        """The cell's label; on the CPU it counts processes instead of GPUs."""
        ranks = counted_ranks(self.layout.gpus, device)
        return f"{short_settings(self.settings)}, {ranks}{self.layout.suffix}"


class Question(Record, frozen=True, kw_only=True):
    """All that a study's answers depend on: model, GPUs, cells, lengths, and how trials run."""

    model: Model
    device: Device
    device_name: str
    """The GPU as its driver names it, or ``CPU``."""
    device_total_bytes: int | None
    """Memory of one GPU; None on the CPU."""
    memory_budget_bytes: int | None
    host_memory_bytes: int | None = None
    """Bound on the memory of a machine; None: what its control group may take."""
    cells: tuple[Cell, ...]
    """Cells in the order in which they are answered."""
    grid: Grid
    method: Method = "bisect"
    confirm: int = 0
    """Times that both trials of the edge are repeated, and number of lengths tried above it."""
    margin_bytes: int = 0
    """Headroom in bytes that a trial has to leave to count as a fit."""
    steps: int = 2
    micro_batches: int = 2
    data: str | None = None
    simulated: bool = False
    proof: Proof = "full"
    """``memory``: a memory-only trial proves a length whose full one exceeds ``timeout_s``."""
    hyperparameters: Hyperparameters = Hyperparameters()
    """Numbers of optimizer and objective, the same on every rung, at every length."""
    timeout_s: float | None = None
    """Longest time for one trial in seconds, where the answer depends on it: with the proof
    ``memory``. It is no part of the question: with more time the same study goes further. In a
    recorded study it is the limit when that was last opened (docs/decisions/026)."""
    foreign: ForeignTrainer | None = None
    """The trainer that is tried; None: this package's engine."""
    prompt_tokens: int = PROMPT_TOKENS
    """First tokens of a synthetic sequence that its trials do not train; it means nothing for a
    foreign trainer, or a user's own data."""

    def __post_init__(self) -> None:
        """Raise UsageError for a question without a cell, or with negative counts."""
        if not self.cells:
            raise UsageError(
                "there is no cell to search: no rung on any GPU count", hint="use `--gpus 1`"
            )
        if self.confirm < 0 or self.margin_bytes < 0:
            flag = "--confirm 0" if self.confirm < 0 else "--headroom 0"
            raise UsageError(
                "confirm and headroom cannot be negative", hint=f"use `{flag}` or more"
            )
        if self.confirm > MOST_REPEATS:
            raise UsageError(
                f"{self.confirm} repeats, and {MOST_REPEATS} is the most",
                hint=f"use `--confirm {MOST_REPEATS}` or fewer",
            )
        if (self.proof == "memory") != (self.timeout_s is not None):
            raise UsageError(
                "the proof `memory` and a time limit go together",
                hint="for example `--proof memory --timeout 5m`",
            )

    @property
    def figures(self) -> Literal["measured", "simulated"]:
        """``simulated`` for a dry run, whose trials train nothing, else ``measured``."""
        return "simulated" if self.simulated else "measured"

    @property
    def memory_bytes(self) -> int | None:
        """Bytes that one GPU may hold, the margin included: the budget, or the whole card."""
        return self.memory_budget_bytes or self.device_total_bytes

    @property
    def key(self) -> str:
        """Digest of the question, which names its study. It leaves out the model's folder, its
        layers as read (the configuration's digest covers them), and the time limit.
        """
        return key_of(
            self,
            without=("directory", "layer_runs", "small_parameters", "base_config_path"),
            blank=("timeout_s",),
        )

    def size_of(self, cell: Cell) -> int:
        """How many of the grid's lengths a cell can try; a token budget may hold fewer."""
        longest = cell.settings.longest_tokens(context_degree=cell.layout.context_degree)
        if longest is None:
            return self.grid.size
        return min(self.grid.size, self.grid.index_at_most(longest))

    def tiled_from(self, cell: Cell) -> int:
        """Index of the shortest length at which experts run in tiles: some shorter lengths take
        more memory. 0: they never do, or a token budget decides what is packed.
        """
        settings = cell.settings
        can_tile = self.model.shape.model_type in TILED_EXPERTS
        if not can_tile or settings.token_budget_tokens is not None:
            return 0
        whole_tokens = EXPERT_TILE_TOKENS * cell.layout.context_degree
        return self.grid.index_at_most(whole_tokens // settings.sequences_per_micro_batch) + 1

    def growing_ranges(self, cell: Cell, size: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of grid indices, (first, last), the longest lengths first. Within a range a
        longer length takes more memory: as many sequences are packed, and experts always or never
        run in tiles. A dense model without a token budget has one range, (1, ``size``).
        """
        tiled_from = self.tiled_from(cell)
        degree = cell.layout.context_degree

        def packed(index: int) -> tuple[int, bool]:
            # Sequences fall as lengths grow: negated they are in the order that bisect asks for.
            length_tokens = self.grid.length(index)
            sequences = cell.settings.sequences(length_tokens, context_degree=degree)
            return -sequences, 0 < tiled_from <= index

        while size:
            first = bisect_left(range(size + 1), packed(size), lo=1, key=packed)
            yield first, size
            size = first - 1

    def counts_as_fit(self, result: TrialResult) -> bool:
        """True if a trial fit, full or memory-only, and left at least the question's headroom."""
        has_margin = self.margin_bytes == 0 or (result.headroom_bytes or 0) >= self.margin_bytes
        return result.outcome.is_fit and has_margin

    def trial(self, cell: Cell, length_tokens: int, *, memory_only: bool = False) -> TrialSpec:
        """The trial of one length in one cell, in full or memory-only."""
        return TrialSpec(
            model_name=self.model.name,
            model_directory=self.model.directory,
            config_digest=self.model.config_digest,
            device=self.device,
            layout=cell.layout,
            settings=cell.settings,
            hyperparameters=self.hyperparameters,
            length_tokens=length_tokens,
            memory_budget_bytes=self.memory_budget_bytes,
            host_memory_bytes=self.host_memory_bytes,
            steps=self.steps,
            micro_batches=self.micro_batches,
            prompt_tokens=self.prompt_tokens,
            data=self.data,
            attention_depth=1 if memory_only else None,
            foreign=self.foreign,
        )


class MemoryOnlyFit(Record, frozen=True, kw_only=True):
    """A length that fit in a memory-only trial: the step has room, but it was not trained."""

    length_tokens: int
    peak_reserved_bytes: int | None
    """Measured peak; on the CPU the data segment's."""
    headroom_bytes: int | None


class CellAnswer(Record, frozen=True, kw_only=True):
    """Answer for one cell: the longest length that fit, and the next that did not."""

    cell: Cell
    capacity_tokens: int | None
    """Longest length that fit; 0 when the start length does not; None when no trial told."""
    does_not_fit_tokens: int | None
    """Shortest length above it that did not fit; None: the ceiling or a failure ended it."""
    limit: Limit
    """Reason that ended the search above the capacity."""
    reason: str
    """One line: why the length above failed, or why it was not tried."""
    trials: int
    """Trials that this answer took, retries and those before a resumption included."""
    monotone: bool = True
    """True if no shorter length failed where a longer one fit, and no repeat disagreed."""
    contradictions: tuple[str, ...] = ()
    """Each observation that is not monotone, in words."""
    peak_reserved_bytes: int | None = None
    """Measured peak at the capacity; on the CPU the data segment's."""
    headroom_bytes: int | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    memory_only: MemoryOnlyFit | None = None
    """Proof ``memory``: the longest length that fit in a memory-only trial. None where it is no
    longer than the capacity, which is the longest that was trained in full. ``does_not_fit_tokens``
    is the next length after this one."""

    @property
    def reach_tokens(self) -> int | None:
        """Longest length that fit in any trial, in full or in memory only; None: no length did."""
        return self.capacity_tokens if self.memory_only is None else self.memory_only.length_tokens

    @property
    def is_undecided(self) -> bool:
        """True if a longer length may fit: time ran out, or the trials there were inconclusive."""
        return self.limit in ("time", "inconclusive")

    @property
    def is_at_least(self) -> bool:
        """True if some length fit, and no longer length is known to fail."""
        return bool(self.reach_tokens) and self.does_not_fit_tokens is None


class UnprovenAnswer(Record, frozen=True, kw_only=True):
    """A cell's answer in a study file whose trials do not prove it, and why."""

    answer: CellAnswer
    why: str
    """Claims of the answer that the trials do not prove, in words."""


class RecordedTrial(Record, frozen=True, kw_only=True):
    """One launch of one trial in a study: what was asked, and the result once there is one."""

    spec: TrialSpec
    attempt: int = 1
    repeat: int = 0
    """Number of the repeat: 0 for the first time, 1 and up to confirm it."""
    result: TrialResult | None = None
    """The result of the trial; None: it started, and its end was never recorded."""
    timeout_s: float | None = None
    """The time limit under which the trial ended, where the question has one."""

    @property
    def cell(self) -> Cell:
        """The cell that the trial belongs to."""
        return Cell(layout=self.spec.layout, settings=self.spec.settings)

    def ran_out_of_less_than(self, timeout_s: float) -> bool:
        """True if the trial timed out under a limit shorter than ``timeout_s`` seconds."""
        is_late = self.result is not None and self.result.outcome is Outcome.TIMEOUT
        return is_late and self.timeout_s is not None and self.timeout_s < timeout_s


class Past(Record, frozen=True, kw_only=True):
    """What a study already has on one cell, from which a search goes on."""

    answer: CellAnswer | None = None
    """The cell's answer, unless there is more time now than it had: it is not searched again."""
    trials: tuple[RecordedTrial, ...] = ()
    """Trials whose results are taken as they are, in the study's order."""


class Expectation(Record, frozen=True, kw_only=True):
    """The length that was predicted for a cell before its first trial."""

    cell: Cell
    likely_tokens: int
    """Longest length that was likely to fit; 0: none."""
    prediction: str
    """``formula``, ``trace``, or the file that was named."""


class Study(Record, frozen=True, kw_only=True):
    """A study as it was when it was read: an immutable snapshot."""

    schema_version: int = STUDY_SCHEMA_VERSION
    """Schema version of its journal."""
    path: str | None = None
    """The journal on disk; None when nothing was recorded, as in a dry run."""
    question: Question
    trials: tuple[RecordedTrial, ...] = ()
    """Trials in the order in which they started; one that was run again stands where it ended."""
    answers: tuple[CellAnswer, ...] = ()
    """Answers that the trials prove, in the order of the cells; a cell without one is absent."""
    unproven: tuple[UnprovenAnswer, ...] = ()
    """Answers of the file that its trials do not prove: their cells count as not answered."""
    answers_within_s: tuple[float, ...] = ()
    """Time limit of each answer in seconds, in their order; empty: the question has none."""
    expectations: tuple[Expectation, ...] = ()
    """Expectations of cells, in the question's order; empty for journals without them."""
    notes: tuple[str, ...] = ()
    """Notes for readers about the record or the search, one line each."""
    command: tuple[str, ...] = ()
    """The words typed to ask, or last to resume; empty from Python, or for another program's."""
    environments: tuple[Environment, ...] = ()
    """Machines on which it was asked and resumed, by an allow-list. Empty for dry runs, and for
    journals from before they were recorded."""

    @property
    def versions(self) -> dict[str, tuple[str, ...]]:
        """Versions of each package that the study's trials ran with, the oldest first."""
        found: dict[str, dict[str, None]] = {}
        for trial in self.trials:
            for rank in trial.result.ranks if trial.result else ():
                for name, version in rank.versions.items():
                    found.setdefault(name, {})[version] = None
        return {name: tuple(versions) for name, versions in found.items()}

    @property
    def finished_trials(self) -> int:
        """Number of trials with a result."""
        return sum(trial.result is not None for trial in self.trials)

    def answer_of(self, cell: Cell) -> CellAnswer | None:
        """The cell's answer; None if it has none yet."""
        return next((answer for answer in self.answers if answer.cell == cell), None)

    def unproven_of(self, cell: Cell) -> UnprovenAnswer | None:
        """The cell's answer, with the reason, if its trials do not prove it; else None."""
        return next((each for each in self.unproven if each.answer.cell == cell), None)

    def trials_of(self, cell: Cell) -> tuple[RecordedTrial, ...]:
        """Return the recorded trials of a cell (settings on a layout), in order of their start."""
        return tuple(trial for trial in self.trials if trial.cell == cell)

    def told_by(self, cell: Cell) -> tuple[tuple[TrialSpec, TrialResult], ...]:
        """The cell's trials that ended in a fit or without memory, in the order of their start."""
        ended = ((each.spec, each.result) for each in self.trials_of(cell))
        return tuple((spec, result) for spec, result in ended if result and result.outcome.tells)

    def longest_fit_tokens(self, cell: Cell, outcome: Outcome | None = Outcome.FIT) -> int | None:
        """Longest length of the cell's trials with this outcome (None: any fit), else None."""
        fits = (
            trial.spec.length_tokens
            for trial in self.trials_of(cell)
            if trial.result is not None
            and outcome in (None, trial.result.outcome)
            and self.question.counts_as_fit(trial.result)
        )
        return max(fits, default=None)

    @property
    def complete(self) -> bool:
        """True if every cell has an answer, found within as much time as trials have now."""
        return len(self.answers_within(self.question.timeout_s)) == len(self.question.cells)

    def answers_within(self, timeout_s: float | None) -> tuple[CellAnswer, ...]:
        """Answers that were found with ``timeout_s`` seconds a trial or more; None: all."""
        if timeout_s is None or not self.answers_within_s:
            return self.answers
        pairs = zip(self.answers, self.answers_within_s, strict=True)
        return tuple(answer for answer, within_s in pairs if within_s >= timeout_s)

    @property
    def longest_timeout_s(self) -> float | None:
        """Longest time limit in seconds of trials, answers and the last opening; None: none."""
        of_trials = (trial.timeout_s for trial in self.trials)
        limits = (self.question.timeout_s, *self.answers_within_s, *of_trials)
        return max((limit_s for limit_s in limits if limit_s is not None), default=None)


Risk = Literal["safe", "likely", "tight"]
"""Certainty of a prediction that a length fits. ``safe``: the default headroom is left, and even
the pessimistic end of the interval is below the GPU's memory; ``likely``: that end is below it;
``tight``: only the prediction itself is, and a trial has to tell."""

RISK_IN_WORDS = (
    "safe: 2 GiB or 3 % of a GPU, whichever is more, and 5 % of host memory are left free, and "
    "even the pessimistic end of the prediction fits; likely: that end fits; tight: only the "
    "prediction itself fits, so that a trial has to tell"
)
_LEAST_BYTES = 2 * GIB
_SHARE = 3, 100
HOST_KEPT = 0.95
"""Share of host memory up to which states and activations may be safe: others use it, too."""
_MOST_SHARE = 8
"""Part of a GPU that is left free below 16 GiB, an eighth: 2 GiB would be much of it."""


def default_headroom_bytes(device_bytes: int) -> int:
    """Bytes of a GPU's ``device_bytes`` that a prediction leaves free by default."""
    part, of = _SHARE
    return min(max(_LEAST_BYTES, device_bytes * part // of), device_bytes // _MOST_SHARE)

"""Predictor that traces the engine's own steps, in a process with torch, and replays them through
an allocator. The formula only chooses the first length.

Traces are cached under the digest of the code that made them.
"""

import gzip
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Event, Lock
from typing import Self

import msgspec

from highwater.memory.capacity import CellPrediction, MemoryLimit
from highwater.memory.formula.constants import LIKELY_FILLED_SHARE
from highwater.memory.interval.calibration import Calibration, Factors
from highwater.memory.predictor import FormulaPredictor, ReplayPredictor, Replays, predict_cell
from highwater.memory.trace.replay import (
    Alive,
    Replayed,
    ScaledTrace,
    alive_at,
    coded,
    replay_trace,
)
from highwater.memory.trainers import MEMORY
from highwater.nouns.codec import INDEX_BYTES, digest, from_json, read_file, write_whole
from highwater.nouns.events import EventLog, TraceOrder
from highwater.nouns.hardware import Kernel
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.study import Question
from highwater.nouns.trainer import OURS, TrainerName
from highwater.nouns.trial import TrialEndedError, TrialSpec
from highwater.trials.job import Job
from highwater.trials.probe import (
    probe,
    refuse_missing_package,
    refuse_package_obstacles,
    versions_of,
)
from highwater.trials.trial_process import private_folder, trial_environment

Tracer = Callable[[TrialSpec], EventLog]
"""Returns the memory events of a trial's fullest rank; called from two threads at once."""


def predict_traced(
    question: Question,
    memory_limit: MemoryLimit,
    tracer: Tracer,
    calibration: Calibration | None = None,
    trainer: TrainerName = OURS,
) -> tuple[CellPrediction, ...]:
    """Predict every cell of the question, in order; raises the tracer's errors.

    Host memory is by formula: only a GPU's is traced. A cell takes two traces if the formula's
    first length is at the edge; two more if it is not, and the line through the first two hits the
    edge; with a calibration, one more for each length that fits but whose upper end does not.
    """
    found: list[CellPrediction] = []
    for cell in question.cells:
        factors = calibration and calibration.of(cell.settings.allocator)
        traces = CellTraces(
            by_formula=MEMORY[trainer].by_formula(question, cell, memory_limit),
            tracer=tracer,
            factors=factors,
        )
        try:
            found.append(predict_cell(traces.predictor, factors))
        finally:  # the owner of the tracer ends traces that are still being made
            traces.pool.shutdown(wait=False, cancel_futures=True)
    return tuple(found)


@dataclass(slots=True, kw_only=True)
class CellTraces:
    """Traces of one cell at several lengths, two made at a time; and what replays them."""

    by_formula: FormulaPredictor
    tracer: Tracer
    factors: Factors | None
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=2))
    predictor: ReplayPredictor = field(init=False)
    _begun: dict[int, Future[ScaledTrace]] = field(default_factory=dict[int, Future[ScaledTrace]])

    def __post_init__(self) -> None:
        """Make the predictor that replays these traces."""
        self.predictor = ReplayPredictor(
            by_formula=self.by_formula,
            replay=Replays(self._replay),
            alive=self._alive,
            aim=self._aim,
        )

    def begin(self, *indices: int) -> None:
        """Start tracing the lengths of these grid indices; indices off the grid are ignored."""
        question, cell = self.by_formula.question, self.by_formula.cell
        for index in indices:
            if 1 <= index <= max(1, question.size_of(cell)) and index not in self._begun:
                spec = question.trial(cell, question.grid.length(index))
                self._begun[index] = self.pool.submit(self._traced, spec)

    def _traced(self, spec: TrialSpec) -> ScaledTrace:
        return coded(self.tracer(spec))

    def trace(self, length_tokens: int) -> ScaledTrace:
        """Wait for the trace of a length; raises the tracer's errors."""
        index = self.by_formula.question.grid.index_at_most(length_tokens)
        self.begin(index)
        return self._begun[index].result()

    def _replay(self, length_tokens: int, capacity_bytes: int | None) -> tuple[Replayed, int]:
        return replay_trace(
            *(self.trace(length_tokens), length_tokens),
            allocator=self.by_formula.cell.settings.allocator,
            capacity_bytes=capacity_bytes,
            workspaces_bytes=self.by_formula.memory_limit.cublas_workspaces_bytes,
        )

    def _alive(self, length_tokens: int, number: int) -> tuple[Alive, ...]:
        return alive_at(self.trace(length_tokens), length_tokens, number)

    def _fits(self, index: int) -> bool:
        """True if a length fits; if its upper end does not, start the next shorter trace."""
        question = self.by_formula.question
        length_tokens = question.grid.length(index)
        if not self.predictor.at(length_tokens, self.by_formula.memory_limit.device_bytes).fits:
            return False
        capacity_room_bytes = self.by_formula.capacity_room_bytes(self.factors)
        if not self.predictor.at(length_tokens, capacity_room_bytes).fits:
            shortest, _ = next(question.growing_ranges(self.by_formula.cell, index))
            self.begin(max(index - 1, shortest))
        return True

    def _aim(self, start: int) -> int:
        """Grid index of the longest length that fits, from the line of allocated bytes through two
        traces, at the formula's ``start`` and the next; ``start`` if that is the edge. Starts the
        traces of both its sides. The edge may be ten steps away, too far for a trace each.
        """
        formula = self.by_formula
        question, cell, limit = formula.question, formula.cell, formula.memory_limit
        size = max(1, question.size_of(cell))
        ranges = question.growing_ranges(cell, size)
        shortest, alike = next(each for each in ranges if each[0] <= (start or size))
        start = max(start, shortest)
        self.begin(start, start + 1)
        if start == alike or (self._fits(start) and not self._fits(start + 1)):
            return start
        peaks = [
            self.predictor.at(question.grid.length(index), None).replayed
            for index in (start, start + 1)
        ]
        one, other = (peak.peak_allocated_bytes for peak in peaks if peak is not None)
        if other <= one:
            return start
        outside_bytes = formula.at(question.grid.length(start)).footprint.outside_bytes
        filled = LIKELY_FILLED_SHARE[cell.settings.allocator] * (limit.device_bytes - outside_bytes)
        aimed = start + (round(filled) - one) // (other - one)
        if self._fits(start):
            aimed = min(alike, max(aimed, start + 2))
        else:
            aimed = max(shortest, min(aimed, start - 1))
        self.begin(aimed, aimed + 1)
        return aimed


_TRACER = "highwater.engine.tracer.tracer"
_TIMEOUT_S = 1800.0
"""Longest time of a trace in seconds: it takes seconds to minutes, by layers and not by tokens."""


class CachedTracer:
    """Returns the trace of a trial's fullest rank, kept on disk; ends its tracers when left."""

    def __init__(
        self,
        directory: Path,
        *,
        kernel: Kernel,
        trainer: TrainerName = OURS,
        on_trace: Callable[[TrialSpec], None] | None = None,
    ) -> None:
        """``directory``: cache of traces; ``on_trace`` is called with each trial that is traced."""
        refuse_package_obstacles(probe(), before="nothing can be traced here: ")
        self._directory = directory
        self._kernel: Kernel = kernel
        self._trainer: TrainerName = trainer
        self._on_trace = on_trace
        self._ended = Event()
        self._asked = Lock()
        self._making: dict[Path, Lock] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for making in tuple(self._making.values()):
            making.acquire()  # the lock is free when the process is gone; no new trace begins
            making.release()

    def __call__(self, spec: TrialSpec) -> EventLog:
        """Events of a trial's fullest rank. MachineError if the tracer or a package fails."""
        refuse_missing_package(spec.settings)
        order, path = self._place(spec)
        with self._asked:
            making = self._making.setdefault(path, Lock())
        with making:  # a thread that needs the same trace waits for it
            kept = _read(path)
            if kept is not None:
                return kept
            if self._ended.is_set():
                raise TrialEndedError
            if self._on_trace is not None:
                self._on_trace(spec)
            text = self._trace(order)
            with suppress(OSError):  # a trace that cannot be kept is made again
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, gzip.compress(text, compresslevel=1))
            return from_json(text, EventLog)

    def unmade(self, specs: Iterable[TrialSpec]) -> set[Path]:
        """Paths of these trials' traces that do not exist yet; equal traces share a path."""
        return {path for _, path in map(self._place, specs) if not path.exists()}

    def _place(self, spec: TrialSpec) -> tuple[TraceOrder, Path]:
        order = TraceOrder(
            spec=_as_traced(spec),
            rank=fullest_rank(spec),
            kernel=self._kernel,
            trainer=self._trainer,
        )
        return order, self._directory / f"{_key(order)}.json.gz"

    def _trace(self, order: TraceOrder) -> bytes:
        job = Job(
            module=_TRACER,
            order=order,
            report=msgspec.Raw,  # the bytes as they are kept
            # This machine's GPUs have nothing to do with the GPUs that are traced for.
            environment={**trial_environment(order.spec), "CUDA_VISIBLE_DEVICES": ""},
            timeout_s=_TIMEOUT_S,
            failure="the tracer failed",
            late="a trace",
            hint="leave `--exact` out: the formula needs no trace",
        )
        with private_folder() as folder:
            return bytes(job.run(folder, ended=self._ended))


def fullest_rank(spec: TrialSpec) -> int:
    """The rank with the most trained tokens: the last, as the first hold the untrained prompt."""
    return spec.layout.context_degree - 1


def _as_traced(spec: TrialSpec) -> TrialSpec:
    """The trial without settings that change no trace: allocator, saves, hyperparameters, paths."""
    settings = spec.settings.replace(allocator="native", checkpoint="none", save_hf="never")
    return spec.replace(
        settings=settings,
        hyperparameters=Hyperparameters(),
        memory_budget_bytes=None,
        checkpoint_directory=None,
        memory_snapshots=None,
        statistics=None,
    )


def _key(order: TraceOrder) -> str:
    # The config decides a trace, wherever the model lies.
    nowhere = order.spec.replace(model_directory="")
    named = order.replace(spec=nowhere)
    return digest((named, _versions(), _sources()))


@cache
def _versions() -> dict[str, str]:
    return probe().versions | versions_of(("peft", "torchao", "bitsandbytes", "liger-kernel"))


@cache
def _sources() -> str:
    package = Path(__file__).parents[1]
    return digest(
        [
            (str(path.relative_to(package)), path.read_text("utf-8"))
            for path in source_files(package)
        ]
    )


def source_files(package: Path) -> list[Path]:
    """Files that a trace may depend on: the engine, and the packages that it imports."""
    rooms = (package / room for room in ("engine", "model", "nouns"))
    return sorted([*package.glob("*.py"), *(path for room in rooms for path in room.rglob("*.py"))])


def _read(path: Path) -> EventLog | None:
    """Read a cached trace; None if it is missing, or damaged and so to be made again."""
    try:
        return from_json(gzip.decompress(read_file(path, most_bytes=INDEX_BYTES)), EventLog)
    except (OSError, EOFError, zlib.error, msgspec.MsgspecError):
        return None

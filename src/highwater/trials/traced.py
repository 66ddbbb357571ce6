"""Traced: the predictor that traces the engine's own steps, in a process with torch, and replays
them; the formula only says where to begin.

Traces are kept for the next time, under the digest of the code that made them: its imports are
read, not run, so that nothing heavy is loaded to know them. What a file only loads by a name in a
string is not among them.
"""

import ast
import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Event, Lock
from typing import Self

import msgspec

from highwater.errors import MachineError
from highwater.memory.capacity import CellPrediction, MemoryLimit
from highwater.memory.formula.constants import LIKELY_FILLED_SHARE
from highwater.memory.formula.formula import likely_footprint
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
from highwater.nouns.codec import INDEX_BYTES, digest, from_json, read_file, write_whole
from highwater.nouns.events import EventLog, TraceOrder
from highwater.nouns.hardware import Kernel
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.study import Question
from highwater.nouns.trial import TrialEndedError, TrialSpec
from highwater.trials.job import Job
from highwater.trials.probe import (
    INSTALL_HINT,
    package_obstacles,
    probe,
    refuse_missing_package,
    versions_of,
)
from highwater.trials.trial_process import private_folder, trial_environment

Tracer = Callable[[TrialSpec], EventLog]
"""Gives the events of a trial's fullest rank; called from two threads at once."""


def predict_traced(
    question: Question,
    memory_limit: MemoryLimit,
    tracer: Tracer,
    calibration: Calibration | None = None,
) -> tuple[CellPrediction, ...]:
    """Every cell of the question, in its order; raises what the tracer raises.

    The host's memory is the formula's: only a GPU's is traced. A cell takes two traces where the
    formula begins at the edge, two more where it does not and the line through the first two aims
    well; and with a calibration one more for each length that fits if the prediction is right, but
    not at the upper end.
    """
    found: list[CellPrediction] = []
    for cell in question.cells:
        factors = calibration and calibration.of(cell.settings.allocator)
        traces = CellTraces(
            formula=FormulaPredictor(likely_footprint, question, cell, memory_limit),
            tracer=tracer,
            factors=factors,
        )
        try:
            found.append(predict_cell(traces.predictor, factors))
        finally:  # who owns the tracer ends what is tracing
            traces.pool.shutdown(wait=False, cancel_futures=True)
    return tuple(found)


@dataclass(slots=True, kw_only=True)
class CellTraces:
    """Traces of one cell, each made once, two at a time; and the predictor that replays them."""

    formula: FormulaPredictor
    tracer: Tracer
    factors: Factors | None
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=2))
    predictor: ReplayPredictor = field(init=False)
    _begun: dict[int, Future[ScaledTrace]] = field(default_factory=dict[int, Future[ScaledTrace]])

    def __post_init__(self) -> None:
        """Make the predictor."""
        self.predictor = ReplayPredictor(
            formula=self.formula,
            replay=Replays(self._replay),
            alive=self._alive,
            aim=self._aim,
        )

    def begin(self, *indices: int) -> None:
        """Trace these soon, as far as they are on the grid."""
        question, cell = self.formula.question, self.formula.cell
        for index in indices:
            if 1 <= index <= max(1, question.size_of(cell)) and index not in self._begun:
                spec = question.trial(cell, question.grid.length(index))
                self._begun[index] = self.pool.submit(self._traced, spec)

    def _traced(self, spec: TrialSpec) -> ScaledTrace:
        return coded(self.tracer(spec))

    def trace(self, length_tokens: int) -> ScaledTrace:
        """The events of a length; raises what the tracer raises."""
        index = self.formula.question.grid.index_at_most(length_tokens)
        self.begin(index)
        return self._begun[index].result()

    def _replay(self, length_tokens: int, capacity_bytes: int | None) -> tuple[Replayed, int]:
        return replay_trace(
            *(self.trace(length_tokens), length_tokens),
            allocator=self.formula.cell.settings.allocator,
            capacity_bytes=capacity_bytes,
            workspaces_bytes=self.formula.memory_limit.cublas_workspaces_bytes,
        )

    def _alive(self, length_tokens: int, number: int) -> tuple[Alive, ...]:
        return alive_at(self.trace(length_tokens), length_tokens, number)

    def _fits(self, index: int) -> bool:
        """Whether a length fits; where it does, but not surely, the next shorter one is begun."""
        question, room_bytes = self.formula.question, self.formula.memory_limit.device_bytes
        length_tokens = question.grid.length(index)
        if not self.predictor.at(length_tokens, room_bytes).fits:
            return False
        if not self.predictor.at(length_tokens, self.formula.sure_bytes(self.factors)).fits:
            self.begin(max(index - 1, next(question.packed_alike(self.formula.cell, index))[0]))
        return True

    def _aim(self, start: int) -> int:
        """The index of the edge by the line of allocated bytes through two traces next to the
        formula's ``start``, unless that is right; the traces of both sides of it are begun. The
        edge may be ten steps away, and is not looked for step by step.
        """
        formula = self.formula
        question, cell, limit = formula.question, formula.cell, formula.memory_limit
        size = max(1, question.size_of(cell))
        ranges = question.packed_alike(cell, size)
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
"""Seconds that a trace may take: it takes seconds to minutes, by the layers, not the tokens."""


class CachedTracer:
    """Traces the fullest rank of a trial, or remembers. Leaving its context ends what is still
    tracing: nothing of it runs any more afterwards.
    """

    def __init__(
        self,
        directory: Path,
        *,
        kernel: Kernel,
        on_trace: Callable[[TrialSpec], None] | None = None,
    ) -> None:
        """Keep traces in ``directory``; ``on_trace`` is told each trial that has to be traced.

        Raises MachineError where nothing can be traced.
        """
        obstacles = package_obstacles(probe())
        if obstacles:
            raise MachineError(
                f"nothing can be traced here: {'; '.join(obstacles)}", hint=INSTALL_HINT
            )
        self._directory = directory
        self._kernel: Kernel = kernel
        self._on_trace = on_trace
        self._ended = Event()
        self._asked = Lock()
        self._making: dict[Path, Lock] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for making in tuple(self._making.values()):
            making.acquire()  # whoever traces lets go when its process is gone; nobody begins anew
            making.release()

    def __call__(self, spec: TrialSpec) -> EventLog:
        """Trace a rank's allocations. Raises MachineError where the tracer or a package fails."""
        refuse_missing_package(spec.settings)
        order, path = self._place(spec)
        with self._asked:
            making = self._making.setdefault(path, Lock())
        with making:  # whoever asks the same meanwhile waits for it
            kept = _read(path)
            if kept is not None:
                return kept
            if self._ended.is_set():
                raise TrialEndedError
            if self._on_trace is not None:
                self._on_trace(spec)
            text = self._trace(order)
            with suppress(OSError):  # what cannot be kept is made again
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, gzip.compress(text, compresslevel=1))
            return from_json(text, EventLog)

    def unmade(self, specs: Iterable[TrialSpec]) -> set[Path]:
        """Paths of the traces of these trials that are not there yet: one where they are alike."""
        return {path for _, path in map(self._place, specs) if not path.exists()}

    def _place(self, spec: TrialSpec) -> tuple[TraceOrder, Path]:
        order = TraceOrder(
            spec=_whatever_is_allocated(spec), rank=fullest_rank(spec), kernel=self._kernel
        )
        return order, self._directory / f"{_key(order)}.json.gz"

    def _trace(self, order: TraceOrder) -> bytes:
        job = Job(
            module=_TRACER,
            order=order,
            report=msgspec.Raw,  # what is kept, byte for byte
            # A GPU that is here has nothing to do with the GPUs that are meant.
            environment={**trial_environment(order.spec), "CUDA_VISIBLE_DEVICES": ""},
            timeout_s=_TIMEOUT_S,
            failure="the tracer failed",
            late="a trace",
            hint="leave `--exact` out: the formula needs no trace",
        )
        with private_folder() as folder:
            return bytes(job.run(folder, ended=self._ended))


def fullest_rank(spec: TrialSpec) -> int:
    """The last of the ranks that share a sequence.

    The first have its prompt, which is not trained on.
    """
    return spec.layout.context_degree - 1


def _whatever_is_allocated(spec: TrialSpec) -> TrialSpec:
    """The trial without what changes no event.

    The allocator replays events, saves follow the last step, and hyperparameters take no memory.
    """
    settings = msgspec.structs.replace(
        spec.settings, allocator="native", checkpoint="none", save_hf="never"
    )
    return msgspec.structs.replace(
        spec,
        settings=settings,
        hyperparameters=Hyperparameters(),
        memory_budget_bytes=None,
        checkpoint_directory=None,
        memory_snapshots=None,
        statistics=None,
    )


def _key(order: TraceOrder) -> str:
    # Wherever the model lies: its config is what a trace depends on.
    nowhere = msgspec.structs.replace(order.spec, model_directory="")
    named = msgspec.structs.replace(order, spec=nowhere)
    return digest((named, _versions(), _sources()))


@cache
def _versions() -> dict[str, str]:
    return probe().versions | versions_of(("peft", "torchao", "bitsandbytes"))


@cache
def _sources() -> str:
    """Name the code that a trace is made with. A page, a search or a command has no part in it."""
    return imported_digest(_TRACER, package=Path(__file__).parents[1])


def _read(path: Path) -> EventLog | None:
    """The trace that was kept; None where there is none, or a damaged one, which is made again."""
    try:
        return from_json(gzip.decompress(read_file(path, most_bytes=INDEX_BYTES)), EventLog)
    except (OSError, EOFError, zlib.error, msgspec.MsgspecError):
        return None


_ONLY_TYPES = ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imported_digest(module: str, package: Path) -> str:
    """Name the code that running ``module`` imports: 16 digits, others once one of
    ``imported_files`` changes.
    """
    return digest(
        [
            (str(path.relative_to(package)), path.read_text(encoding="utf-8"))
            for path in imported_files(module, package)
        ]
    )


def imported_files(module: str, package: Path) -> tuple[Path, ...]:
    """Files of the package in this folder that running ``module`` may import, sorted: its own, and
    what those import, wherever in a file it says so, with the ``__init__`` of every folder between.

    An import under ``if TYPE_CHECKING`` never runs, and is not followed.
    """
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _file(name, package)
        if name in found or path is None:
            continue
        found[name] = path
        waiting += _with_folders(name)
        for node in _nodes_that_run(ast.parse(path.read_bytes())):
            waiting += _imported_names(node, of=module.partition(".")[0])
    return tuple(sorted(found.values()))


def _file(name: str, package: Path) -> Path | None:
    """The file of a module; None for a name that is no module, as a function's."""
    *folders, last = (package.name, *name.split(".")[1:])
    base = package.parent.joinpath(*folders, last)
    for path in (base / "__init__.py", base.with_name(f"{last}.py")):
        if path.is_file():
            return path
    return None


def _nodes_that_run(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node below ``tree``, without the branches that only a type checker reads."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test) in _ONLY_TYPES:
            for other in child.orelse:
                yield other
                yield from _nodes_that_run(other)
        else:
            yield child
            yield from _nodes_that_run(child)


def _imported_names(node: ast.AST, *, of: str) -> Iterator[str]:
    """Modules of the package ``of`` that a statement imports, and what may be ones: ``from a import
    b`` imports ``a``, and ``a.b`` where that is a module.
    """
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module is not None:  # all are absolute here
        names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    else:
        return
    yield from (name for name in names if name.partition(".")[0] == of)


def _with_folders(name: str) -> Iterator[str]:
    """The packages that a module lies in, which are imported before it."""
    while name := name.rpartition(".")[0]:
        yield name

"""The tracer in a process of its own, whose traces are kept for the next time, under the digest of
the code that made them: its imports are read, not run, so that nothing heavy is loaded to know
them. What a file only loads by a name in a string is not among them.
"""

import ast
import gzip
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Event, Lock
from typing import Self

import msgspec

from highwater.errors import MachineError
from highwater.nouns.codec import digest, from_json
from highwater.nouns.events import EventLog, TraceOrder
from highwater.nouns.files import INDEX_BYTES, read_file
from highwater.nouns.hardware import Kernel
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.protocols import TrialEndedError
from highwater.nouns.trial import TrialSpec
from highwater.trials.job import Job
from highwater.trials.probe import (
    INSTALL_HINT,
    package_obstacles,
    probe,
    refuse_missing_package,
    versions_of,
)
from highwater.trials.trial_process import private_folder, trial_environment

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
                _write(path, text)
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


def _write(path: Path, text: bytes) -> None:
    """Write a file whole or not at all, whoever else writes the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as file:
        partial = Path(file.name)
        try:
            file.write(gzip.compress(text, compresslevel=1))
            file.flush()
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise

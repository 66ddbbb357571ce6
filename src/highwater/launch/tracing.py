"""Tracing: the tracer in a process of its own, and what it wrote kept for whoever asks the same again."""

import gzip
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Self

import msgspec

from highwater.errors import MachineError
from highwater.launch.leash import module, on_leash
from highwater.launch.local import trial_environment
from highwater.launch.private_folder import private_folder
from highwater.launch.probe import INSTALL_HINT, package_obstacles, probe
from highwater.spec.codec import digest, from_json, to_json
from highwater.spec.events import EventLog, TraceOrder
from highwater.spec.hardware import Kernel
from highwater.spec.hyperparameters import Hyperparameters
from highwater.spec.trial import TrialSpec

_TIMEOUT_S = 1800.0
"""A trace takes seconds to minutes: the layers, not the tokens, tell."""
_TAIL_LINES = 3
_FORMULA_HINT = "leave `--exact` out: the formula needs no trace"


def trace_directory(environment: Mapping[str, str]) -> Path:
    """Where traces are kept: ``$XDG_CACHE_HOME/highwater/traces``, by default below ``~/.cache``."""
    base = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base, "highwater", "traces")


class CachedTracer:
    """Traces the fullest rank of a trial, or remembers. Leaving its context ends the processes that are still tracing."""

    def __init__(self, directory: Path, *, kernel: Kernel, on_trace: Callable[[TrialSpec], None] | None = None) -> None:
        """``on_trace`` hears of each trace that has to be made; raises MachineError where none can be."""
        obstacles = package_obstacles(probe())
        if obstacles:
            raise MachineError(f"nothing can be traced here: {'; '.join(obstacles)}", hint=INSTALL_HINT)
        self._directory = directory
        self._kernel: Kernel = kernel
        self._on_trace = on_trace
        self._running: set[subprocess.Popen[str]] = set()
        self._asked = Lock()
        self._making: dict[Path, Lock] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in tuple(self._running):
            process.terminate()

    def __call__(self, spec: TrialSpec) -> EventLog:
        """What the rank allocates and frees. Raises MachineError where the tracer fails."""
        order, path = self._place(spec)
        with self._asked:
            making = self._making.setdefault(path, Lock())
        with making:  # who asks the same meanwhile waits for it
            kept = _read(path)
            if kept is not None:
                return kept
            if self._on_trace is not None:
                self._on_trace(spec)
            text = self._trace(order)
            with suppress(OSError):  # what cannot be kept is made again
                _write(path, text)
            return from_json(text, EventLog)

    def unmade(self, specs: Iterable[TrialSpec]) -> set[Path]:
        """Where the traces of these trials will be kept that are not there yet: trials that allocate the same have one."""
        return {path for _, path in map(self._place, specs) if not path.exists()}

    def _place(self, spec: TrialSpec) -> tuple[TraceOrder, Path]:
        order = TraceOrder(spec=_whatever_is_allocated(spec), rank=fullest_rank(spec), kernel=self._kernel)
        return order, self._directory / f"{_key(order)}.json.gz"

    def _trace(self, order: TraceOrder) -> bytes:
        with private_folder() as folder:
            source, target = folder / "order.json", folder / "events.json"
            source.write_text(to_json(order), encoding="utf-8")
            # A GPU that is here has nothing to do with the GPUs that are meant.
            environment = {**trial_environment(order.spec), "CUDA_VISIBLE_DEVICES": ""}
            # Whatever ends this process ends the tracer.
            command = on_leash(module("highwater.engine.tracer", str(source), str(target)), inherit=[folder])
            log = folder / "log"
            with log.open("w") as talk, subprocess.Popen(command, stdout=talk, stderr=talk, text=True, env=environment) as process:
                self._running.add(process)
                try:
                    process.wait(_TIMEOUT_S)
                except subprocess.TimeoutExpired as error:
                    process.terminate()
                    raise MachineError(f"a trace took more than {_TIMEOUT_S:.0f} s", hint=_FORMULA_HINT) from error
                finally:
                    self._running.discard(process)
            if not target.is_file():
                tail = " / ".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_TAIL_LINES:])
                raise MachineError(f"the tracer ended with exit code {process.returncode}: {tail}", hint=_FORMULA_HINT)
            return target.read_bytes()


def fullest_rank(spec: TrialSpec) -> int:
    """The last of those that share a sequence: the first have its prompt, which is not trained on."""
    return spec.layout.context_degree - 1


def _whatever_is_allocated(spec: TrialSpec) -> TrialSpec:
    """The trial without what changes no event: the allocator replays them, saves follow the last step, and numbers are none."""
    settings = msgspec.structs.replace(spec.settings, allocator="native", checkpoint="none", save_hf="never")
    usual = Hyperparameters()
    return msgspec.structs.replace(
        spec, settings=settings, hyperparameters=usual, memory_budget_bytes=None, checkpoint_directory=None
    )


def _key(order: TraceOrder) -> str:
    named = msgspec.structs.replace(order, spec=msgspec.structs.replace(order.spec, model_directory=""))
    return digest((named, _versions(), _sources()))


@cache
def _versions() -> dict[str, str]:
    return probe().versions


@cache
def _sources() -> str:
    """Of the whole package: what is traced calls most of it."""
    root = Path(__file__).parents[1]
    return digest([(str(path.relative_to(root)), path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.py"))])


def _read(path: Path) -> EventLog | None:
    """What was kept; None where nothing was, or where it is damaged: then it is made again."""
    try:
        return from_json(gzip.decompress(path.read_bytes()), EventLog)
    except (OSError, EOFError, zlib.error, msgspec.MsgspecError):
        return None


def _write(path: Path, text: bytes) -> None:
    """Whole or not at all, whoever else writes the same."""
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

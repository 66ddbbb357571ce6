"""What runs on a node of a Ray cluster, in a process that Ray starts there: the reading of the
node, and the trial that it holds. Ray brings this package there. The messages that carry both cross
between the control plane and the process that drives the cluster.
"""

import os
import shutil
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple, Protocol

import msgspec

from highwater.errors import HighwaterError, MachineError
from highwater.nouns.files import open_regular, read_file
from highwater.nouns.hardware import Machine, refuse_unfit_gpu
from highwater.nouns.protocols import Launch, Launcher, TrialEndedError
from highwater.nouns.trial import TrialResult
from highwater.trials.inputs import ModelFiles
from highwater.trials.probe import (
    OLDEST,
    package_obstacles,
    probe,
    refuse_torch_without_gpu,
    versions_of,
)
from highwater.trials.ray_placement import Node, Wanted
from highwater.trials.trial_process import log_path_of, private_folder
from highwater.units import MIB

FORGOTTEN_S = 120.0
"""Seconds without a question after which a trial ends: a node that does not answer for half as long
is taken for lost."""
_WATCHED_S = 1.0
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MOST_FILE_BYTES = 256 * MIB
"""Bytes of one file that a trial left beside its log, at the most; a larger one stays, and goes
with its folder."""
_CHUNK_BYTES = 4 * MIB


class LauncherIn(Protocol):
    """Makes the launcher of trials whose logs go into a folder."""

    def __call__(self, *, log_directory: Path) -> Launcher:
        """The launcher."""
        ...


class NodeReading(NamedTuple):
    """What a process read of the node that it runs on."""

    machine: Machine
    problem: str | None
    """Why no trial can run there; None where one can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What the trials of a search need on each node."""

    on_gpus: bool
    model: ModelFiles
    data_module: str | None = None
    """The user's module that yields batches, if any."""
    is_engine: bool = True
    """Whether this package's engine trains, not another trainer."""
    program: str | None = None
    """The program of another trainer's command, if one is named."""


class Refusal(NamedTuple):
    """An error for the user, as it crosses processes."""

    kind: str
    problem: str
    hint: str

    def error(self) -> HighwaterError:
        """The error again."""
        kinds = {kind.__name__: kind for kind in HighwaterError.__subclasses__()}
        return kinds.get(self.kind, HighwaterError)(self.problem, hint=self.hint)


class TrialEnd(NamedTuple):
    """The end of a trial: one of its result, a refusal, the text of an error, or nothing of all
    that where it was ended.
    """

    result: TrialResult | None = None
    refusal: Refusal | None = None
    error: str | None = None
    files: tuple[tuple[str, bytes], ...] = ()
    """What the trial left beside its log: by what follows the log's own name, less its suffix."""


class Told(NamedTuple):
    """What a trial says of itself while it runs."""

    phase: str
    log: bytes
    """What its log has after what is known of it."""
    end: TrialEnd | None
    """None while it runs."""


def read_node(gpus: int, needs: Needs) -> NodeReading:
    """Read the node that this runs on, of which Ray hands out so many GPUs."""
    # Ray hides the GPUs of a process that asked for none.
    shown = os.environ.pop(_VISIBLE, None)
    try:
        machine = probe()
        machine = msgspec.structs.replace(
            machine, gpus=machine.gpus[:gpus], versions={**machine.versions, **versions_of(OLDEST)}
        )
        return NodeReading(machine, _obstacle(machine, gpus, needs))
    finally:
        if shown is not None:
            os.environ[_VISIBLE] = shown


def _obstacle(machine: Machine, gpus: int, needs: Needs) -> str | None:
    """Why no trial can run on the machine, in a line; None where one can."""
    obstacles = package_obstacles(machine) if needs.is_engine else ()
    if obstacles:
        return "; ".join(obstacles)
    if needs.program is not None and shutil.which(needs.program) is None:
        return f"the command's program {needs.program!r} is not found there"
    module = needs.data_module
    if module is not None and find_spec(module.partition(".")[0]) is None:
        return f"it has no module {module}"
    if needs.on_gpus and gpus:
        try:
            _check_gpus(machine, gpus)
            if needs.is_engine:
                refuse_torch_without_gpu(machine)
        except MachineError as error:
            return error.problem
    return needs.model.missing()


def _check_gpus(machine: Machine, gpus: int) -> None:
    names = {gpu.name for gpu in machine.gpus}
    if len(machine.gpus) < gpus or len(names) > 1:
        seen = ", ".join(sorted(names)) or "none"
        raise MachineError(f"Ray hands out {gpus} GPUs, its driver shows: {seen}", hint="")
    for gpu in machine.gpus:
        refuse_unfit_gpu(gpu.name, gpu.compute_capability)


class TrialOnNode:
    """One trial on this node, in a process of its own, whose death ends the trial's processes."""

    def __init__(self) -> None:
        self._phase = "starting"
        self._ended = Event()
        self._log_path: Path | None = None
        self._whole_log: bytes | None = None
        """The log, once its file is gone."""
        self._end: TrialEnd | None = None
        self._asked_at = time.monotonic()
        Thread(target=self._watch, args=(os.getppid(),), daemon=True).start()

    def run(self, launcher_in: LauncherIn, launch: Launch, model: ModelFiles) -> None:
        """Run the trial; ``tell`` has its end, and the rest of its log."""
        with private_folder(kind="ray-") as folder:
            directory = str(model.placed(folder / "model"))
            spec = msgspec.structs.replace(launch.spec, model_directory=directory)
            launch = msgspec.structs.replace(launch, spec=spec)
            self._log_path = log_path_of(folder / "logs", spec, "rung")
            end = self._run(launcher_in(log_directory=folder / "logs"), launch)
            files = tuple(_beside(self._log_path))
            self._whole_log = _whole(self._log_path)
        self._end = end._replace(files=files)

    def tell(self, known_bytes: int) -> Told:
        """What the trial is doing, and its log after the bytes that are known."""
        self._asked_at = time.monotonic()
        end, whole = self._end, self._whole_log
        if whole is not None:
            return Told(self._phase, whole[known_bytes:], end)
        path = self._log_path
        return Told(self._phase, b"" if path is None else _after(path, known_bytes), None)

    def end(self) -> None:
        """End the trial at once."""
        self._ended.set()

    def _watch(self, ray: int) -> None:
        """End this process, and the reaper with it the trial, when what Ray runs on the node is
        gone, whose process ``ray`` is, or when nobody asks any more: the trial is taken for lost,
        and its GPUs must be free.
        """
        while os.getppid() == ray and time.monotonic() - self._asked_at < FORGOTTEN_S:
            time.sleep(_WATCHED_S)
        os._exit(1)

    def _run(self, launcher: Launcher, launch: Launch) -> TrialEnd:
        try:
            gpus = None if launch.spec.device == "cpu" else assigned_gpus(launch.spec.layout.gpus)
            result = launcher.launch(launch, gpus=gpus, ended=self._ended, on_phase=self._hear)
        except TrialEndedError:
            return TrialEnd()
        except HighwaterError as error:
            return TrialEnd(refusal=Refusal(type(error).__name__, error.problem, error.hint))
        except Exception:  # noqa: BLE001 - the edge of a process: all of it goes to who waits
            return TrialEnd(error=traceback.format_exc())
        return TrialEnd(result=result)

    def _hear(self, phase: str) -> None:
        self._phase = phase


def assigned_gpus(count: int) -> tuple[str, ...]:
    """So many of the GPUs that Ray has assigned to this process, as its driver numbers them; a
    trial that runs alone on its node is assigned all of them.
    """
    import ray

    assigned = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return tuple(assigned[:count])


def _whole(path: Path) -> bytes:
    try:
        return read_file(path, most_bytes=_MOST_FILE_BYTES)
    except OSError:
        return b""


def _after(path: Path, known_bytes: int) -> bytes:
    """What a file has after its first bytes; nothing where it is not there."""
    try:
        with open_regular(path) as file:
            file.seek(known_bytes)
            return file.read(_CHUNK_BYTES)
    except OSError:
        return b""


def _beside(log_path: Path) -> Iterator[tuple[str, bytes]]:
    """The files that a trial left beside its log, called as the log is but for the end."""
    for path in sorted(log_path.parent.rglob("*")):
        name = str(path.relative_to(log_path.parent))
        if path == log_path or not path.is_file() or not name.startswith(log_path.stem):
            continue
        if path.stat().st_size <= _MOST_FILE_BYTES:
            yield name.removeprefix(log_path.stem), path.read_bytes()


class Join(NamedTuple):
    """Join the cluster at an address."""

    address: str


class Joined(NamedTuple):
    """The cluster was joined, or why not."""

    refusal: str | None = None


class ReadNodes(NamedTuple):
    """Read every node that is not among these."""

    needs: Needs
    but_not: frozenset[str] = frozenset()


class NodesRead(NamedTuple):
    """The nodes that were read, and the ids of all that are alive."""

    nodes: tuple[Node, ...]
    alive: frozenset[str]


class Start(NamedTuple):
    """Start a trial."""

    trial: int
    wanted: Wanted
    launcher_in: LauncherIn
    launch: Launch
    model: ModelFiles


class End(NamedTuple):
    """End a trial at once."""

    trial: int


class Placed(NamedTuple):
    """A trial has its node."""

    trial: int
    node_id: str


class Runs(NamedTuple):
    """A trial runs: what it is doing, and what its log has got since."""

    trial: int
    phase: str
    log: bytes


class Ended(NamedTuple):
    """A trial has ended, with all its processes."""

    trial: int
    end: TrialEnd


class Lost(NamedTuple):
    """A trial was lost with the process that held it."""

    trial: int
    node_id: str | None
    reason: str
    is_node: bool
    """Whether its node is gone."""

"""The environment of a trial on this machine: free GPUs, variables that do not change its memory, a
log, and folders that only its user can read.

A process killed by -9 together with its reaper cannot clean up: the next start does. Our folders
have a lock file, which the kernel keeps locked while the process that made it lives; a folder
without one, or of another user, is never touched.
"""

import fcntl
import os
import shutil
import stat
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Event
from typing import IO, Literal, NamedTuple

from highwater.errors import MachineError
from highwater.nouns.environment import ALLOCATOR_VARIABLES, allocator_environment
from highwater.nouns.settings import Allocator
from highwater.nouns.trial import Launch, OnPhase, TrialResult, TrialSpec, kept_result
from highwater.trials.probe import busy_gpus, probe, refuse_busy_gpus
from highwater.units import MIB

_RELEASE_S = 60.0


@contextmanager
def trial_place(
    spec: TrialSpec,
    gpus: tuple[str, ...] | None,
    *,
    allow_busy: bool,
    log_directory: Path,
    flag: str = "--log-dir",
) -> Generator[None]:
    """Context manager: check before and after the block that the GPUs of a trial are free; ``gpus``
    as for ``Launcher.launch``, and ``flag`` names the directory in a hint.

    Raises MachineError if another user has the GPUs (not with ``allow_busy``), if the driver does
    not take their memory back, and for files that cannot be written.
    """
    is_watched = spec.device == "cuda" and not allow_busy
    if is_watched:
        refuse_busy_gpus(probe(gpus), count=spec.layout.machine_gpus)
    try:
        yield
    except OSError as error:
        raise MachineError(
            f"the ranks could not be started, or what they say not recorded: {error}",
            hint=f"make room and check the rights of {log_directory}, or use another `{flag}`",
        ) from error
    if is_watched:
        await_release(gpus, spec.layout.machine_gpus)


def await_release(gpus: tuple[str, ...] | None, count: int) -> None:
    """Wait until the driver has taken a trial's memory back; MachineError after ``_RELEASE_S``."""
    deadline = time.monotonic() + _RELEASE_S
    while busy_gpus((machine := probe(gpus)).gpus[:count]):
        if time.monotonic() > deadline:
            refuse_busy_gpus(machine, count=count)
        time.sleep(0.2)


_NOT_INHERITED = (
    *ALLOCATOR_VARIABLES,
    *("PYTORCH_HIP_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "CUDA_LAUNCH_BLOCKING"),
    *("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "NCCL_BUFFSIZE", "PYTHONOPTIMIZE"),
    *("TORCH_DISTRIBUTED_DEBUG", "RANK", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NCCL_COMM_ID"),
)
"""Variables of the user's shell that trials do not inherit. They would change a trial's memory or
its checks, or make it join another job or listen for one."""
_NOT_INHERITED_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_ASYNC", "ROLE_", "PET_")
"""Prefixes of more such variables, which training operators set in every pod."""
ON_THE_CPU = {
    "CUDA_VISIBLE_DEVICES": "",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(MIB),
    "THP_MEM_ALLOC_ENABLE": "1",
    "OMP_WAIT_POLICY": "passive",
}
"""Variables for measurements on the CPU. With one arena and a fixed threshold, a freed tensor goes
back to the system at once, and the same trial ends the same way. Pages of 2 MiB: touching new
tensors page by page took a third of a trial's processor time. Waiting threads sleep: spinning ones
would take cores from other processes and distort times."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the network interface through which ranks talk."""
_LOOPBACK = "lo"
"""The network interface that nobody else can reach."""


def trial_environment(spec: TrialSpec, gpus: tuple[str, ...] | None = None) -> dict[str, str]:
    """Environment of a trial's processes: the user's without variables that change memory use, plus
    those of the trial's settings. ``gpus``: the visible GPUs; None: this process's.
    """
    environment = clean_environment(spec.settings.allocator)
    if (spec.layout.machines or 1) > 1:  # other machines are not reached by the loopback
        for name in _INTERFACES:
            environment.pop(name)
            environment |= {name: os.environ[name]} if name in os.environ else {}
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    cores = len(os.sched_getaffinity(0))
    environment["OMP_NUM_THREADS"] = str(max(1, cores // spec.layout.gpus))
    if spec.device == "cpu":
        environment |= ON_THE_CPU
    return environment


def clean_environment(allocator: Allocator) -> dict[str, str]:
    """The user's environment without variables that change GPU memory; sets ``allocator``."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_INHERITED and not name.startswith(_NOT_INHERITED_PREFIXES)
    }
    environment |= allocator_environment(allocator)
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    # The driver's own order, in which the probe counts GPUs.
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    # The ranks of one machine talk through its memory; a port, if they need one, is on the
    # loopback.
    environment |= dict.fromkeys(_INTERFACES, _LOOPBACK)
    return environment


LogLayout = Literal["rung", "published"]

_TAIL_BYTES = 256 * 1024


def log_path_of(log_directory: Path, spec: TrialSpec, layout: LogLayout) -> Path:
    """Path of a trial's log: ``LOG_DIR/<model>/gpu-<N>/sp-<S>/<rung>/model_len-<L>.log``;
    published: without ``<rung>/``. A foreign trainer's name stands before the rung.
    """
    folder = log_directory / spec.model_name / f"gpu-{spec.layout.gpus}" / spec.layout.slug
    if layout == "rung":
        by = "" if spec.foreign is None else f"{spec.foreign.trainer}+"
        folder /= f"{by}{spec.settings.slug}"
    return folder / f"model_len-{spec.length_tokens}.log"


@contextmanager
def new_log(wanted: Path) -> Generator[IO[bytes]]:
    """Open a new file at ``wanted``, or at a free ``.attempt-N`` beside it: none is overwritten."""
    path, attempt = wanted, 1
    while (log := _opened(path)) is None:
        attempt += 1
        path = wanted.with_suffix(f".attempt-{attempt}.log")
    with log:
        yield log


def _opened(path: Path) -> IO[bytes] | None:
    """Open a new file; None if it exists: another trial may have made it just now."""
    if statistics_path(path).exists():
        return None
    try:
        return path.open("x+b")
    except FileExistsError:
        return None


def statistics_path(log_path: Path) -> Path:
    """Path of a trial's statistics, beside its log."""
    return log_path.with_suffix(".statistics.jsonl")


def log_tail(log: IO[bytes], most_bytes: int = _TAIL_BYTES) -> str:
    """The end of an open log. It need not exist any more: its writer may have removed it."""
    start = max(0, os.fstat(log.fileno()).st_size - most_bytes)
    return os.pread(log.fileno(), most_bytes, start).decode("utf-8", errors="replace")


class OneLaunch(NamedTuple):
    """A trial with its open log and the arguments that it was launched with."""

    spec: TrialSpec
    log: IO[bytes]
    gpus: tuple[str, ...] | None
    timeout_s: float
    ended: Event
    on_phase: OnPhase


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLauncher(ABC):
    """Launches trials on this machine, each in new processes and with its own log."""

    log_directory: Path
    timeout_s: float
    """Longest time of one trial from launch to exit, unless the launch has its own."""
    log_layout: LogLayout = "rung"
    allow_busy: bool = False
    """True if trials may run on GPUs that others use too."""

    def launch(
        self, launch: Launch, *, gpus: tuple[str, ...] | None, ended: Event, on_phase: OnPhase
    ) -> TrialResult:
        """Run a trial; see ``Launcher.launch``."""
        spec, began = launch.spec, time.monotonic()
        place = trial_place(
            spec, gpus, allow_busy=self.allow_busy, log_directory=self.log_directory
        )
        with place:
            wanted = log_path_of(self.log_directory, spec, self.log_layout)
            wanted.parent.mkdir(parents=True, exist_ok=True)
            timeout_s = self.timeout_s if launch.timeout_s is None else launch.timeout_s
            with new_log(wanted) as log:
                result = self._run(OneLaunch(spec, log, gpus, timeout_s, ended, on_phase))
        attempt, wall_s = launch.attempt, time.monotonic() - began
        return kept_result(result.replace(wall_s=wall_s, attempt=attempt, log_path=log.name))

    @abstractmethod
    def _run(self, one: OneLaunch) -> TrialResult:
        """Run a trial to its end and classify it."""


_PREFIX = "highwater-"
_LOCK = ".made-by-highwater"


def cache_directory(name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """The folder ``$XDG_CACHE_HOME/highwater/NAME``, by default in ``~/.cache``."""
    base = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base, "highwater", name)


@contextmanager
def private_folder(parent: Path | None = None, *, kind: str = "") -> Generator[Path]:
    """Context manager: make a folder below ``parent`` (default: the system's temporary folder), and
    remove it with its content at the end. ``kind`` becomes part of its name. The first use of a
    parent also removes folders there that killed processes left.
    """
    parent = (parent or Path(tempfile.gettempdir())).resolve()
    _remove_what_is_left(parent)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}", dir=parent))
    lock = None
    try:
        lock = _locked(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the reaper may be removing it, too
        if lock is not None:
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """Lock the folder for the life of this process; None if the file system has no locks."""
    unnamed = folder / f"{_LOCK}.new"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    unnamed.rename(folder / _LOCK)  # only now: no process finds a lock file that is not held yet
    return lock


@cache
def _remove_what_is_left(parent: Path) -> None:
    """Remove the folders that killed processes left below ``parent``."""
    with suppress(OSError):
        for folder in parent.glob(f"{_PREFIX}*"):
            with suppress(OSError):
                _remove_if_left(folder)


def _remove_if_left(folder: Path) -> None:
    """Remove a folder of this user that no process holds; raises OSError for anything else."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)

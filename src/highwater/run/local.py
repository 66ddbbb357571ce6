"""LocalRunner: a trial as fresh processes on this machine, of which nothing is left running.

It goes from a clean environment to a classified result.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal

import msgspec

from highwater.errors import HighwaterError, MachineError
from highwater.run.classify import Ending, classify
from highwater.run.kernel_kills import kernel_kills
from highwater.run.private_folder import private_folder
from highwater.run.probe import busy_gpus, probe, refuse_busy_gpus
from highwater.run.ranks import read_exits
from highwater.run.reaper import module, under_reaper
from highwater.spec.allocator_variables import ALLOCATOR_VARIABLES, allocator_environment
from highwater.spec.codec import from_json, to_json
from highwater.spec.files import read_file
from highwater.spec.flops import step_flops
from highwater.spec.hardware import kind_of
from highwater.spec.model import load_model
from highwater.spec.profiling import Profiling, SnapshotOrder
from highwater.spec.secrets import kept_report, kept_result
from highwater.spec.settings import Allocator
from highwater.spec.trial import (
    PHASE_FILE,
    Outcome,
    RankReport,
    StatisticsFiles,
    TrialResult,
    TrialSpec,
)
from highwater.store.trial_snapshots import snapshot_folder
from highwater.units import MIB

LogLayout = Literal["rung", "published"]

_REPORT_BYTES = 16 * MIB
"""Bytes of one rank's report at the most: one of 100,000 steps has 6 MiB."""
_TAIL_BYTES = 256 * 1024
_PHASE_BYTES = 1024
_TOLD_S = 0.5
_RELEASE_S = 60.0
_END_S = 30.0
_NOT_INHERITED = (
    *ALLOCATOR_VARIABLES,
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUDA_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "NCCL_BUFFSIZE",
    "PYTHONOPTIMIZE",
    "TORCH_DISTRIBUTED_DEBUG",
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NCCL_COMM_ID",
)
"""Variables of the user's shell that trials do not inherit.

They would change a trial's memory or its checks, or make it join another job or listen for one.
"""
_NOT_INHERITED_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_ASYNC", "ROLE_", "PET_")
"""Beginnings of such variables, which training operators set in every pod."""
ON_THE_CPU = {
    "CUDA_VISIBLE_DEVICES": "",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(MIB),
}
"""Variables of what is measured on the CPU. One arena and a fixed threshold: a freed tensor goes
back to the system at once, and the same trial ends the same way."""
_LOOPBACK = "lo"
"""The network interface that nobody else can reach."""


class LocalRunner:
    """Runs trials on this machine, one at a time, each in fresh processes."""

    def __init__(
        self,
        *,
        log_directory: Path,
        timeout_s: float,
        log_layout: LogLayout = "rung",
        allow_busy: bool = False,
        checkpoint_directory: Path | None = None,
        profiling: Profiling | None = None,
        tensorboard: bool = False,
        logit_range: bool = False,
        on_phase: Callable[[str], None] | None = None,
    ) -> None:
        """Keep where logs and saves go, and the limits.

        ``timeout_s`` bounds one trial from launch to exit; ``allow_busy`` runs on GPUs that others
        use too. Below ``checkpoint_directory`` (None: beside its log) each trial that saves gets a
        directory of its own, for as long as it runs. ``profiling``: what its ranks record of their
        memory, in a folder beside its log. ``tensorboard``
            and ``logit_range`` are what its statistics have besides what costs nothing.
        ``on_phase`` hears about twice a second what the first rank of a trial is doing.
        """
        self.log_directory = log_directory
        self.checkpoint_directory = checkpoint_directory
        self.timeout_s = timeout_s
        self.log_layout: LogLayout = log_layout
        self.allow_busy = allow_busy
        self.profiling = profiling
        self.tensorboard = tensorboard
        self.logit_range = logit_range
        self._on_phase = on_phase

    # Attempts and repeats are the same to it: every launch is fresh.
    def run(self, spec: TrialSpec, *, attempt: int = 1, repeat: int = 0) -> TrialResult:  # noqa: ARG002
        """Run a trial as ``Runner`` says.

        Raises UsageError, too, for what the engine cannot do yet.
        """
        if spec.device == "cuda" and not self.allow_busy:
            refuse_busy_gpus(probe(), count=spec.layout.gpus)
        try:
            return self._run(spec, attempt=attempt)
        except OSError as error:
            raise MachineError(
                f"a trial could not be started or recorded: {error}",
                hint=f"make room and check the rights of {self.log_directory}, or use another "
                "`--log-dir`",
            ) from error

    def _run(self, spec: TrialSpec, *, attempt: int) -> TrialResult:
        log_path = _free_log_path(log_path_of(self.log_directory, spec, self.log_layout))
        log_path.parent.mkdir(parents=True, exist_ok=True)
        began, began_unix = time.monotonic(), time.time()
        kills_before = kernel_kills()
        with (
            private_folder() as folder,
            log_path.open("xb") as log,
            _with_own_directory(spec, self.checkpoint_directory or log_path.parent) as spec,
        ):
            spec = self._recorded(spec, log_path)
            spec_path, reports_path = folder / "spec.json", folder / "reports"
            spec = self._with_statistics(spec, log_path)
            spec_path.write_text(to_json(spec), encoding="utf-8")
            reports_path.mkdir()
            exit_code = self._launch(spec, spec_path, reports_path, log)
            reports, damaged_reports = read_reports(reports_path)
            exits = read_exits(folder)
        if spec.device == "cuda" and not self.allow_busy:
            _await_release(spec.layout.gpus)
        ending = Ending(
            exit_code=exit_code,
            timeout_s=self.timeout_s,
            reports=reports,
            exits=exits,
            log_tail=_tail(log_path),
            kernel_kills=kernel_kills() - kills_before,
            damaged_reports=damaged_reports,
        )
        _raise_refusal(reports)
        outcome, reason = classify(spec, ending)
        result = TrialResult(
            outcome=outcome,
            reason=reason,
            ranks=tuple(map(_without_training, reports)) if spec.is_memory_only else reports,
            launch_to_first_step_s=_until_first_step_s(reports, began_unix),
            wall_s=time.monotonic() - began,
            attempt=attempt,
            log_path=str(log_path),
            exit_code=exit_code,
        )
        return _with_speed(spec, kept_result(result))

    def _recorded(self, spec: TrialSpec, log_path: Path) -> TrialSpec:
        """The trial with a folder of its own for the snapshots of its memory, if it records any."""
        if self.profiling is None:
            return spec
        directory = snapshot_folder(log_path)
        directory.mkdir(parents=True, exist_ok=True)
        order = SnapshotOrder(directory=str(directory.resolve()), profiling=self.profiling)
        return msgspec.structs.replace(spec, memory_snapshots=order)

    def _with_statistics(self, spec: TrialSpec, log_path: Path) -> TrialSpec:
        """The trial that writes its statistics beside its log; those of a memory-only one would
        pass for a training's.
        """
        if spec.is_memory_only:
            return spec
        board = log_path.absolute().with_suffix(".tensorboard")
        files = StatisticsFiles(
            path=str(_statistics_path(log_path.absolute())),
            tensorboard_directory=str(board) if self.tensorboard else None,
            logit_range=self.logit_range,
        )
        return msgspec.structs.replace(spec, statistics=files)

    def _launch(
        self, spec: TrialSpec, spec_path: Path, reports_path: Path, log: IO[bytes]
    ) -> int | None:
        """Run the ranks under the reaper, and return its exit status; None when time was up.

        Nothing of the trial runs any more when this returns or raises.
        """
        worker = module("highwater.train.worker", str(spec_path), str(reports_path))
        remove = [] if spec.checkpoint_directory is None else [spec.checkpoint_directory]
        folder = spec_path.parent
        process = subprocess.Popen(
            under_reaper(worker, remove=remove, inherit=[folder], ranks=(spec.layout.gpus, folder)),
            env=trial_environment(spec),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C in a terminal reaches find alone, which then ends the trial in order.
            start_new_session=True,
        )
        try:
            return self._exit_code(process, reports_path / PHASE_FILE)
        finally:
            end_reaper(process)

    def _exit_code(self, process: subprocess.Popen[bytes], phase_path: Path) -> int | None:
        """Wait for the trial's end, and tell its phases meanwhile; None when time was up."""
        deadline = time.monotonic() + self.timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(left_s if self._on_phase is None else min(_TOLD_S, left_s))
            if self._on_phase is not None:
                self._on_phase(_phase(phase_path))
        return None


def _phase(path: Path) -> str:
    """What a trial says of itself."""
    try:
        return read_file(path, most_bytes=_PHASE_BYTES).decode(errors="replace")
    except OSError:
        return "starting"


@contextmanager
def _with_own_directory(spec: TrialSpec, parent: Path) -> Generator[TrialSpec]:
    """The trial with a new directory below ``parent`` to save in, if it saves.

    It is gone when this returns, with all that is in it. The reaper removes it too, should this
    process not live to do it. ``parent`` may be a user's: it is made, never removed.
    """
    if spec.settings.checkpoint == "none" and spec.settings.save_hf == "never":
        yield spec
        return
    parent.mkdir(parents=True, exist_ok=True)
    with private_folder(parent, kind="checkpoint-") as own:
        yield msgspec.structs.replace(spec, checkpoint_directory=str(own))


def log_path_of(log_directory: Path, spec: TrialSpec, layout: LogLayout) -> Path:
    """The path of a trial's log, by the layout of logs.

    ``LOG_DIR/<model>/gpu-<N>/sp-<S>/<rung>/model_len-<L>.log``; published: without ``<rung>/``.
    """
    folder = log_directory / spec.model_name / f"gpu-{spec.layout.gpus}" / spec.layout.slug
    if layout == "rung":
        folder /= spec.settings.slug
    return folder / f"model_len-{spec.length_tokens}.log"


def trial_environment(spec: TrialSpec) -> dict[str, str]:
    """The environment of a trial's processes.

    It is the user's, less what would change its memory, plus what its settings ask.
    """
    environment = clean_environment(spec.settings.allocator)
    cores = len(os.sched_getaffinity(0))
    environment["OMP_NUM_THREADS"] = str(max(1, cores // spec.layout.gpus))
    if spec.device == "cpu":
        environment |= ON_THE_CPU
    return environment


def clean_environment(allocator: Allocator) -> dict[str, str]:
    """The user's environment less what would change the memory of GPUs, with an allocator."""
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
    # The driver's own order, by which the probe looks for GPUs in use.
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    # The ranks of one machine talk to each other through its memory, and where they need a port, on
    # one that nobody else reaches.
    environment |= {"GLOO_SOCKET_IFNAME": _LOOPBACK, "NCCL_SOCKET_IFNAME": _LOOPBACK}
    return environment


def _await_release(gpus: int) -> None:
    """Wait until the driver has taken the trial's memory back; MachineError when it does not."""
    deadline = time.monotonic() + _RELEASE_S
    while busy_gpus((machine := probe()).gpus[:gpus]):
        if time.monotonic() > deadline:
            refuse_busy_gpus(machine, count=gpus)
        time.sleep(0.2)


def end_reaper(process: subprocess.Popen[bytes]) -> None:
    """End the reaper, which ends everything under it.

    A second Ctrl-C meanwhile is heard when that is done, and orphans nothing.
    """
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + _END_S
    interrupt: KeyboardInterrupt | None = None
    while process.poll() is None:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def _raise_refusal(reports: tuple[RankReport, ...]) -> None:
    """Raise what a worker refused: the user hears it, and it is no outcome."""
    for report in reports:
        failure = report.failure
        if failure is not None and failure.kind == "refused":
            problem = failure.text.partition(": ")[2]
            raise HighwaterError(problem, hint=failure.hint or "see the log")


def read_reports(folder: Path) -> tuple[tuple[RankReport, ...], tuple[str, ...]]:
    """The reports of the ranks, and a line for each report that cannot be read."""
    reports: list[RankReport] = []
    damaged: list[str] = []
    for path in sorted(folder.glob("rank-*.json")):
        try:
            report = from_json(read_file(path, most_bytes=_REPORT_BYTES), RankReport)
            reports.append(kept_report(report))
        except OSError as error:
            damaged.append(f"the report {path.name} cannot be read: {error.strerror}")
        except ValueError as error:  # msgspec's errors are
            damaged.append(f"the report {path.name} cannot be read: {' '.join(str(error).split())}")
    return tuple(reports), tuple(damaged)


def _until_first_step_s(reports: tuple[RankReport, ...], began_unix: float) -> float | None:
    """Seconds from the launch to the last rank's first step; None where no rank began one."""
    found = (report.first_step_at_unix_s for report in reports)
    last = max((at_unix_s for at_unix_s in found if at_unix_s is not None), default=None)
    return None if last is None else last - began_unix


def _without_training(report: RankReport) -> RankReport:
    """The report of a memory-only trial, without figures that would pass for a training's."""
    return msgspec.structs.replace(report, losses=(), gradient_norms=(), step_times_s=())


def _with_speed(spec: TrialSpec, result: TrialResult) -> TrialResult:
    """Add tokens per second and MFU to the result of a trial that fit."""
    if result.outcome is not Outcome.FIT or result.step_time_s is None:
        return result
    sequences = spec.sequences * spec.micro_batches * spec.layout.data_parallel_degree
    tokens_per_s = sequences * spec.length_tokens / result.step_time_s
    kind = kind_of(result.ranks[0].device_name or "")
    mfu = None
    if kind is not None and kind.bf16_dense_tflops is not None:
        shape = load_model(spec.model_directory).shape
        flops = step_flops(
            shape, length_tokens=spec.length_tokens, sequences=sequences, settings=spec.settings
        )
        mfu = flops / result.step_time_s / (kind.bf16_dense_tflops * 1e12 * spec.layout.gpus)
    return msgspec.structs.replace(result, tokens_per_s=tokens_per_s, mfu=mfu)


def _statistics_path(log_path: Path) -> Path:
    return log_path.with_suffix(".statistics.jsonl")


def _free_log_path(wanted: Path) -> Path:
    """The path itself, or the first ``.attempt-N`` beside it that is free.

    No log is ever overwritten, nor the statistics of one that is gone.
    """
    path, attempt = wanted, 1
    while path.exists() or _statistics_path(path).exists():
        attempt += 1
        path = wanted.with_suffix(f".attempt-{attempt}.log")
    return path


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read().decode("utf-8", errors="replace")

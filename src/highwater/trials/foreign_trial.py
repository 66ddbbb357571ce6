"""ForeignLauncher: run another trainer's trial by its own command and classify it from outside. All
its processes are ended.

``--memory`` on GPUs bounds PyTorch's own allocator: every process reads PYTORCH_ALLOC_CONF, whose
``per_process_memory_fraction`` limits the reserved share of the whole card. Context and NCCL come
on top. Source: c10/cuda/CUDAAllocatorConfig.h of PyTorch 2.11 to 2.13.

Peaks are sampled ten times a second; one may be missed. On GPUs they are the memory that the driver
reports as used; on the CPU, the largest data segment of a process, bounded by RLIMIT_DATA.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from threading import Event, Thread

import psutil

from highwater.errors import UsageError
from highwater.memory.formula.constants import context_bytes, outside_terms
from highwater.model.model import load_model
from highwater.nouns.codec import open_regular
from highwater.nouns.control_group import kernel_kills
from highwater.nouns.corpus import missing_files
from highwater.nouns.environment import ALLOCATOR_MODES, ALLOCATOR_VARIABLES
from highwater.nouns.foreign_request import command_of
from highwater.nouns.request import Request
from highwater.nouns.trainer import foreign_name
from highwater.nouns.trial import (
    MemoryBudget,
    Outcome,
    RankMemory,
    RankReport,
    TrialResult,
    TrialSpec,
)
from highwater.trainers.foreign import OUTPUT, TRIALS, ForeignCommand, TrialHome
from highwater.trials.engine_trial import EngineLauncher
from highwater.trials.foreign_classify import (
    EndedFor,
    Evidence,
    ForeignEnding,
    classify_foreign,
    evidence_of,
)
from highwater.trials.inputs import prepared_model, refuse_full_disk
from highwater.trials.job import exit_code_of, start
from highwater.trials.nodes import across_nodes
from highwater.trials.probe import probe
from highwater.trials.ranks import answered
from highwater.trials.reaper import under_reaper
from highwater.trials.trial_process import (
    OneLaunch,
    TrialLauncher,
    clean_environment,
    log_tail,
    private_folder,
    trial_environment,
)
from highwater.units import GIB, MIB, format_bytes

SAMPLES_PER_S = 10
_MOSTLY = 0.5
"""A process that lived for this share of a trial's time counts as a rank, not as a helper."""
_AROUND_S = 5.0
"""A process that went within this many seconds before the log's last line may have written it."""
_IDLE_SHARE = 0.05
"""Share of one core below which a process counts as idle. A hang in NCCL spins and looks like work;
then the rank that failed is known by its error."""


class SampledPeak:
    """Largest memory that a thread has seen of a trial's processes and GPUs until now."""

    def __init__(self, reaper: int, gpus: Sequence[int]) -> None:
        """Watch the descendants of ``reaper`` (process id), and ``gpus``; (): only the CPU."""
        self._reaper = reaper
        self._gpus = gpus
        self._used_bytes = [0] * len(gpus)
        self._total_bytes = [0] * len(gpus)
        self._segment_bytes = 0
        self._began = self._worked_at = time.monotonic()
        self._seen: dict[int, tuple[float, float]] = {}
        """First and last time that each process was seen, by process id."""
        self._alive: frozenset[int] = frozenset()
        self._cpu_s: dict[int, float] = {}

    @property
    def idle_s(self) -> float:
        """Seconds since a GPU of the trial was last busy, or a process used 5 % of a core."""
        return time.monotonic() - self._worked_at

    def has_lost_a_process(self, since: float) -> bool:
        """True if a long-lived process ended after ``since``, or shortly before."""
        return any(
            pid not in self._alive
            and last >= since - _AROUND_S
            and last - first >= _MOSTLY * (last - self._began)
            for pid, (first, last) in tuple(self._seen.items())
        )

    def ranks(self) -> tuple[RankReport, ...]:
        """One report for each GPU (one in all on the CPU), with only the sampled peaks."""
        if not self._gpus:
            memory = RankMemory(peak_data_segment_bytes=self._segment_bytes or None)
            return (RankReport(rank=0, memory=memory),)
        pairs = zip(self._used_bytes, self._total_bytes, strict=True)
        return tuple(
            RankReport(
                rank=rank,
                memory=RankMemory(device_used_bytes=used or None, device_total_bytes=total or None),
            )
            for rank, (used, total) in enumerate(pairs)
        )

    def sample(self, handles: Sequence[object]) -> None:
        """Sample the memory of all processes and GPUs once."""
        import pynvml

        for position, handle in enumerate(handles):
            with suppress(pynvml.NVMLError):
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                self._used_bytes[position] = max(self._used_bytes[position], int(memory.used))
                self._total_bytes[position] = int(memory.total)
                if int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu):
                    self._worked_at = time.monotonic()
        self._sample_processes()

    def _sample_processes(self) -> None:
        alive: set[int] = set()
        processes: list[psutil.Process] = []
        with suppress(psutil.Error):
            processes = psutil.Process(self._reaper).children(recursive=True)
        for process in processes:
            with suppress(psutil.Error), process.oneshot():
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                alive.add(process.pid)
                times = process.cpu_times()
                self._note_work(process.pid, times.user + times.system)
                if not self._gpus:
                    self._segment_bytes = max(self._segment_bytes, process.memory_info().data)
        now = time.monotonic()
        for pid in alive:
            self._seen[pid] = (self._seen.get(pid, (now, now))[0], now)
        self._alive = frozenset(alive)

    def _note_work(self, pid: int, cpu_s: float) -> None:
        """Record the time if a process used more than a twentieth of a core since the last one."""
        now, before_s = time.monotonic(), self._cpu_s.get(pid)
        if before_s is None or cpu_s - before_s > _IDLE_SHARE * (now - self._worked_at):
            self._cpu_s[pid] = cpu_s
            self._worked_at = now


@contextmanager
def sampled_peak(reaper: int, gpus: Sequence[int]) -> Generator[SampledPeak]:
    """Sample a trial's peaks in a thread while the block runs."""
    peak, over = SampledPeak(reaper, gpus), Event()
    thread = Thread(target=_sample, args=(peak, gpus, over), daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def _sample(peak: SampledPeak, gpus: Sequence[int], over: Event) -> None:
    import pynvml

    handles: list[object] = []
    with suppress(pynvml.NVMLError):  # without a driver no GPU is sampled
        if gpus:
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in gpus]
    while not over.wait(1 / SAMPLES_PER_S):
        peak.sample(handles)
    if handles:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def check_foreign(specs: Iterable[TrialSpec]) -> tuple[str, ...]:
    """Notes on foreign trainers' trials, each once. Raises HighwaterError if one cannot run."""
    said: dict[str, None] = {}
    for spec in specs:
        if spec.foreign is None:
            continue
        start = TRIALS[spec.foreign.trainer]
        if start.check is None:
            continue
        own = start.check(spec, spec.foreign, _has_flash)
        if start.opens_model(spec.foreign):
            refuse_full_disk(spec)
            own = (*missing_files(Path(spec.model_directory)).notes, *own)
        said |= dict.fromkeys(own)
    return tuple(said)


def _has_flash(program: str) -> bool:
    """True if flash attention is installed for the Python that runs ``program``."""
    python = python_of(program)
    return python is not None and _FLASH in versions_there(python, (_FLASH,))


def python_of(program: str) -> Path | None:
    """Python interpreter in the first line of a script that pip installed, or None."""
    found = shutil.which(program)
    if found is None:
        return None
    with open_regular(Path(found)) as file:
        first = file.read(_SHEBANG_BYTES).partition(b"\n")[0].decode(errors="replace")
    python = Path(first.removeprefix("#!").strip())
    return python if first.startswith("#!/") and "python" in python.name else None


@cache
def versions_there(python: Path, packages: tuple[str, ...]) -> Mapping[str, str]:
    """Versions of the packages that an interpreter has installed; none if it does not answer."""
    command: Sequence[str] = [str(python), "-P", "-c", _ASK, *packages]
    try:
        done = answered(command, environment=clean_environment("native"), timeout_s=_ASK_S)
        done.check_returncode()
        answer: dict[str, str | None] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return {name: version for name, version in answer.items() if version is not None}


_FLASH = "flash-attn"
_ASK = (
    "import json, sys; from importlib.metadata import version, PackageNotFoundError as Missing\n"
    "def of(name):\n"
    "    try: return version(name)\n"
    "    except Missing: return None\n"
    "print(json.dumps({name: of(name) for name in sys.argv[1:]}))"
)
_ASK_S = 60.0
"""Longest wait for the versions, in seconds: nothing is imported, but a disk may be far away."""
_SHEBANG_BYTES = 256
_OVER_BYTES = 2 * GIB
"""Bytes by which another trainer's context and NCCL may exceed our engine's. A trainer that does
not use PyTorch's allocator exceeds the bound by far more."""
_DIGITS = 6
"""Digits of the fraction: a millionth of the largest card is a few hundred KiB."""


def bounded_allocator(spec: TrialSpec, gpus: tuple[str, ...] | None) -> dict[str, str]:
    """Environment variables that bound the allocators of a trial's processes, if it has a bound."""
    budget = memory_budget(spec)
    totals = [gpu.memory_total_bytes for gpu in probe(gpus).gpus[: spec.layout.gpus]]
    if budget is None or spec.device == "cpu" or not totals:
        return {}
    if not budget.allocator_cap_bytes:
        raise UsageError(
            f"a memory of {format_bytes(budget.budget_bytes)} is taken by context and NCCL alone",
            hint="use a larger `--memory`",
        )
    shares = 10**_DIGITS
    share = min(shares, budget.allocator_cap_bytes * shares // min(totals))
    mode = ALLOCATOR_MODES[spec.settings.allocator]
    value = f"{mode},per_process_memory_fraction:{share / shares:.{_DIGITS}f}"
    return dict.fromkeys(ALLOCATOR_VARIABLES, value)


def past_the_bound(ranks: Sequence[RankReport]) -> str | None:
    """A sentence on the first GPU with more memory in use than its limit; None if there is none."""
    for rank in ranks:
        used, budget = rank.memory.device_used_bytes, rank.budget
        if used is None or budget is None or used <= budget.budget_bytes + _OVER_BYTES:
            continue
        return (
            f"{format_bytes(used)} of GPU {rank.rank} were in use, and `--memory` is "
            f"{format_bytes(budget.budget_bytes)}: it bounds PyTorch's allocator alone"
        )
    return None


def memory_budget(spec: TrialSpec) -> MemoryBudget | None:
    """Split a trial's memory bound into context, NCCL and allocator; None without a bound."""
    if spec.memory_budget_bytes is None:
        return None
    context = context_bytes(spec.device, gpus=spec.layout.gpus)
    shape = load_model(spec.model_directory).shape
    terms = outside_terms(shape, spec.settings, spec.layout, spec.device)
    nccl = sum(term.bytes for term in terms if "NCCL" in term.name)
    return MemoryBudget.split(spec.memory_budget_bytes, context_bytes=context, nccl_bytes=nccl)


_READ_BYTES = 32 * MIB
"""Bytes of the end of a log that are judged: days of a progress bar that overwrites itself."""
SILENT_S = 30.0
"""Seconds without output, after a rank ran out of memory, before a trial counts as hanging. The
other ranks wait in a collective until the trainer's time limit, ten minutes by default. A rank that
still works, on a last checkpoint for instance, writes something sooner."""
_OF_THE_SHELL = ("HF_HUB_OFFLINE",)
"""Variables that a foreign trainer inherits from the user's shell: it may download its own data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignLauncher(TrialLauncher):
    """Launches trials of other trainers."""

    command: tuple[str, ...] | None = None
    """The command as it was typed, secrets included; None: the trial's own."""
    silent_s: float = SILENT_S
    """Seconds without output, after memory ran out, before a trial is checked for a hang."""

    def _run(self, one: OneLaunch) -> TrialResult:
        spec, log, gpus, timeout_s, ended, on_phase = one
        foreign, kills_before = spec.foreign, kernel_kills()
        assert foreign is not None, "a trial of another trainer"  # noqa: S101
        if self.command is not None:
            foreign = foreign.as_typed(self.command)
        with private_folder(Path(log.name).parent, kind="trial-") as folder:
            (folder / OUTPUT).mkdir()
            prepared = partial(prepared_model, spec, ended, on_phase)
            home = TrialHome(folder, _has_flash, prepared)
            command = TRIALS[foreign.trainer].prepare(spec, foreign, home)
            environment = _environment(spec, command, gpus)
            limit = spec.memory_budget_bytes if spec.device == "cpu" else None
            words = under_reaper(command.words, inherit=[folder], data_bytes=limit)
            process = start(words, environment, log)
            seen = tuple(gpu.index for gpu in probe(gpus).gpus[: spec.layout.gpus])
            with sampled_peak(process.pid, seen if spec.device == "cuda" else ()) as peak:
                watch = _Watch(one, peak, kills_before, self.silent_s)
                exit_code, ended_for = watch.wait(process)
            text = log_tail(log, _READ_BYTES)
            is_cut = os.fstat(log.fileno()).st_size > _READ_BYTES
            steps = None if command.steps_done is None else command.steps_done(text)
        ending = ForeignEnding(
            exit_code=exit_code,
            ended_for=ended_for,
            timeout_s=timeout_s,
            log=text,
            steps_done=steps,
            is_stuck=watch.is_stuck,
            kernel_kills=kernel_kills() - kills_before,
        )
        budget = memory_budget(spec)
        ranks = tuple(rank.replace(budget=budget) for rank in peak.ranks())
        outcome, reason = classify_foreign(spec, ending)
        past = past_the_bound(ranks)
        if is_cut:
            past = f"only the last {format_bytes(_READ_BYTES)} of its log are read"
        if outcome.is_fit and past is not None:
            outcome, reason = Outcome.CRASHED, past
        return TrialResult(outcome=outcome, reason=reason, ranks=ranks, exit_code=exit_code)


def launcher_in(request: Request) -> partial[EngineLauncher] | partial[ForeignLauncher]:
    """Factory of a request's launcher: it can be pickled, and lacks only ``log_directory``."""
    usual = {"timeout_s": request.timeout_s, "allow_busy": request.allow_busy}
    trainer = foreign_name(request.trainer)
    if trainer is not None:
        return partial(ForeignLauncher, **usual, command=command_of(request, trainer))
    saves_in = request.checkpoint_dir
    return partial(
        EngineLauncher,
        **usual,
        checkpoint_directory=None if saves_in is None else Path(saves_in),
        profiling=request.memory_profiler,
        logit_range=request.logit_range,
        across=across_nodes(request),
    )


class _StuckError(Exception):
    """The trial hangs after a rank ran out of memory."""


class _Watch:
    """Waits for a trial, reports its steps, and ends it if a rank's failure made it hang."""

    def __init__(
        self, one: OneLaunch, peak: SampledPeak, kills_before: int, silent_s: float
    ) -> None:
        self._one, self._spec, self._log = one, one.spec, one.log
        self._peak, self._kills_before, self._silent_s = peak, kills_before, silent_s
        self._size, self._grew_at = -1, time.monotonic()
        self._phase = "starting"
        self._found: Evidence | None = None
        """Evidence read from the log since it last grew; None: not read yet."""
        self.is_stuck = False

    def wait(self, process: subprocess.Popen[bytes]) -> tuple[int | None, EndedFor | None]:
        """Wait for the exit status. If the trial had to be ended: None, and the reason."""
        limit_s, ended = self._one.timeout_s, self._one.ended
        try:
            code = exit_code_of(process, timeout_s=limit_s, ended=ended, tell=self._tell)
        except _StuckError:
            return None, "hang"
        return code, None if code is not None else "timeout"

    def _tell(self) -> None:
        size = os.fstat(self._log.fileno()).st_size
        if size != self._size:
            self._size, self._grew_at, self._found = size, time.monotonic(), None
            self._phase = self._progress()
        self._one.on_phase(self._phase)
        if time.monotonic() - self._grew_at > self._silent_s:
            self._judge()

    def _progress(self) -> str:
        steps = evidence_of(self._spec, log_tail(self._log, _SHOWN_BYTES)).steps
        if not steps:
            return self._phase
        return f"step {min(steps + 1, self._spec.steps)} of {self._spec.steps}"

    def _judge(self) -> None:
        """Raise _StuckError if the log is silent because a rank has ended or the others wait."""
        has_lost = self._peak.has_lost_a_process(self._grew_at)
        self.is_stuck = has_lost or self._peak.idle_s > self._silent_s
        is_killed = kernel_kills() > self._kills_before and has_lost
        self._found = found = self._found or evidence_of(
            self._spec, log_tail(self._log, _READ_BYTES)
        )
        if is_killed or (found.has_run_out and (found.is_certain or self.is_stuck)):
            raise _StuckError


_SHOWN_BYTES = 64 * 1024
"""Bytes of a log's end in which the current step is searched while a trial runs."""


def _environment(
    spec: TrialSpec, command: ForeignCommand, gpus: tuple[str, ...] | None
) -> dict[str, str]:
    environment = trial_environment(spec, gpus)
    for name in _OF_THE_SHELL:
        del environment[name]
        if name in os.environ:
            environment[name] = os.environ[name]
    environment |= bounded_allocator(spec, gpus)
    return environment | dict(command.environment)

"""Trials: the records that go to the data plane, and those that come back.

A TrialSpec goes there, each rank writes a RankReport, and a TrialResult is the outcome of all.

A Runner runs trials, a Launcher starts the processes of one trial. A job is a process with an order
in JSON that leaves a report, or a refusal, in JSON.

``python -m MODULE ORDER REPORT`` is a job's process, which ``trials/job.py`` starts: it reads the
file ORDER and writes the file REPORT, in a folder that no other job uses.
"""

import re
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from threading import Event
from typing import Literal, Protocol, TypeVar, get_args

import msgspec

from highwater.errors import HighwaterError, MachineError, UsageError
from highwater.nouns.codec import Record, from_json, key_of, write_whole
from highwater.nouns.declaration import MOST_STEPS
from highwater.nouns.environment import SnapshotOrder
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Device, Layout
from highwater.nouns.secrets import REASON, kept
from highwater.nouns.settings import Settings
from highwater.nouns.trainer import ForeignTrainer
from highwater.units import counted

PROMPT_TOKENS = 2048
"""Tokens of the prompt in published trials, and in those from before it could be named."""

_DATA_SOURCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


_NOT_IN_A_KEY = (
    *("model_directory", "checkpoint_directory", "memory_snapshots", "statistics"),
    "base_config_path",
)
"""Fields of a trial on which its outcome does not depend."""


class Outcome(StrEnum):
    """The end of a trial: exactly one of these outcomes."""

    FIT = "FIT"
    """All optimizer steps done, loss finite, every process exited 0, a result written."""
    MEMORY_ONLY_FIT = "MEMORY_ONLY_FIT"
    """A fit of a trial with an attention depth: memory holds the length, and no more is known."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    """An allocation failed under the budget: on the device, or on the CPU under its limit."""
    HOST_OUT_OF_MEMORY = "HOST_OUT_OF_MEMORY"
    """Host memory ran out under a trial on GPUs."""
    TIMEOUT = "TIMEOUT"
    """The trial was not done in time; this says nothing about memory."""
    CRASHED = "CRASHED"
    """The trial ended in any other way; this says nothing about memory."""

    @property
    def is_fit(self) -> bool:
        """True if the length fit, in full or memory-only."""
        return self in (Outcome.FIT, Outcome.MEMORY_ONLY_FIT)

    @property
    def is_memory(self) -> bool:
        """True if the trial ended because memory ran out."""
        return self in (Outcome.OUT_OF_MEMORY, Outcome.HOST_OUT_OF_MEMORY)

    @property
    def tells(self) -> bool:
        """True if the trial shows whether memory holds its length; a timeout or crash does not."""
        return self.is_fit or self.is_memory


ReporterName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
REPORTERS: tuple[ReporterName, ...] = get_args(ReporterName)
"""Packages that show the statistics of steps, each of them an extra of this package."""


class StatisticsFiles(Record, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Files in which a trial's processes write the statistics of its steps. They are no part of its
    specification. Unknown fields are ignored: an old record may have removed ones.
    """

    path: str
    """Absolute path of the file that gets a line for each step."""
    report_to: tuple[ReporterName, ...] = ()
    """Packages that get the statistics, too."""
    reports_directory: str | None = None
    """Absolute path of the directory for the packages' own files; set if any is named."""
    logit_range: bool = False
    """True if smallest, largest and mean logits are among them: one more pass over the logits."""


def refuse_one_token(length_tokens: int) -> None:
    """Raise UsageError for a length without a token to predict."""
    if length_tokens < 2:
        hint = "use `--length 2` or more: one to read, one to predict"
        raise UsageError(f"a length of {counted(length_tokens, 'token')}", hint=hint)


class TrialSpec(Record, frozen=True, kw_only=True):
    """One trial: everything that its outcome may depend on."""

    model_name: str
    model_directory: str
    """Absolute path that holds ``config.json``; in the trial's key is the config's digest."""
    config_digest: str
    device: Device
    layout: Layout
    settings: Settings
    hyperparameters: Hyperparameters = Hyperparameters()
    length_tokens: int
    memory_budget_bytes: int | None = None
    """Bound on device used of each GPU, or on a CPU process's data segment; None: the card."""
    host_memory_bytes: int | None = None
    """Bound on the memory of a machine; None: what its control group may take."""
    steps: int = 2
    """Optimizer steps: two or more, so that optimizer states are alive at the peak."""
    micro_batches: int = 2
    """Micro-batches per step and rank; exactly 1 where the settings do not accumulate: then
    gradients are made in its backward pass, and are not alive before."""
    prompt_tokens: int = PROMPT_TOKENS
    """First tokens of a synthetic sequence that are not trained; of half of it at the most."""
    seed: int = 0
    data: str | None = None
    """``module:function`` that yields token batches instead of the synthetic ones."""
    attention_depth: int | None = None
    """Number of last layers whose attention runs over whole documents; None: all layers. In the
    others it runs on short pieces, which take the same memory. Such a trial is memory-only: its
    loss and its times mean nothing."""
    checkpoint_directory: str | None = None
    """Absolute path where this launch saves, made for it and removed after it; not in its key."""
    memory_snapshots: SnapshotOrder | None = None
    """The snapshots of its memory that this launch records; None: none. Not in its key."""
    statistics: StatisticsFiles | None = None
    """Files into which this launch writes statistics; None: nowhere. Not in its key."""
    foreign: ForeignTrainer | None = None
    """The trainer that runs it; None: this package's engine."""

    def __post_init__(self) -> None:
        """Raise UsageError for counts out of range."""
        refuse_one_token(self.length_tokens)
        micro_batches = f"{self.micro_batches} micro-batch{'es' * (self.micro_batches != 1)}"
        if self.steps < 2 or self.micro_batches < 1:
            raise UsageError(
                f"{counted(self.steps, 'step')} of {micro_batches} never hold the peak",
                hint=f"use `--steps {max(2, self.steps)} --micro-batches "
                f"{max(1, self.micro_batches)}`, or more",
            )
        if self.settings.accumulates == (self.micro_batches == 1):
            added = "are" if self.settings.accumulates else "are not"
            raise UsageError(
                f"{micro_batches} a step, with settings where several {added} added up",
                hint="`Settings(accumulates=False)` goes with 1 micro-batch, and with no more",
            )
        if max(self.steps, self.micro_batches) > MOST_STEPS:
            raise UsageError(
                f"{counted(self.steps, 'step')} of {micro_batches}, and {MOST_STEPS} is the most "
                f"of either",
                hint="a trial of 2 steps of 2 micro-batches holds the peak already",
            )
        if self.sequences < 1:
            traits, tokens = self.settings.traits, self.length_tokens
            least = -(-tokens * traits.documents_together // self.layout.context_degree)
            raise UsageError(
                f"a token budget of {self.settings.token_budget_tokens} is below the {least} "
                f"tokens that each GPU gets of one {'pair' if traits.pairs else 'sequence'} of "
                f"{tokens}",
                hint=f"use `--token-budget {least}` or more",
            )
        self.hyperparameters.refuse_unused(self.settings)
        if self.attention_depth is not None and self.attention_depth < 1:
            raise UsageError(
                f"an attention depth of {self.attention_depth}",
                hint="use `--attention-depth 1`: the last layer's",
            )
        if self.device == "cpu" and self.memory_budget_bytes is None:
            raise UsageError(
                "a trial on the CPU without a memory limit would take the whole machine",
                hint="add `--memory 2GiB`",
            )
        if self.data is not None and not _DATA_SOURCE.fullmatch(self.data):
            raise UsageError(
                f"data source {self.data!r} is not module:function",
                hint="for example `--data my_package.batches:packed`",
            )

    @property
    def sequences(self) -> int:
        """Sequences of one micro-batch, which are packed into one row."""
        return self.settings.sequences(
            self.length_tokens, context_degree=self.layout.context_degree
        )

    @property
    def is_memory_only(self) -> bool:
        """True if the trial only proves that memory suffices, with attention cut into pieces."""
        return self.attention_depth is not None

    @property
    def key(self) -> str:
        """Digest that names the trial, wherever its model and its checkpoints are stored."""
        return key_of(self, without=_NOT_IN_A_KEY)


class MemoryBudget(Record, frozen=True, kw_only=True):
    """A GPU's memory as a trial may use it: for the context, for NCCL, for the allocator."""

    budget_bytes: int
    context_bytes: int
    """Memory outside the allocator, besides NCCL's. That is the driver's reserve, the CUDA context,
    loaded kernels and library workspaces; other processes too."""
    nccl_bytes: int
    allocator_cap_bytes: int

    @classmethod
    def split(
        cls, budget_bytes: int, *, context_bytes: int = 0, nccl_bytes: int = 0
    ) -> "MemoryBudget":
        """Give the allocator what context and NCCL leave of a budget, in bytes; at least 0."""
        return cls(
            budget_bytes=budget_bytes,
            context_bytes=context_bytes,
            nccl_bytes=nccl_bytes,
            allocator_cap_bytes=max(0, budget_bytes - context_bytes - nccl_bytes),
        )


class RankMemory(Record, frozen=True, kw_only=True):
    """Largest values that one rank saw over all steps; None: unknown."""

    peak_allocated_bytes: int | None = None
    peak_active_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_used_bytes: int | None = None
    """The most that the driver reports: reserved + context + NCCL + other processes."""
    device_total_bytes: int | None = None
    allocator_retries: int | None = None
    """Times the allocator gave cached segments back to the driver to satisfy a request."""
    peak_data_segment_bytes: int | None = None
    """CPU: largest data segment seen; what RLIMIT_DATA bounds."""


class AliveMemory(Record, frozen=True, kw_only=True):
    """What one rank's memory held when it ran out, in bytes by kind; None: unknown."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_states_bytes: int
    activations_bytes: int | None = None
    """All that a pass had allocated besides the other fields: saved for its backward pass, being
    computed, or keys and values on their way around a ring. It is what was allocated then, less
    what was between two steps: nobody counts it tensor by tensor."""
    logits_bytes: int | None = None
    """Blocks of logits that the loss was computing with."""
    communication_bytes: int | None = None
    """Parameters that FSDP had gathered, and its buffers."""
    unattributed_bytes: int | None = None
    """Memory without a name; in a pass only what was there between two steps already."""
    allocated_bytes: int | None = None
    """All that was allocated."""
    reserved_bytes: int | None = None
    largest_free_bytes: int | None = None
    """The largest free piece of what was reserved."""
    requested_bytes: int | None = None
    """Bytes of the request for which there was no room."""
    requested_by: str | None = None
    """The engine's line that asked, ``highwater/engine/models/loss.py:84 forward``; None: no line
    of it did, as in most of a backward pass."""
    device_free_bytes: int | None = None
    """Bytes that the driver had left."""

    @property
    def fragmented_bytes(self) -> int | None:
        """Bytes that the allocator had reserved but not allocated."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return max(0, self.reserved_bytes - self.allocated_bytes)


FailureKind = Literal["device_memory", "host_memory", "refused", "error"]


class Failure(Record, frozen=True, kw_only=True):
    """The reason why a rank did not finish."""

    kind: FailureKind
    phase: str
    """The phase that the rank was in. It is one of setup, build, rehearsal, data, experience,
    forward, backward, optimizer, save and report."""
    text: str
    """The exception, type first."""
    at_unix_s: float | None = None
    """Clock time of the failure: the first rank that fails takes its peers with it."""
    hint: str | None = None
    """Something to type, for a failure of the kind ``refused``."""
    layer: int | None = None
    """The decoder layer that the rank was in, the first is 0; None: none, or unknown: in a backward
    pass only layers that are recomputed tell."""
    alive: AliveMemory | None = None
    """Memory that was allocated, if memory ran out."""


class Save(Record, frozen=True, kw_only=True):
    """What one rank wrote in one checkpoint, and how long that took."""

    kind: Literal["sharded", "hf"]
    time_s: float
    """Seconds from the end of the step until it was on the disk."""
    written_bytes: int
    """Bytes that this rank wrote; Hugging Face weights are written by rank 0 alone."""


Weights = Literal["saved", "random"]


class RankReport(Record, frozen=True, kw_only=True):
    """What one rank of a trial did and measured, written before it exits."""

    rank: int
    failure: Failure | None = None
    """The reason why the rank did not finish; None where it did all its steps."""
    memory: RankMemory = RankMemory()
    budget: MemoryBudget | None = None
    losses: tuple[float, ...] = ()
    """Loss of each optimizer step, averaged over the trained tokens of all ranks."""
    gradient_norms: tuple[float, ...] = ()
    """Norm of the whole gradient of each step, before clipping."""
    step_times_s: tuple[float, ...] = ()
    saves: tuple[Save, ...] = ()
    """Saves in their order; their times are not in ``step_times_s``."""
    first_step_at_unix_s: float | None = None
    """Clock time at which the first step began, after the rehearsal."""
    parameters: int | None = None
    """Parameters of the whole model, over all ranks."""
    weights: Weights | None = None
    """Source of the trained model's first values: the files in its directory, or the seed."""
    attention_kernel: str | None = None
    allocator_settings: dict[str, str] = msgspec.field(default_factory=dict)
    """Settings of the caching allocator, as it tells them itself; empty on the CPU."""
    device_name: str | None = None
    versions: dict[str, str] = msgspec.field(default_factory=dict)


class TrialResult(Record, frozen=True, kw_only=True):
    """How a trial ended, what its ranks measured, and whether it was simulated."""

    outcome: Outcome
    reason: str
    """One line: what decided the outcome."""
    ranks: tuple[RankReport, ...] = ()
    tokens_per_s: float | None = None
    """Tokens of all data-parallel ranks over the time of the last step."""
    mfu: float | None = None
    """Model FLOP/s over all GPUs' dense bf16 FLOP/s by datasheet; None: not in the catalog."""
    launch_to_first_step_s: float | None = None
    wall_s: float = 0.0
    attempt: int = 1
    """The number of the launch: 1 for the first of this trial, 2 and 3 for retries."""
    log_path: str | None = None
    exit_code: int | None = None
    simulated: bool = False
    """True if the outcome was computed from a memory law; nothing was trained then."""

    @property
    def peak_reserved_bytes(self) -> int | None:
        """Largest peak reserved of any rank; on the CPU the largest data segment; of a foreign
        trainer on GPUs, whose allocator is not visible, the driver's largest reading.
        """
        memories = [rank.memory for rank in self.ranks]
        peaks = (
            m.peak_reserved_bytes or m.peak_data_segment_bytes or m.device_used_bytes
            for m in memories
        )
        return max((peak for peak in peaks if peak is not None), default=None)

    @property
    def headroom_bytes(self) -> int | None:
        """Headroom in bytes of the rank that has the least at its peak; None: unknown."""
        rooms = [_headroom(rank) for rank in self.ranks]
        return min((room for room in rooms if room is not None), default=None)

    @property
    def first_failed(self) -> RankReport | None:
        """The rank that failed first; None if no rank reported a failure."""
        failed = [rank for rank in self.ranks if rank.failure is not None]
        return min(
            failed,
            key=lambda rank: (rank.failure.at_unix_s or 0.0) if rank.failure else 0.0,
            default=None,
        )

    @property
    def step_time_s(self) -> float | None:
        """Seconds of the last step on the slowest rank: the first step warms up."""
        last = (rank.step_times_s[-1] for rank in self.ranks if rank.step_times_s)
        return max(last, default=None)


class LogEnd(Record, frozen=True, kw_only=True):
    """The last lines of a trial's log."""

    lines: tuple[str, ...] = ()
    reason: str | None = None
    """The reason why there are no lines; None where there are."""


def _headroom(rank: RankReport) -> int | None:
    used = rank.memory.device_used_bytes or rank.memory.peak_data_segment_bytes
    capacity = rank.budget.budget_bytes if rank.budget else rank.memory.device_total_bytes
    return None if used is None or capacity is None else capacity - used


def kept_result(result: TrialResult) -> TrialResult:
    """A trial's result for display and record: without secrets, long texts cut."""
    return result.replace(
        reason=kept(result.reason, most=REASON),
        ranks=tuple(kept_report(rank) for rank in result.ranks),
    )


def kept_report(report: RankReport) -> RankReport:
    """A rank's report as it is recorded: without secrets, long texts cut."""
    failure = report.failure
    if failure is None:
        return report
    hint = None if failure.hint is None else kept(failure.hint)
    said = failure.replace(text=kept(failure.text), hint=hint)
    return report.replace(failure=said)


TOLD_S = 0.5
"""Seconds between two words on what a trial is doing, for whoever waits for it."""
OnPhase = Callable[[str], None]
"""Function that is told, about twice a second, what a trial's first rank does: ``step 1 of 2``."""


def unheard(phase: str) -> None:
    """Ignore a phase: the default callback."""


class Launch(Record, frozen=True, kw_only=True):
    """A trial to start, with the number of the attempt and of the repeat."""

    spec: TrialSpec
    attempt: int = 1
    repeat: int = 0
    """Number of the repeat: above 0 the same trial once more, to confirm it."""
    timeout_s: float | None = None
    """Longest time from launch to exit in seconds; None: the launcher's default."""


class TrialEndedError(Exception):
    """A trial was ended because its result is no longer needed; it has none."""


class Launcher(Protocol):
    """Starts the processes of one trial, and classifies how they ended."""

    def launch(
        self, launch: Launch, *, gpus: tuple[str, ...] | None, ended: Event, on_phase: OnPhase
    ) -> TrialResult:
        """Run a trial to its end; blocks until all its processes have ended. Threads may call it
        concurrently. ``gpus`` are the entries of ``CUDA_VISIBLE_DEVICES`` for the trial; None:
        those of this process. When ``ended`` is set the processes are killed and TrialEndedError is
        raised. Raises MachineError if no trial can run at all, and UsageError for settings that the
        trainer does not support.
        """
        ...


class Runner(Protocol):
    """Runs trials, several at once if GPUs are free. Call it from one thread only."""

    def has_room(self, spec: TrialSpec) -> bool:
        """True if a trial could start now beside the running ones; always true if none runs."""
        ...

    def submit(self, launch: Launch, *, on_phase: OnPhase = unheard) -> Future[TrialResult]:
        """Start a trial that has room, as ``Launcher.launch``; its threads call ``on_phase``."""
        ...

    def close(self) -> None:
        """Kill all running trials, and return when all their processes have ended."""
        ...


PHASE_FILE = "phase"
"""File in which a job, or a trial's first rank, says in words what it is doing, while it runs."""
REFUSED_FILE = "refused.json"
Order = TypeVar("Order", bound=Record)


class Refused(Record, frozen=True, kw_only=True):
    """A job's refusal in the place of its report: the problem, and a hint for the user."""

    problem: str
    hint: str
    is_machine: bool = False
    """True if the machine is the reason (MachineError), and not the request (UsageError)."""

    def error(self) -> HighwaterError:
        """The error to raise here: a MachineError if the job raised one, else a UsageError."""
        return (MachineError if self.is_machine else UsageError)(self.problem, hint=self.hint)


def refused(error: HighwaterError) -> Refused:
    """The record that carries an error to another process."""
    is_machine = isinstance(error, MachineError)
    return Refused(problem=error.problem, hint=error.hint, is_machine=is_machine)


def serve(kind: type[Order], work: Callable[[Order, Path], Record]) -> None:
    """Run a job's process: do the ``work`` of its order, write the result or HighwaterError."""
    order, report = map(Path, sys.argv[1:3])
    try:
        left = work(from_json(order.read_bytes(), kind), report.parent)
    except HighwaterError as error:
        report, left = report.with_name(REFUSED_FILE), refused(error)
    write_whole(report, msgspec.json.encode(left))


def tell_phase(folder: Path, phase: str) -> None:
    """Write the job's current phase for the process that waits; failures are ignored."""
    with suppress(OSError):
        write_whole(folder / PHASE_FILE, phase.encode())

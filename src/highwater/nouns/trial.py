"""Trials: what crosses the door to the data plane, and what comes back.

TrialSpec goes there, each rank writes a RankReport, and TrialResult is the verdict.

Runner and Launcher: whatever runs trials, and whatever makes the processes of one; and a job as
both planes know it: an order in JSON, and the report, or the refusal, that is left.

``python -m MODULE ORDER REPORT`` is the process of a job, which ``trials/job.py`` starts: ORDER is
read, REPORT written, in a folder that is the job's alone.
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
"""Prompt of a sequence in published trials, and in those before a prompt could be named."""

_DATA_SOURCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


_NOT_IN_A_KEY = (
    *("model_directory", "checkpoint_directory", "memory_snapshots", "statistics"),
    "base_config_path",
)
"""Fields of a trial on which its outcome does not depend."""


class Outcome(StrEnum):
    """The end of a trial; exactly one."""

    FIT = "FIT"
    """All optimizer steps done, loss finite, every process exited 0, a result written."""
    MEMORY_ONLY_FIT = "MEMORY_ONLY_FIT"
    """A fit of a trial with an attention depth, which says what memory holds, nothing more."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    """An allocation failed under the budget: on the device, or on the CPU under its limit."""
    HOST_OUT_OF_MEMORY = "HOST_OUT_OF_MEMORY"
    """Host memory ran out under a trial on GPUs."""
    TIMEOUT = "TIMEOUT"
    """Not done in time; says nothing about memory."""
    CRASHED = "CRASHED"
    """Anything else; says nothing about memory."""

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
        """True if the trial says if memory holds its length; a timeout or a crash does not."""
        return self.is_fit or self.is_memory


ReporterName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
REPORTERS: tuple[ReporterName, ...] = get_args(ReporterName)
"""Packages that show the statistics of steps, each an extra of its name."""


class StatisticsFiles(Record, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Files in which a launch writes the statistics of its steps; no part of what it is asked. A
    recorded run may have a field that is gone.
    """

    path: str
    """Absolute path of the file that gets a line for each step."""
    report_to: tuple[ReporterName, ...] = ()
    """Packages that are told the statistics, too."""
    reports_directory: str | None = None
    """Absolute path of the directory for what they keep on a disk; set where any is named."""
    logit_range: bool = False
    """True if smallest, largest and mean logits are among them: one more pass over the logits."""


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
    """Bound on device used per GPU, on the CPU on a worker's data segment; None: the card."""
    host_memory_bytes: int | None = None
    """Bound on the memory of a machine; None: what its control group may take."""
    steps: int = 2
    """Optimizer steps: two or more, so that optimizer states are alive at the peak."""
    micro_batches: int = 2
    """Micro-batches per step and rank; one alone where the settings add none up: then gradients
    are made in its backward pass, and are not alive before."""
    prompt_tokens: int = PROMPT_TOKENS
    """First tokens of a synthetic sequence, of half of it at the most, that are not trained."""
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
        """Raise UsageError for counts that cannot be."""
        if self.length_tokens < 2:
            raise UsageError(
                f"a length of {counted(self.length_tokens, 'token')}",
                hint="use `--length 2` or more: one to read, one to predict",
            )
        self._check_steps()
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
        self._check_device_and_data()

    def _check_steps(self) -> None:
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

    def _check_device_and_data(self) -> None:
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
        """Sequences packed into one micro-batch."""
        return self.settings.sequences(
            self.length_tokens, context_degree=self.layout.context_degree
        )

    @property
    def is_memory_only(self) -> bool:
        """True if a fit of this trial is no training."""
        return self.attention_depth is not None

    @property
    def key(self) -> str:
        """Digest that names the trial, wherever its model and its checkpoints lie."""
        return key_of(self, without=_NOT_IN_A_KEY)


class MemoryBudget(Record, frozen=True, kw_only=True):
    """The parts of ``--memory``: budget = context + NCCL + what the allocator may reserve."""

    budget_bytes: int
    context_bytes: int
    """Memory outside the allocator, besides NCCL's. That is the driver's reserve, the CUDA context,
    loaded kernels and library workspaces; other processes too."""
    nccl_bytes: int
    allocator_cap_bytes: int


class RankMemory(Record, frozen=True, kw_only=True):
    """Peaks of one rank over all steps, on the CPU since the process began; None: no notion."""

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
    """Memory a rank had allocated as it ran out, as the engine knows it without a history."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_states_bytes: int
    activations_bytes: int | None = None
    """All that a pass had allocated besides what is told here: saved for its backward pass, being
    computed, or keys and values on their way around a ring. It is what was allocated then, less
    what was between two steps: nobody counts it tensor by tensor."""
    logits_bytes: int | None = None
    """Blocks of logits that the loss was working on."""
    communication_bytes: int | None = None
    """Parameters that FSDP had gathered, and its buffers."""
    unattributed_bytes: int | None = None
    """Memory without a name: of a pass only what was there between two steps already."""
    allocated_bytes: int | None = None
    """All of it."""
    reserved_bytes: int | None = None
    largest_free_bytes: int | None = None
    """The largest piece of what was reserved and not allocated."""
    requested_bytes: int | None = None
    """The request for which there was no room."""
    requested_by: str | None = None
    """The engine's line that asked, ``highwater/engine/models/loss.py:84 forward``; None where none
    did: most of a backward pass runs without one."""
    device_free_bytes: int | None = None
    """Bytes that the driver still had."""

    @property
    def fragmented_bytes(self) -> int | None:
        """Bytes that the allocator had, and nobody used."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return max(0, self.reserved_bytes - self.allocated_bytes)


FailureKind = Literal["device_memory", "host_memory", "refused", "error"]


class Failure(Record, frozen=True, kw_only=True):
    """Why a rank did not finish."""

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
    """The decoder layer that the rank was in, the first is 0; None for none, or where nothing told:
    a backward pass tells where layers are recomputed."""
    alive: AliveMemory | None = None
    """Memory that was allocated, where it ran out."""


class Save(Record, frozen=True, kw_only=True):
    """One checkpoint that a rank had a part in."""

    kind: Literal["sharded", "hf"]
    time_s: float
    """Seconds from the end of the step until it was on the disk."""
    written_bytes: int
    """Bytes of this rank alone; of Hugging Face weights rank 0 writes everything."""


Weights = Literal["saved", "random"]


class RankReport(Record, frozen=True, kw_only=True):
    """Report that one rank of a trial wrote before it exited."""

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
    """Saves in their order; their times are not in the steps'."""
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
    """The end of a trial, and what was measured."""

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
        trainer on GPUs, of whose allocator nothing is known, the most that the driver reported.
        """
        memories = [rank.memory for rank in self.ranks]
        peaks = (
            m.peak_reserved_bytes or m.peak_data_segment_bytes or m.device_used_bytes
            for m in memories
        )
        return max((peak for peak in peaks if peak is not None), default=None)

    @property
    def headroom_bytes(self) -> int | None:
        """Smallest headroom of any rank: budget or card, less what was used at the peak."""
        rooms = [_headroom(rank) for rank in self.ranks]
        return min((room for room in rooms if room is not None), default=None)

    @property
    def first_failed(self) -> RankReport | None:
        """The rank that failed before the others; None where none said that it did."""
        failed = [rank for rank in self.ranks if rank.failure is not None]
        return min(
            failed,
            key=lambda rank: (rank.failure.at_unix_s or 0.0) if rank.failure else 0.0,
            default=None,
        )

    @property
    def step_time_s(self) -> float | None:
        """Time of the last step on the slowest rank: the first one warms up."""
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
    """A trial's result as it is told and recorded, whatever its processes wrote."""
    return result.replace(
        reason=kept(result.reason, most=REASON),
        ranks=tuple(kept_report(rank) for rank in result.ranks),
    )


def kept_report(report: RankReport) -> RankReport:
    """A rank's report as it is kept: secrets in its texts are hidden, long ones cut."""
    failure = report.failure
    if failure is None:
        return report
    hint = None if failure.hint is None else kept(failure.hint)
    said = failure.replace(text=kept(failure.text), hint=hint)
    return report.replace(failure=said)


TOLD_S = 0.5
"""Seconds after which whoever waits for a trial is told again what it is doing."""
OnPhase = Callable[[str], None]
"""Hears about twice a second what the first rank of a trial is doing: ``step 1 of 2``."""


def unheard(phase: str) -> None:
    """Listen to no phase."""


class Launch(Record, frozen=True, kw_only=True):
    """One launch of one trial."""

    spec: TrialSpec
    attempt: int = 1
    repeat: int = 0
    """Number of the repeat: above 0 the same trial once more, to confirm it."""
    timeout_s: float | None = None
    """Longest time from launch to exit; None: what the launcher gives to any."""


class TrialEndedError(Exception):
    """A trial was ended because nobody waits for it any more; it has no result."""


class Launcher(Protocol):
    """Makes the processes of one trial, and classifies how they ended."""

    def launch(
        self, launch: Launch, *, gpus: tuple[str, ...] | None, ended: Event, on_phase: OnPhase
    ) -> TrialResult:
        """Run a trial to its end; blocks until every process of it is gone. Threads may call it
        side by side. ``gpus`` are the entries of ``CUDA_VISIBLE_DEVICES`` that the trial shall see;
        None: what this process sees. When ``ended`` is set the processes are ended at once, and
        TrialEndedError is raised. Raises MachineError when no trial can run at all, and UsageError
        for what the trainer cannot do.
        """
        ...


class Runner(Protocol):
    """Runs trials, several at once where there is room. One thread asks it."""

    def has_room(self, spec: TrialSpec) -> bool:
        """True if a trial would start now, beside those that run; true where none does."""
        ...

    def submit(self, launch: Launch, *, on_phase: OnPhase = unheard) -> Future[TrialResult]:
        """Start a trial that has room, as ``Launcher.launch``; threads call ``on_phase``."""
        ...

    def close(self) -> None:
        """End whatever runs, and return when no process of it is left."""
        ...


PHASE_FILE = "phase"
"""File in which a job, or a trial's first rank, says in words what it is doing, while it runs."""
REFUSED_FILE = "refused.json"
Order = TypeVar("Order", bound=Record)


class Refused(Record, frozen=True, kw_only=True):
    """Why a job has no report, as a user is told."""

    problem: str
    hint: str
    is_machine: bool = False
    """True if the machine refuses, and not what was asked."""

    def error(self) -> HighwaterError:
        """The error again."""
        return (MachineError if self.is_machine else UsageError)(self.problem, hint=self.hint)


def refused(error: HighwaterError) -> Refused:
    """An error for the user, as it crosses processes."""
    is_machine = isinstance(error, MachineError)
    return Refused(problem=error.problem, hint=error.hint, is_machine=is_machine)


def serve(kind: type[Order], work: Callable[[Order, Path], Record]) -> None:
    """Be a job's process: do the ``work`` of its order, and leave its result or HighwaterError."""
    order, report = map(Path, sys.argv[1:3])
    try:
        left = work(from_json(order.read_bytes(), kind), report.parent)
    except HighwaterError as error:
        report, left = report.with_name(REFUSED_FILE), refused(error)
    write_whole(report, msgspec.json.encode(left))


def tell_phase(folder: Path, phase: str) -> None:
    """Leave word of what a job does, for whoever waits. Nothing depends on it."""
    with suppress(OSError):
        write_whole(folder / PHASE_FILE, phase.encode())

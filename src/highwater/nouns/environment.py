"""Environment: the variables that set the mode of PyTorch's caching allocator and tell a rank where
to meet the others; and a record of what a search ran on and with, by an allow-list.

Profiling: which steps and ranks of a trial record their memory, and the names of their files.
"""

import re
from collections.abc import Mapping
from typing import Literal

from highwater.errors import UsageError
from highwater.nouns.codec import Record
from highwater.nouns.declaration import MOST_GPUS, MOST_NAMED, MOST_STEPS, RefusedError
from highwater.nouns.layout import Device, Layout
from highwater.nouns.settings import Allocator

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable, and its name before PyTorch 2.9: both are set, to the same value."""
ALLOCATOR_MODES: dict[Allocator, str] = {
    "native": "expandable_segments:False",
    "expandable": "expandable_segments:True",
}
ENV_IN_WORDS = f"{ALLOCATOR_VARIABLES[0]}={ALLOCATOR_MODES['expandable']}"
"""The guide's "Env", to be typed after ``export``."""
ENV_BEFORE_IN_WORDS = f"before PyTorch 2.9 the variable is {ALLOCATOR_VARIABLES[1]}"


def allocator_environment(allocator: Allocator) -> dict[str, str]:
    """Environment variables that put PyTorch's allocator into a mode; set before it starts."""
    return dict.fromkeys(ALLOCATOR_VARIABLES, ALLOCATOR_MODES[allocator])


def allocator_options(environment: Mapping[str, str]) -> list[str]:
    """The allocator options in the environment, ``max_split_size_mb:64``; brackets stay whole."""
    named = next(
        (environment[name] for name in reversed(ALLOCATOR_VARIABLES) if name in environment), ""
    )
    return re.findall(r"(?:\[[^\]]*\]|[^,\[])+", "".join(named.split()))


def ignored_options(
    environment: Mapping[str, str], device: Device, *, reads_mode: bool = False
) -> tuple[str, ...]:
    """A note on allocator options that trials ignore; ``reads_mode``: on GPUs they get the mode."""
    reads_mode = reads_mode and device == "cuda"
    ignored = [
        option
        for option in allocator_options(environment)
        if not (reads_mode and option.lower().startswith("expandable_segments:"))
    ]
    if not ignored:
        return ()
    why = "trials have the allocator of their settings (`--allocator`)"
    if device == "cpu":
        why = "it is about the memory of GPUs, and trials run on the CPU"
    elif reads_mode:
        why = "trials set expandable_segments alone"
    return (f"ignored in the environment: {', '.join(ignored)}; {why}",)


STORE_VARIABLE = "HIGHWATER_STORE"
"""Path of the file through which the ranks of one trial meet: new for every trial, in a folder that
only its user can read. No port is opened for it (docs/decisions/027)."""


RECORDED_VARIABLES = (
    *ALLOCATOR_VARIABLES,
    "CUDA_VISIBLE_DEVICES",
    "NCCL_BUFFSIZE",
    "CUBLAS_WORKSPACE_CONFIG",
)
"""The user's variables about memory or visible GPUs; none can hold a token or a key."""


class Environment(Record, frozen=True, kw_only=True):
    """Machine and shell of a search, without names of hosts, users, folders or other variables."""

    versions: dict[str, str]
    """Installed versions of what trials run with; a package that is missing is absent."""
    driver_version: str | None = None
    gpu_names: tuple[str, ...] = ()
    """Name of each visible GPU, by its driver."""
    gpu_memory_bytes: tuple[int, ...] = ()
    """Memory of each visible GPU, by its driver."""
    cpu_cores: int
    host_memory_total_bytes: int
    variables: dict[str, str]
    """Variables as the shell had them; a trial's rung decides its allocator."""


SETTING = "memory_profiler"
"""Name of the setting of a request."""
SNAPSHOTS = "memory_snapshots"
"""Folder of the snapshots of a launch, beside its log."""
MOST_ENTRIES = 10_000_000
"""Most events that a rank keeps, at several KB each."""
_STEPS = re.compile(r"\s*\d{1,9}(\s*,\s*\d{1,9})*\s*")


class Profiling(Record, frozen=True, kw_only=True):
    """The setting ``memory_profiler``: the steps and ranks that write a snapshot of memory."""

    profile_steps: tuple[int, ...] = (0, 1)
    """Optimizer steps, the first is 0."""
    max_entries: int = 100_000
    """Events of a step that are kept, the last ones: a few hundred bytes each in the file."""
    ranks: Literal["all"] | tuple[int, ...] = "all"

    def __post_init__(self) -> None:
        """Raise RefusedError for steps, events or ranks out of range."""
        ranks = () if self.ranks == "all" else self.ranks
        for what, numbers, most in (
            ("profile_steps", self.profile_steps, MOST_STEPS),
            ("ranks", ranks, MOST_GPUS),
        ):
            if any(not 0 <= number < most for number in numbers) or len(numbers) > MOST_NAMED:
                shown = ", ".join(map(str, numbers[:MOST_NAMED]))
                raise _refused(f"{what} {shown}: each is 0 or more and below {most}")
        if not self.profile_steps or self.ranks == ():
            raise _refused("no step, or no rank, would record anything")
        if not 1 <= self.max_entries <= MOST_ENTRIES:
            raise _refused(f"max_entries {self.max_entries}: 1 or more, {MOST_ENTRIES:,} at most")

    def records(self, rank: int) -> bool:
        """True if the rank's memory is to be recorded."""
        return self.ranks == "all" or rank in self.ranks


class SnapshotOrder(Record, frozen=True, kw_only=True):
    """The snapshots that one launch of a trial writes: into which folder, of which steps."""

    directory: str
    """Absolute path of a folder for this launch alone: ``LOG/memory_snapshots``."""
    profiling: Profiling


def coordinates(layout: Layout, rank: int) -> str:
    """A rank's coordinates: data-parallel group, ring and Ulysses rank, ``d0r0u1``; if states have
    copies, the copy first: ``c1d0r0u1``. Data-parallel groups are counted over all copies: one
    sequence may be shared by several.
    """
    sharing, ulysses = layout.context_degree, layout.ulysses_degree
    copy = f"c{rank // layout.shard_degree}" if layout.replicate_degree > 1 else ""
    return f"{copy}d{rank // sharing}r{rank % sharing // ulysses}u{rank % ulysses}"


def snapshot_name(rank: int, place: str = "") -> str:
    """The name of a rank's snapshot: ``snapshot_rank00_d0r0u0.pickle``."""
    return f"snapshot_rank{rank:02d}{f'_{place}' if place else ''}.pickle"


def loose_profiling(value: object) -> object:
    """Convert ``"0,1"`` or a number to a list of steps; any other value is returned unchanged."""
    if type(value) is int:
        return {"profile_steps": [value]}
    if isinstance(value, str) and _STEPS.fullmatch(value):
        return {"profile_steps": [int(step) for step in value.split(",")]}
    return value


def refuse_profiling(
    profiling: Profiling | None,
    *,
    device: Device = "cuda",
    is_dry: bool = False,
    steps: int | None = None,
    gpus: int | None = None,
) -> None:
    """Raise UsageError for snapshots on the CPU or in a dry run, past ``steps``, or of a rank that
    no trial has; ``gpus``: those of the largest layout. None: any.
    """
    if profiling is None:
        return
    named = () if profiling.ranks == "all" else profiling.ranks
    absent = [rank for rank in named if gpus is not None and rank >= gpus]
    if gpus is not None and absent:
        has = "1 GPU has rank 0 alone" if gpus == 1 else f"{gpus} GPUs have ranks 0 to {gpus - 1}"
        raise UsageError(
            f"{SETTING} records rank {absent[0]}, which no trial has: {has}",
            hint=f"leave `ranks` out of `{SETTING}`, which records every rank",
        )
    if is_dry or device == "cpu":
        why = "a dry run trains nothing" if is_dry else "PyTorch keeps none of the CPU's memory"
        raise UsageError(
            f"{SETTING} records the history of a GPU's memory, and {why}",
            hint="leave `--memory-profiler` out; without a GPU `highwater predict tiny --gpus "
            "1xH200-141GB --length 4k --exact --timeline timeline.pickle` traces one",
        )
    for step in profiling.profile_steps:
        if steps is not None and step >= steps:
            raise UsageError(
                f"{SETTING} records step {step}, and the last one is {steps - 1}: the first is 0",
                hint="for example `--memory-profiler 0`",
            )


def _refused(problem: str) -> RefusedError:
    return RefusedError(SETTING, problem, hint="for example `{}`", example="0,1")

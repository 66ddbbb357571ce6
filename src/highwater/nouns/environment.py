"""Environment: the variables that set the mode of PyTorch's caching allocator and tell a rank where
to meet the others, and what a search ran on and with, by an allow-list.
"""

import re
from collections.abc import Mapping

from highwater.nouns.codec import Record
from highwater.nouns.layout import Device
from highwater.nouns.settings import Allocator

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable's name, and the one that PyTorch before 2.9 reads: both are set, alike."""
ALLOCATOR_MODES: dict[Allocator, str] = {
    "native": "expandable_segments:False",
    "expandable": "expandable_segments:True",
}
ENV_IN_WORDS = f"{ALLOCATOR_VARIABLES[0]}={ALLOCATOR_MODES['expandable']}"
"""The guide's "Env", to be typed after ``export``."""
ENV_BEFORE_IN_WORDS = f"before PyTorch 2.9 the variable is {ALLOCATOR_VARIABLES[1]}"


def allocator_environment(allocator: Allocator) -> dict[str, str]:
    """Variables that tell the allocator its mode, to be set before any process starts."""
    return dict.fromkeys(ALLOCATOR_VARIABLES, ALLOCATOR_MODES[allocator])


def allocator_options(environment: Mapping[str, str]) -> list[str]:
    """The options that the environment sets for the allocator, as ``max_split_size_mb:64``, without
    blanks; commas within brackets are a value's own.
    """
    named = next(
        (environment[name] for name in reversed(ALLOCATOR_VARIABLES) if name in environment), ""
    )
    return re.findall(r"(?:\[[^\]]*\]|[^,\[])+", "".join(named.split()))


def ignored_options(
    environment: Mapping[str, str], device: Device, *, reads_mode: bool = False
) -> tuple[str, ...]:
    """A note that names what the environment asks of the allocator and no trial gets; none where
    there is nothing. ``reads_mode``: the mode is what trials on GPUs get.
    """
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
"""Path of the file through which the ranks of one trial meet. It is new for every trial, in a
folder that only its user can read, and nobody has to listen on a port for it
(docs/decisions/027)."""


RECORDED_VARIABLES = (
    *ALLOCATOR_VARIABLES,
    "CUDA_VISIBLE_DEVICES",
    "NCCL_BUFFSIZE",
    "CUBLAS_WORKSPACE_CONFIG",
)
"""Variables of the user's shell that are about memory or say which GPUs are seen. None of them can
hold a token or a key."""


class Environment(Record, frozen=True, kw_only=True):
    """The machine and shell in which a search was started.

    It has no names of hosts, users or directories, and no variables but those named above.
    """

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
    """Variables as the shell had them; trials are given an allocator by their rung."""

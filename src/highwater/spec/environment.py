"""Environment: what a search ran on and with, by an allow-list: what has no name here is not recorded."""

from highwater.spec.allocator import ALLOCATOR_VARIABLES
from highwater.spec.codec import Noun

RECORDED_VARIABLES = (
    *ALLOCATOR_VARIABLES,
    "CUDA_VISIBLE_DEVICES",
    "NCCL_BUFFSIZE",
    "CUBLAS_WORKSPACE_CONFIG",
)
"""Variables of the user's shell that are about memory or say which GPUs are seen. None of them can hold a token or a key."""


class Environment(Noun, frozen=True, kw_only=True):
    """Where a search was started. No names of hosts, users or directories, no variables but those named above."""

    versions: dict[str, str]
    """Installed versions of what trials run with; a package that is missing is absent."""
    driver_version: str | None = None
    gpu_names: tuple[str, ...] = ()
    """Of each visible GPU, as its driver names it."""
    gpu_memory_bytes: tuple[int, ...] = ()
    """Of each visible GPU, as its driver reports it."""
    cpu_cores: int
    host_memory_total_bytes: int
    variables: dict[str, str]
    """As the shell had them. Trials are given an allocator of their own, by their rung."""

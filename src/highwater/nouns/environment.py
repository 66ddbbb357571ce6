"""Environment: what a search ran on and with, by an allow-list.

What has no name here is not recorded.
"""

from highwater.nouns.allocator_variables import ALLOCATOR_VARIABLES
from highwater.nouns.codec import Record

RECORDED_VARIABLES = (
    *ALLOCATOR_VARIABLES,
    "CUDA_VISIBLE_DEVICES",
    "NCCL_BUFFSIZE",
    "CUBLAS_WORKSPACE_CONFIG",
)
"""Variables of the user's shell that are about memory or say which GPUs are seen.

None of them can hold a token or a key.
"""


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

"""The environment of a trial's processes: the user's, less what would change its memory, plus what
its settings ask.
"""

import os

from highwater.nouns.allocator_variables import ALLOCATOR_VARIABLES, allocator_environment
from highwater.nouns.settings import Allocator
from highwater.nouns.trial import TrialSpec
from highwater.units import MIB

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
    "THP_MEM_ALLOC_ENABLE": "1",
    "OMP_WAIT_POLICY": "passive",
}
"""Variables of what is measured on the CPU. One arena and a fixed threshold: a freed tensor goes
back to the system at once, and the same trial ends the same way. Pages of 2 MiB: to touch new
tensors page by page took a third of a trial's processor time. Threads that sleep while they wait:
those that spin take the core of who else is here, and times with it."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the network interface through which ranks talk."""
_LOOPBACK = "lo"
"""The network interface that nobody else can reach."""


def trial_environment(spec: TrialSpec, gpus: tuple[str, ...] | None = None) -> dict[str, str]:
    """The environment of a trial's processes.

    It is the user's, less what would change its memory, plus what its settings ask; of GPUs it
    shows these, None: those that this process sees.
    """
    environment = clean_environment(spec.settings.allocator)
    if (spec.layout.machines or 1) > 1:  # they are not reached by the loopback
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
    environment |= dict.fromkeys(_INTERFACES, _LOOPBACK)
    return environment

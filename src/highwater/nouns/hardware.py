"""Hardware: the GPUs of a machine as its driver reports them, the catalog of their kinds and of the
machines that usually have them, and their memory outside the allocator.
"""

import sys
from functools import cache
from typing import Literal

import msgspec

from highwater.errors import MachineError
from highwater.nouns.codec import Record, packaged
from highwater.units import GIB

Kernel = Literal["cudnn", "flash"]
"""A fused attention kernel."""

OLDEST_CAPABILITY = (8, 0)
"""Compute capability from which on a GPU has bf16 and runs the flash kernels."""
_HOPPER = (9, 0)
SAME_MEMORY = 0.02
"""Relative difference up to which GPUs' memories count as the same: drivers keep back a little."""

CPU_FLAGS = "--device cpu --memory 1GiB --start-length 256 --resolution 256 --max-length 4k"
"""A search on the CPU that ends within minutes."""
CPU_SEARCH = f"highwater find tiny {CPU_FLAGS}"
"""A whole command, with a small model: what hints offer where there is no GPU."""


class GpuKind(Record, frozen=True, kw_only=True):
    """One kind of GPU: its abilities, memory and price. ``source``: where each figure is from."""

    name: str
    match: str
    """Lower-case words, all of which are in the driver's name for it."""
    vendor: Literal["NVIDIA", "AMD"] = "NVIDIA"
    """Its maker; for AMD's, memory is predicted, and no trial is run."""
    host_gigabytes: tuple[int, ...] = ()
    """Sizes in the driver's name that are not the card's but its host's, in GB: ``GH200 480GB``."""
    compute_capability: tuple[int, int]
    """Source: https://developer.nvidia.com/cuda-gpus; of AMD's the oldest that trains."""
    usable_bytes: int | None
    """Memory that the driver reports as the card's total; None: nobody has read it."""
    bf16_dense_tflops: float | None
    """Dense bf16 matrix FLOP/s by the datasheet, in units of 10¹²; None: the card has no bf16."""
    flash_attention: bool
    """True if the flash kernels of PyTorch run on it (compute capability 8.0 and up)."""
    hour_dollars: float | None = None
    """Dollars of one for an hour, by ``LIST_PRICE``; None: nobody has read it."""
    source: str


LIST_PRICE = "RunPod's list price (Secure Cloud) of 2026-09-25"
"""Source of the catalog's prices: https://www.runpod.io/pricing as read on that day, in
https://github.com/tgarg01/silybench-data, derived/csv/gpu_prices.csv."""


LIST_PRICE_NOTE = f"dollars are by {LIST_PRICE}; `--price 2.50` names another for a GPU and hour"


class Gpu(Record, frozen=True, kw_only=True):
    """One GPU of this machine, as its driver reports it."""

    index: int
    name: str
    memory_total_bytes: int
    memory_used_bytes: int
    """Memory in use by anybody when it was read, the driver's own reserve included."""
    compute_capability: tuple[int, int]
    processes: tuple[int, ...]
    """Process ids that hold memory on it, if the driver tells."""


class UnreadableGpu(Record, frozen=True, kw_only=True):
    """A visible GPU of which the driver does not report what trials need."""

    index: int
    position: int
    """Its place among the visible GPUs, from 0: trials on more GPUs than this would use it."""
    reason: str
    """The driver's words."""


class Machine(Record, frozen=True, kw_only=True):
    """The machine that trials run on."""

    gpus: tuple[Gpu, ...]
    """The visible GPUs, in the order of CUDA, less those that cannot be read."""
    unreadable_gpus: tuple[UnreadableGpu, ...] = ()
    driver_version: str | None
    cpu_cores: int
    host_memory_total_bytes: int
    host_memory_available_bytes: int
    control_group_bytes: int | None = None
    """Host memory that this process and its trials may take; None: there is no limit."""
    versions: dict[str, str]
    """Installed versions of what trials run with; a package that is missing is absent."""

    @property
    def host_bytes(self) -> int:
        """Host memory that trials on GPUs may take, in bytes."""
        return min(self.host_memory_total_bytes, self.control_group_bytes or sys.maxsize)

    def with_memory(self, most_bytes: int) -> "Machine":
        """The machine with no more host memory than ``most_bytes``."""
        return self.replace(
            host_memory_total_bytes=min(self.host_memory_total_bytes, most_bytes),
            host_memory_available_bytes=min(self.host_memory_available_bytes, most_bytes),
        )

    def times(self, machines: int) -> "Machine":
        """The GPUs, cores and memory of so many machines like this one."""
        return self.replace(
            gpus=self.gpus * machines,
            cpu_cores=self.cpu_cores * machines,
            host_memory_total_bytes=self.host_memory_total_bytes * machines,
            host_memory_available_bytes=self.host_memory_available_bytes * machines,
        )


@cache
def gpu_catalog() -> tuple[GpuKind, ...]:
    """Every GPU kind the package knows, as data in ``nouns/catalog/gpus.json``."""
    return packaged("nouns/catalog/gpus.json", tuple[GpuKind, ...])


@cache
def kind_of(driver_name: str) -> GpuKind | None:
    """The catalog's entry for a driver's device name such as ``NVIDIA H200``; None if unknown."""
    words = driver_name.lower().replace("-", " ").split()
    matches = [kind for kind in gpu_catalog() if all(word in words for word in kind.match.split())]
    return max(matches, key=lambda kind: len(kind.match), default=None)


def hour_dollars_of(driver_name: str, price: float | None = None) -> float | None:
    """Price of a GPU in dollars an hour: ``price`` if given, else the catalog's; None: unknown."""
    kind = kind_of(driver_name)
    return price if price is not None or kind is None else kind.hour_dollars


def kind_name(driver_name: str) -> str:
    """The catalog's name of a GPU, or else the driver's."""
    kind = kind_of(driver_name)
    return driver_name if kind is None else kind.name


def runs_trials(driver_name: str) -> bool:
    """True if trials can run on a GPU of this name, which is so unless it is known to be AMD's."""
    kind = kind_of(driver_name)
    return kind is None or kind.vendor == "NVIDIA"


def kernels(compute_capability: tuple[int, int]) -> tuple[Kernel, ...]:
    """Fused attention kernels to try at this compute capability, the fastest first."""
    return ("cudnn", "flash") if compute_capability >= _HOPPER else ("flash",)


def lacking(kind: GpuKind) -> tuple[str, ...]:
    """Names of features that training needs and this GPU kind lacks; empty if it can train."""
    has = {"bf16": kind.bf16_dense_tflops is not None, "flash attention": kind.flash_attention}
    return tuple(name for name, there in has.items() if not there)


def unfit_gpu(driver_name: str, compute_capability: tuple[int, int]) -> MachineError | None:
    """The error for a GPU without bf16 or without the flash kernels; None if it can train."""
    kind = kind_of(driver_name)
    missing = lacking(kind) if kind is not None else ()
    if compute_capability < OLDEST_CAPABILITY:
        missing = ("bf16", "flash attention")
    if not missing:
        return None
    major, minor = compute_capability
    oldest = ".".join(map(str, OLDEST_CAPABILITY))
    return MachineError(
        f"{driver_name} (compute capability {major}.{minor}) has no {' and no '.join(missing)}",
        hint=f"train on a GPU of compute capability {oldest} or newer, or `{CPU_SEARCH}` on "
        "the CPU",
    )


class Reading(Record, frozen=True, kw_only=True):
    """Bytes that a library took when it was first used, the largest of all ranks."""

    name: str
    outside_bytes: int
    """Bytes by the driver, beyond what the caching allocator holds."""
    allocator_bytes: int
    """Bytes kept alive in the caching allocator."""


class Constants(Record, frozen=True, kw_only=True):
    """Memory outside the allocator as measured on ``gpus`` GPUs of one kind, a process on each."""

    schema_version: int = 1
    device_name: str
    gpus: int
    versions: dict[str, str]
    readings: tuple[Reading, ...]

    def outside_bytes(self, *names: str) -> int:
        """Sum of the named readings' bytes outside the allocator; a missing reading counts as 0."""
        return sum(reading.outside_bytes for reading in self.readings if reading.name in names)

    @property
    def context_bytes(self) -> int:
        """Bytes of one GPU outside the allocator that are not NCCL's."""
        others = (reading for reading in self.readings if reading.name not in OF_NCCL)
        return sum(reading.outside_bytes for reading in others)


NCCL_GROUP = ("NCCL group", "NCCL collectives")
"""Readings of one communicator and its first collectives."""
NCCL_ALL_TO_ALL = "NCCL all-to-all"
"""The reading of what the first all-to-all adds to its communicator."""
OF_NCCL = (*NCCL_GROUP, NCCL_ALL_TO_ALL, "second NCCL group", "its all-to-all")
CUBLAS_WORKSPACES = ("cuBLAS", "cuBLAS, backward")
"""Readings that the caching allocator keeps for as long as the process lives."""


MEASURED_SCHEMA_VERSION = 1
"""Version of the document of ``highwater doctor --json``, as it is written and read."""


class MeasuredConstants(msgspec.Struct, frozen=True, kw_only=True):
    """The part of ``highwater doctor --measure --json`` that a prediction reads."""

    schema_version: int
    constants: tuple[Constants, ...]
    """Constants by number of GPUs."""


THIS_MACHINE = "this machine"
"""Name of a machine whose memory was read here, not taken from the catalog."""


class Host(Record, frozen=True, kw_only=True):
    """A machine with GPUs, as it is rented or built."""

    kind: str
    """Its GPUs, by the catalog's name."""
    gpus: int
    """GPUs that it has; if it is not divided, that it can have."""
    host_gib: int
    """Host memory of the whole machine, in GiB."""
    machine: str
    """The vendor's name for it."""
    source: str
    is_divided: bool = True
    """True if a user of some of its GPUs has their share of its memory; a desktop has one owner."""


class HostMemory(Record, frozen=True, kw_only=True):
    """Host memory that is assumed for the GPUs in question."""

    host_bytes: int
    """Bytes for all GPUs that were asked about, on one machine."""
    machine: str
    """The machine, and how many of its GPUs are meant, if not all."""
    source: str


@cache
def host_catalog() -> tuple[Host, ...]:
    """Every machine type with known host memory, by GPU kind and number of GPUs."""
    return packaged("nouns/catalog/hosts.json", tuple[Host, ...])


def default_host(device_name: str, gpus: int) -> HostMemory | None:
    """Host memory for ``gpus`` GPUs on one machine: all memory of the smallest machine type with as
    many, or these GPUs' share of a larger one. ``device_name`` is a driver's or the catalog's.
    None: no machine type of the catalog has them. With several machines ``gpus`` is each one's.
    """
    kind = kind_of(device_name)
    known = [host for host in host_catalog() if kind is not None and host.kind == kind.name]
    large = [host for host in known if host.gpus >= gpus > 0]
    if not large:
        return None
    host = min(large, key=lambda each: each.gpus)
    if not host.is_divided or host.gpus == gpus:
        return HostMemory(host_bytes=host.host_gib * GIB, machine=host.machine, source=host.source)
    return HostMemory(
        host_bytes=host.host_gib * GIB * gpus // host.gpus,
        machine=f"{gpus} of {host.gpus} GPUs of {host.machine}",
        source=host.source,
    )

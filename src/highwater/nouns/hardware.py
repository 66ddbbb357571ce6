"""Hardware: the GPUs of a machine as its driver reports them, the catalog of their kinds and of the
machines that usually have them, what their memory is spent on besides tensors, and which of them
the trials of a request run on; what is not there is refused.
"""

import json
import shlex
import sys
from functools import cache
from importlib.resources import files
from typing import Literal, NamedTuple

import msgspec

from highwater.errors import MachineError, UsageError
from highwater.model.footprint import PROCESS_BYTES, host_state_bytes, staged_gradient_bytes
from highwater.model.model import STATE_BYTES_PER_PARAMETER, Model
from highwater.nouns.codec import Record, from_builtins
from highwater.nouns.declaration import words_of
from highwater.nouns.layout import Device
from highwater.nouns.objective import without_reference
from highwater.nouns.request import Request
from highwater.nouns.study import Cell, counted_ranks
from highwater.units import GIB, MIB, format_bytes

Kernel = Literal["cudnn", "flash"]
"""A fused attention."""

OLDEST_CAPABILITY = (8, 0)
"""Compute capability from which on a GPU has bf16 and runs the flash kernels."""
_HOPPER = (9, 0)
SAME_MEMORY = 0.02
"""Share that two GPUs' memories may differ by and still be the same: drivers keep back a little."""

CPU_FLAGS = "--device cpu --memory 1GiB --start-length 256 --resolution 256 --max-length 4k"
"""A search on the CPU that ends within minutes."""
CPU_SEARCH = f"highwater find tiny {CPU_FLAGS}"
"""A whole command, with a model that fits: what hints offer where there is no GPU."""


class GpuKind(Record, frozen=True, kw_only=True):
    """Abilities of one kind of GPU. Source of each figure in the catalog's ``source``."""

    name: str
    match: str
    """Words, in lower case, which are all in the driver's name for it."""
    vendor: Literal["NVIDIA", "AMD"] = "NVIDIA"
    """On AMD's, memory is predicted, and no trial is run."""
    host_gigabytes: tuple[int, ...] = ()
    """Sizes in the driver's name that are not the card's but its host's: ``GH200 480GB``."""
    compute_capability: tuple[int, int]
    """Source: https://developer.nvidia.com/cuda-gpus; of AMD's the oldest that trains."""
    usable_bytes: int | None
    """Memory the driver reports as the card's total; None where nobody has read it."""
    bf16_dense_tflops: float | None
    """Dense bf16 matrix FLOP/s by the datasheet, in units of 10¹²; None: the card has no bf16."""
    flash_attention: bool
    """True if the flash kernels of PyTorch run on it (compute capability 8.0 and up)."""
    source: str


class Gpu(Record, frozen=True, kw_only=True):
    """One GPU of this machine, as its driver reports it."""

    index: int
    name: str
    memory_total_bytes: int
    memory_used_bytes: int
    """Memory used by anybody when it was read, the driver's own reserve included."""
    compute_capability: tuple[int, int]
    processes: tuple[int, ...]
    """Process ids that hold memory on it, where the driver tells."""


class UnreadableGpu(Record, frozen=True, kw_only=True):
    """A GPU that is there, and of which the driver does not tell what trials need to know."""

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
    """Host memory that this process and its trials may take; None: all."""
    versions: dict[str, str]
    """Installed versions of what trials run with; a package that is missing is absent."""

    @property
    def host_bytes(self) -> int:
        """Host memory for what trials on GPUs keep there."""
        return min(self.host_memory_total_bytes, self.control_group_bytes or sys.maxsize)


@cache
def gpu_catalog() -> tuple[GpuKind, ...]:
    """Every GPU kind the package knows, as data in ``nouns/catalog/gpus.json``."""
    text = (files("highwater.nouns") / "catalog" / "gpus.json").read_text(encoding="utf-8")
    return tuple(from_builtins(entry, GpuKind) for entry in json.loads(text))


def kind_of(driver_name: str) -> GpuKind | None:
    """The catalog's entry for a driver's device name such as ``NVIDIA H200``; None when unknown."""
    words = driver_name.lower().replace("-", " ").split()
    matches = [kind for kind in gpu_catalog() if all(word in words for word in kind.match.split())]
    return max(matches, key=lambda kind: len(kind.match), default=None)


def kind_name(driver_name: str) -> str:
    """The catalog's name of a GPU, or else the driver's."""
    kind = kind_of(driver_name)
    return driver_name if kind is None else kind.name


def runs_trials(driver_name: str) -> bool:
    """True if trials can run on such a GPU, as far as its name tells: on NVIDIA's alone."""
    kind = kind_of(driver_name)
    return kind is None or kind.vendor == "NVIDIA"


def kernels(compute_capability: tuple[int, int]) -> tuple[Kernel, ...]:
    """The fused attentions to try on such a GPU, the fastest first."""
    return ("cudnn", "flash") if compute_capability >= _HOPPER else ("flash",)


def lacking(kind: GpuKind) -> tuple[str, ...]:
    """Abilities that training needs and this kind lacks; empty for one that can train."""
    has = {"bf16": kind.bf16_dense_tflops is not None, "flash attention": kind.flash_attention}
    return tuple(name for name, there in has.items() if not there)


def refuse_unfit_gpu(driver_name: str, compute_capability: tuple[int, int]) -> None:
    """Raise MachineError for a GPU without bf16 or without the flash kernels."""
    kind = kind_of(driver_name)
    missing = lacking(kind) if kind is not None else ()
    if compute_capability < OLDEST_CAPABILITY:
        missing = ("bf16", "flash attention")
    if missing:
        major, minor = compute_capability
        oldest = ".".join(map(str, OLDEST_CAPABILITY))
        raise MachineError(
            f"{driver_name} (compute capability {major}.{minor}) has no {' and no '.join(missing)}",
            hint=f"train on a GPU of compute capability {oldest} or newer, or `{CPU_SEARCH}` on "
            "the CPU",
        )


class Reading(Record, frozen=True, kw_only=True):
    """Bytes that one more thing took when it was used first. The largest of all ranks."""

    name: str
    outside_bytes: int
    """Bytes by the driver, beyond what the caching allocator holds."""
    allocator_bytes: int
    """Bytes kept alive in the caching allocator."""


class Constants(Record, frozen=True, kw_only=True):
    """Readings of one process for each of ``gpus`` GPUs of a kind, in the order of first use."""

    schema_version: int = 1
    device_name: str
    gpus: int
    versions: dict[str, str]
    readings: tuple[Reading, ...]

    def outside_bytes(self, *names: str) -> int:
        """Bytes of these readings together; of one that there is not for so many GPUs 0."""
        return sum(reading.outside_bytes for reading in self.readings if reading.name in names)

    @property
    def context_bytes(self) -> int:
        """Bytes outside the allocator, of everything but NCCL."""
        others = (reading for reading in self.readings if reading.name not in OF_NCCL)
        return sum(reading.outside_bytes for reading in others)


NCCL_GROUP = ("NCCL group", "NCCL collectives")
"""Readings of one communicator and its first collectives."""
NCCL_ALL_TO_ALL = "NCCL all-to-all"
"""The reading of what the first all-to-all adds to the communicator."""
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
"""The name of the machine whose memory was read, and not taken from the catalog."""


class Host(Record, frozen=True, kw_only=True):
    """A machine as it is rented or built."""

    kind: str
    """Its GPUs, by the catalog's name."""
    gpus: int
    """GPUs that it has; of one that is not divided, at the most."""
    host_gib: int
    """Host memory of the whole machine, in GiB."""
    machine: str
    """The vendor's name for it."""
    source: str
    is_divided: bool = True
    """True if who uses some of its GPUs has as much of its memory: a desktop has one owner."""


class HostMemory(Record, frozen=True, kw_only=True):
    """Host memory that a machine is taken to have."""

    host_bytes: int
    """For the GPUs that were asked about, on one machine."""
    machine: str
    """The machine that it is of, with the share where not all of its GPUs are used."""
    source: str


@cache
def host_catalog() -> tuple[Host, ...]:
    """Every machine whose host memory is known, by kind and number of GPUs."""
    text = (files("highwater.nouns") / "catalog" / "hosts.json").read_text(encoding="utf-8")
    return tuple(from_builtins(entry, Host) for entry in json.loads(text))


def default_host(device_name: str, gpus: int) -> HostMemory | None:
    """Host memory of one machine with so many GPUs of a driver's name, or the catalog's. That of
    the smallest machine with as many; of a larger one the share of its GPUs. None of a kind or a
    number that no machine of the catalog has: ``gpus`` of several machines are asked about by those
    of each.
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


_PROCESSES_PER_CORE = 4
"""Processes for each core beyond which a trial on the CPU would only wait."""
_MOST_CPU_BYTES = 8 * GIB
"""Memory that a process on the CPU may take where nobody names a limit, at most."""


class TrialHardware(NamedTuple):
    """The hardware that the trials of a question run on."""

    device: Device
    counts: tuple[int, ...]
    """GPUs, or processes on the CPU, that are searched."""
    gpus: tuple[Gpu, ...]
    """The GPUs that the largest count takes; none on the CPU, and in a dry run without one."""

    @property
    def total_bytes(self) -> int | None:
        """Memory of the smallest of the GPUs; None without one."""
        return min((gpu.memory_total_bytes for gpu in self.gpus), default=None)

    @property
    def device_name(self) -> str:
        """``CPU``, or the GPUs as their driver names them; raises UsageError for different ones."""
        if self.device == "cpu":
            return "CPU"
        names = list(dict.fromkeys(gpu.name for gpu in self.gpus))
        if len(names) > 1:
            same = ",".join(str(gpu.index) for gpu in self.gpus if gpu.name == names[0])
            raise UsageError(
                f"these GPUs are of different kinds: {', '.join(names)}",
                hint=f"`CUDA_VISIBLE_DEVICES={same}` keeps the {names[0]}",
            )
        return names[0] if names else "simulated GPU"


def hardware_of(request: Request, machine: Machine, model: Model, device: Device) -> TrialHardware:
    """The part of a machine that a request means; raises for what is missing or impossible."""
    if request.device is None and device == "cpu":
        _refuse_what_needs_a_gpu(request, machine, model)
    counts = _counts(request, machine, device, model)
    gpus = used_gpus(machine, device=device, count=max(counts))
    where = TrialHardware(device=device, counts=counts, gpus=gpus)
    _check_memory(request, machine, model, where)
    return where


def cpu_memory(request: Request, machine: Machine) -> int:
    """Bytes that each process on the CPU may take where nobody names a limit: half of the free
    memory, shared by all that run at once. In steps of 512 MiB, below 1 GiB of 128 MiB: what is
    free a moment later then mostly asks the same question.
    """
    processes = max(request.gpus or (1,)) * (request.max_concurrent_trials or 1)
    share = min(machine.host_memory_available_bytes // (2 * processes), _MOST_CPU_BYTES)
    step = GIB // 2 if share >= GIB else 128 * MIB
    return max(share // step, 1) * step


def used_gpus(machine: Machine, *, device: Device, count: int) -> tuple[Gpu, ...]:
    """The GPUs that trials on ``count`` GPUs run on: the first ones that are visible."""
    return machine.gpus[:count] if device == "cuda" else ()


def check_host_memory(machine: Machine, model: Model, cells: tuple[Cell, ...]) -> None:
    """Raise MachineError for states and processes that this machine's host memory does not hold."""
    for cell in cells:
        gpus, settings = cell.layout.gpus, cell.settings
        states = host_state_bytes(
            model.shape, settings, layout=cell.layout
        ) + staged_gradient_bytes(model.shape, settings, layout=cell.layout)
        processes = cell.layout.machine_gpus * PROCESS_BYTES
        if states and states + processes > machine.host_bytes:
            is_offloaded = settings.offloads_model or settings.offloads_states
            flags = " ".join(words_of({"offload": settings.offload}))
            what = "offloaded states" if is_offloaded else "the reference"
            raise MachineError(
                f"{what} of {model.name} on {counted_ranks(gpus, 'cuda')} take "
                f"{format_bytes(states)} of host memory, the processes {format_bytes(processes)}, "
                f"and this machine has {format_bytes(machine.host_bytes)}",
                hint=f"leave `{flags}` out"
                if is_offloaded
                else f"use `--objective {without_reference(settings.objective)}`, which has no "
                "reference",
            )


def _refuse_what_needs_a_gpu(request: Request, machine: Machine, model: Model) -> None:
    """Raise MachineError for what is meant for GPUs: it must not become a question to the CPU."""
    workers, budget = max(request.gpus or (1,)), request.memory_bytes
    if workers > 1:
        meant = f"{workers} GPUs are asked for"
    elif budget is not None and budget > machine.host_memory_total_bytes:
        meant = (
            f"{format_bytes(budget)} is more than this machine's memory, "
            f"{format_bytes(machine.host_memory_total_bytes)}"
        )
    else:
        return
    memory = "" if budget is not None else " --memory 80GiB"
    raise MachineError(
        f"no GPU is visible, and {meant}",
        hint=f"add `--device cuda{memory} --dry-run` to train nothing; "
        f"`{_cpu_search(request, model)}` searches on the CPU",
    )


def _cpu_search(request: Request, model: Model) -> str:
    """A search on the CPU that can be answered: of this model where it has room, or a tiny one."""
    if model.shape.parameters * STATE_BYTES_PER_PARAMETER > GIB // 2:
        return CPU_SEARCH
    return f"highwater find {shlex.quote(request.model)} {CPU_FLAGS}"


def _counts(request: Request, machine: Machine, device: Device, model: Model) -> tuple[int, ...]:
    present = len(machine.gpus)
    if device == "cpu" or request.dry_run:
        counts = tuple(dict.fromkeys(request.gpus or (1,)))
        most = machine.cpu_cores * _PROCESSES_PER_CORE
        if max(counts) > most and not request.dry_run:
            raise MachineError(
                f"{max(counts)} processes are too many for {machine.cpu_cores} CPU cores",
                hint=f"use `--gpus {most}` or fewer",
            )
        return counts
    if not present:
        raise MachineError(
            "the driver shows no GPU here",
            hint=f"`{_cpu_search(request, model)}` searches on the CPU",
        )
    powers = tuple(2**exponent for exponent in range(present.bit_length()))
    counts = tuple(dict.fromkeys(request.gpus or powers))
    if max(counts) > present:
        works = " ".join(str(count) for count in counts if count <= present) or str(present)
        raise MachineError(
            f"{max(counts)} GPUs are asked for, and {present} {'is' if present == 1 else 'are'} "
            f"present",
            hint=f"use `--gpus {works}`",
        )
    return counts


def _check_memory(request: Request, machine: Machine, model: Model, where: TrialHardware) -> None:
    """Raise for a memory that is not named or not there, and for a headroom that leaves nothing."""
    budget, total_bytes = request.memory_bytes, where.total_bytes
    limit = budget or total_bytes
    if limit is None and where.device == "cuda":
        raise UsageError(
            "a dry run without a GPU needs a memory limit", hint="add `--memory 80GiB`"
        )
    if limit is None:
        raise UsageError(
            "no GPU is visible, and neither the CPU nor a memory limit is named",
            hint=f"for example `{_cpu_search(request, model)}`",
        )
    if budget is not None and total_bytes is not None and budget > total_bytes:
        raise UsageError(
            f"--memory {format_bytes(budget)} is more than the GPU has, "
            f"{format_bytes(total_bytes)}",
            hint="leave `--memory` out to use the whole card",
        )
    present, workers = machine.host_memory_total_bytes, max(where.counts)
    is_run_here = where.device == "cpu" and not request.dry_run
    if budget is not None and is_run_here and budget * workers > present:
        raise MachineError(
            f"{workers} x {format_bytes(budget)} is more than this machine's memory, "
            f"{format_bytes(present)}",
            hint=f"use `--memory {max(1, present // workers // MIB)}MiB`",
        )
    if request.margin_bytes >= limit:
        raise UsageError(
            f"a headroom of {format_bytes(request.margin_bytes)} leaves nothing of "
            f"{format_bytes(limit)}",
            hint="use a smaller `--headroom`, or leave it out",
        )

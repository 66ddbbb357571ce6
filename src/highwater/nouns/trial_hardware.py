"""Trial hardware: the part of a machine that the trials of a request run on. Requests for GPUs or
memory that the machine lacks are refused.
"""

import shlex
from typing import NamedTuple

from highwater.errors import MachineError, UsageError
from highwater.model.held_bytes import PROCESS_BYTES, host_state_bytes, staged_gradient_bytes
from highwater.model.model import STATE_BYTES_PER_PARAMETER, Model
from highwater.nouns.declaration import words_of
from highwater.nouns.hardware import CPU_FLAGS, CPU_SEARCH, Gpu, Machine
from highwater.nouns.layout import Device
from highwater.nouns.objective import without_reference
from highwater.nouns.request import Request
from highwater.nouns.study import Cell, counted_ranks
from highwater.units import GIB, MIB, format_bytes

_PROCESSES_PER_CORE = 4
"""Processes for each core beyond which a trial on the CPU would only wait."""
_MOST_CPU_BYTES = 8 * GIB
"""Most memory of a process on the CPU where no limit is named."""


class TrialHardware(NamedTuple):
    """The GPUs that a question's trials run on, or the number of processes on the CPU."""

    device: Device
    counts: tuple[int, ...]
    """GPUs, or processes on the CPU, that are searched."""
    gpus: tuple[Gpu, ...]
    """The GPUs that the largest count takes; none on the CPU, and in a dry run without one."""

    @property
    def total_bytes(self) -> int | None:
        """Memory in bytes of the smallest GPU; None if there is no GPU."""
        return min((gpu.memory_total_bytes for gpu in self.gpus), default=None)

    @property
    def device_name(self) -> str:
        """``CPU``, or the GPUs' name by their driver; UsageError for GPUs of several kinds."""
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
    """The GPUs and memory that a request runs on. Raises UsageError or MachineError."""
    if request.device is None and device == "cpu":
        _refuse_what_needs_a_gpu(request, machine, model)
    counts = _counts(request, machine, device, model)
    gpus = used_gpus(machine, device=device, count=max(counts))
    hardware = TrialHardware(device=device, counts=counts, gpus=gpus)
    budget, total_bytes = request.memory_bytes, hardware.total_bytes
    limit = budget or total_bytes
    if limit is None and hardware.device == "cuda":
        raise UsageError(
            "a dry run without a GPU needs a memory limit", hint="add `--memory 80GiB`"
        )
    if limit is None:
        hint = f"for example `{_cpu_search(request, model)}`"
        if "torch" not in machine.versions:
            predicted = f"highwater predict {shlex.quote(request.model)} --gpus 4xA100-80GB"
            hint = f"use `{predicted}`, which needs neither a GPU nor torch"
        problem = "no GPU is visible, and neither the CPU nor a memory limit is named"
        raise UsageError(problem, hint=hint)
    if budget is not None and total_bytes is not None and budget > total_bytes:
        raise UsageError(
            f"--memory {format_bytes(budget)} is more than the GPU has, "
            f"{format_bytes(total_bytes)}",
            hint="leave `--memory` out to use the whole card",
        )
    present, workers = machine.host_memory_total_bytes, max(hardware.counts)
    is_run_here = hardware.device == "cpu" and not request.dry_run
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
    return hardware


def cpu_memory(request: Request, machine: Machine) -> int:
    """Bytes for each CPU process if no limit is named: an even share of half of the free memory. It
    is rounded down to 512 MiB, below 1 GiB to 128 MiB, so that a later request mostly gives the
    same question although free memory has changed a little.
    """
    processes = max(request.gpus or (1,)) * (request.max_concurrent_trials or 1)
    share = min(machine.host_memory_available_bytes // (2 * processes), _MOST_CPU_BYTES)
    step = GIB // 2 if share >= GIB else 128 * MIB
    return max(share // step, 1) * step


def used_gpus(machine: Machine, *, device: Device, count: int) -> tuple[Gpu, ...]:
    """The GPUs that trials on ``count`` GPUs use: the first visible ones."""
    return machine.gpus[:count] if device == "cuda" else ()


def check_host_memory(machine: Machine, model: Model, cells: tuple[Cell, ...]) -> None:
    """Raise MachineError if a cell's states and processes are larger than this host's memory."""
    for cell in cells:
        gpus, settings = cell.layout.gpus, cell.settings
        states = host_state_bytes(
            model.shape, settings, layout=cell.layout
        ) + staged_gradient_bytes(model.shape, settings, layout=cell.layout)
        processes = cell.layout.machine_gpus * PROCESS_BYTES
        if states and states + processes > machine.host_bytes:
            is_offloaded = settings.offloads_model or settings.offloads_states
            flags = " ".join(words_of({"offload": settings.offload}))
            what = "the states" if is_offloaded else "the reference"
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
    """Raise MachineError if a request that needs GPUs would run on the CPU."""
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
    """A command for a search on the CPU: with this model if it is small enough, else a tiny one."""
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

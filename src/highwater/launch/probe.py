"""Probe: what this machine is. GPUs as the driver reports them, host memory, installed versions; imports no torch.

``CUDA_VISIBLE_DEVICES`` is honoured, so that the GPUs listed are the ones that a trial will see.
"""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import psutil

from highwater.errors import MachineError
from highwater.spec.hardware import Gpu, Machine, kind_of
from highwater.units import GIB, format_bytes

EMPTY_GPU_BYTES = GIB
"""A driver reports up to about 0.6 GiB as used on an empty card; a CUDA context of somebody else's adds as much again."""

_PACKAGES = ("highwater", "torch", "transformers", "safetensors", "nvidia-ml-py")
_OLDEST_CAPABILITY = (8, 0)


def probe() -> Machine:
    """This machine, read now; ``gpus`` is empty when there is no GPU or no driver. Takes milliseconds."""
    gpus, driver_version = _probe_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    memory = psutil.virtual_memory()
    return Machine(
        gpus=gpus,
        driver_version=driver_version,
        cpu_cores=len(os.sched_getaffinity(0)),
        host_memory_total_bytes=memory.total,
        host_memory_available_bytes=memory.available,
        versions={"python": platform.python_version(), **_installed_versions()},
    )


def busy_gpus(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Those that somebody else uses: with processes on them, or more used memory than an empty card has."""
    return tuple(gpu for gpu in gpus if gpu.processes or gpu.memory_used_bytes > EMPTY_GPU_BYTES)


def refuse_busy_gpus(machine: Machine, *, count: int) -> None:
    """Raise MachineError when one of the first ``count`` GPUs is in use: its trials would measure somebody else."""
    busy = busy_gpus(machine.gpus[:count])
    if not busy:
        return
    free = [gpu.index for gpu in machine.gpus if gpu not in busy_gpus(machine.gpus)]
    all_the_same = "`highwater find --allow-busy` starts all the same"
    if len(free) >= count:
        hint = f"`CUDA_VISIBLE_DEVICES={','.join(map(str, free[:count]))}` takes free ones; {all_the_same}"
    else:
        hint = f"wait until they are free, `highwater doctor` shows them; {all_the_same}"
    raise MachineError("; ".join(_use_of(gpu) for gpu in busy), hint=hint)


def refuse_unfit_gpu(gpu: Gpu) -> None:
    """Raise MachineError for a GPU without bf16 or without the flash kernels."""
    kind = kind_of(gpu.name)
    missing = [
        what
        for what, lacks in (
            ("bf16", gpu.compute_capability < _OLDEST_CAPABILITY or (kind is not None and kind.bf16_dense_tflops is None)),
            ("flash attention", gpu.compute_capability < _OLDEST_CAPABILITY or (kind is not None and not kind.flash_attention)),
        )
        if lacks
    ]
    if missing:
        major, minor = gpu.compute_capability
        raise MachineError(
            f"GPU {gpu.index}, {gpu.name} (compute capability {major}.{minor}), has no {' and no '.join(missing)}",
            hint="train on a GPU of compute capability 8.0 or newer, or `--device cpu --memory 2GiB`",
        )


def visible_indices(uuids: Sequence[str], visible: str | None) -> tuple[int, ...]:
    """Which of the driver's GPUs a CUDA program sees, in its order, under ``CUDA_VISIBLE_DEVICES=visible``.

    Entries are indices or beginnings of UUIDs; as in CUDA, the list ends before the first one that names no GPU.
    Source: CUDA C++ Programming Guide, environment variables.
    """
    if visible is None:
        return tuple(range(len(uuids)))
    seen: list[int] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdecimal():
            matches = [int(entry)] if int(entry) < len(uuids) else []
        else:
            matches = [index for index, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if len(matches) != 1 or matches[0] in seen:
            break
        seen.append(matches[0])
    return tuple(seen)


def _probe_gpus(visible: str | None) -> tuple[tuple[Gpu, ...], str | None]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, no GPU, or no right to it: for trials all the same
        return (), None
    try:
        uuids = [str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i))) for i in range(pynvml.nvmlDeviceGetCount())]
        gpus = tuple(_gpu(index) for index in visible_indices(uuids, visible))
        return gpus, str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int) -> Gpu:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        processes = tuple(sorted(int(process.pid) for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)))
    except pynvml.NVMLError:  # not told inside some containers
        processes = ()
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        name=str(pynvml.nvmlDeviceGetName(handle)),
        memory_total_bytes=int(memory.total),
        memory_used_bytes=int(memory.used),
        compute_capability=(int(major), int(minor)),
        processes=processes,
    )


def _installed_versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _use_of(gpu: Gpu) -> str:
    by = f" by process {', '.join(map(str, gpu.processes))}" if gpu.processes else ""
    return f"GPU {gpu.index} is in use: {format_bytes(gpu.memory_used_bytes)}{by}"

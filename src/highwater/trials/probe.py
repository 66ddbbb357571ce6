"""Probe: read this machine's GPUs, host memory and installed versions, without importing torch.

GPUs are read from the driver. ``CUDA_VISIBLE_DEVICES`` is honoured, so that the GPUs listed are
those that a trial will see. Its indices count by PCI bus, as the driver does; trials run with
``CUDA_DEVICE_ORDER=PCI_BUS_ID``, whatever the shell has, and so count alike.
"""

import os
import platform
import re
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import psutil

from highwater.errors import MachineError
from highwater.nouns.cluster import Cluster, card_memory, cluster
from highwater.nouns.control_group import host_memory_bytes
from highwater.nouns.environment import RECORDED_VARIABLES, Environment
from highwater.nouns.hardware import CPU_SEARCH, Gpu, Machine, UnreadableGpu
from highwater.nouns.settings import Settings
from highwater.trials.ranks import answered
from highwater.units import GIB, format_bytes

EMPTY_GPU_BYTES = GIB
"""Used memory up to which a GPU counts as empty. A driver reports up to about 0.6 GiB in use on an
empty card; a CUDA context of another user adds as much again."""

_PACKAGES = ("highwater", "torch", "transformers", "safetensors", "nvidia-ml-py")
_NEEDED = {"torch": ((2, 11), (2, 14)), "transformers": ((5, 17), None)}
"""First release that works and first that may not, as in the extra ``train`` of pyproject.toml."""
OLDEST = {
    "peft": (0, 20),
    "torchao": (0, 18),
    "bitsandbytes": (0, 49),
    "ray": (2, 50),
    "tensorboard": (2, 18),
    "wandb": (0, 31),
    "mlflow": (3, 17),
    "trackio": (0, 43),
}
"""First release that works of packages that some settings need, as in pyproject.toml's extras."""
INSTALL_COMMAND = "pip install '.[train]'"
INSTALL_HINT = f"`{INSTALL_COMMAND}` in the checkout of highwater"
PREDICTION = "highwater predict Qwen3-8B --gpus 4xA100-80GB"
"""A command that needs no more than the package itself."""
_TORCH_REQUIREMENT = "torch>=2.11,<2.14"
_ENDING_S = 10.0
_RANK = "highwater.engine.training.worker"
_INSTALLED = cache(version)  # not the error for a missing package, which may yet come
_ASK_TORCH = "import torch; print(torch.version.cuda, torch.cuda.is_available())"


def probe(visible: Sequence[str] | None = None) -> Machine:
    """Read this machine, in milliseconds. ``visible``: GPUs to read; None: the environment's."""
    import pynvml

    shown = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else ",".join(visible)
    gpus, unreadable, driver_version = read_gpus(pynvml, shown)
    memory = psutil.virtual_memory()
    return Machine(
        gpus=gpus,
        unreadable_gpus=unreadable,
        driver_version=driver_version,
        cpu_cores=len(os.sched_getaffinity(0)),
        host_memory_total_bytes=memory.total,
        host_memory_available_bytes=min(memory.available, host_memory_bytes()),
        control_group_bytes=host_memory_bytes(),
        versions={"python": platform.python_version(), **versions_of(_PACKAGES)},
    )


def environment(machine: Machine | None = None) -> Environment:
    """The machine (default: this one) and the allow-listed shell variables, for a study."""
    machine = probe() if machine is None else machine
    return Environment(
        versions=machine.versions,
        driver_version=machine.driver_version,
        gpu_names=tuple(gpu.name for gpu in machine.gpus),
        gpu_memory_bytes=tuple(gpu.memory_total_bytes for gpu in machine.gpus),
        cpu_cores=machine.cpu_cores,
        host_memory_total_bytes=machine.host_memory_total_bytes,
        variables={name: os.environ[name] for name in RECORDED_VARIABLES if name in os.environ},
    )


def gpus_meant(gpus: str | int | None, gpu_memory: str | int | None) -> Cluster:
    """The GPUs that a user names, or else this machine's. Raises the errors of ``cluster``."""
    text = None if gpus is None else str(gpus)
    # counts alone, `8` or `2x8`, name no kind: this machine's is meant
    is_here = text is None or re.fullmatch(r"\s*\d+(?:\s*[xX×*]\s*\d+)?\s*", text) is not None
    memory_bytes = None if gpu_memory is None else card_memory(str(gpu_memory))
    return cluster(text, gpu_memory_bytes=memory_bytes, machine=probe() if is_here else None)


def busy_gpus(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs in use: with processes, or with more memory in use than an idle GPU."""
    return tuple(gpu for gpu in gpus if gpu.processes or gpu.memory_used_bytes > EMPTY_GPU_BYTES)


def refuse_busy_gpus(machine: Machine, *, count: int) -> None:
    """Raise MachineError if one of the first ``count`` GPUs is in use. Our own ranks whose launcher
    was killed end within seconds; this waits for them.
    """
    busy = busy_gpus(machine.gpus[:count])
    ranks = [rank for gpu in busy for rank in _ranks_on(gpu)]
    if ranks and not psutil.wait_procs(ranks, timeout=_ENDING_S)[1]:
        busy = busy_gpus(probe([str(gpu.index) for gpu in busy]).gpus)
    if not busy:
        return
    free = [gpu.index for gpu in machine.gpus if gpu not in busy_gpus(machine.gpus)]
    all_the_same = "`--allow-busy` takes them all the same"
    if len(free) >= count:
        visible = ",".join(map(str, free[:count]))
        hint = f"`CUDA_VISIBLE_DEVICES={visible}` takes free ones; {all_the_same}"
    else:
        hint = f"wait until they are free, `highwater doctor` shows them; {all_the_same}"
    raise MachineError("; ".join(_use_of(gpu) for gpu in busy), hint=hint)


def refuse_unreadable_gpus(machine: Machine, *, count: int) -> None:
    """Raise MachineError when one of the first ``count`` visible GPUs cannot be read."""
    for gpu in machine.unreadable_gpus:
        if gpu.position < count:
            raise MachineError(
                f"GPU {gpu.index} cannot be read: {gpu.reason}",
                hint=f"{leave_out_unreadable(machine)}; `highwater doctor` shows all",
            )


def leave_out_unreadable(machine: Machine) -> str:
    """Hint with a command that keeps trials off the GPUs that cannot be read."""
    if machine.gpus:
        visible = ",".join(str(gpu.index) for gpu in machine.gpus)
        return f"`CUDA_VISIBLE_DEVICES={visible}` leaves it out"
    return f"`{CPU_SEARCH}` trains on the CPU"


def package_obstacles(machine: Machine) -> tuple[str, ...]:
    """One line for each needed package that is missing or unfit; ``INSTALL_HINT`` mends all."""
    obstacles: list[str] = []
    for package, (oldest, limit) in _NEEDED.items():
        installed = machine.versions.get(package)
        if installed is None:
            obstacles.append(f"{package} is not installed")
            continue
        release = release_of(installed)
        if release < oldest:
            obstacles.append(
                f"{package} {installed} is too old: {oldest[0]}.{oldest[1]} is the first that works"
            )
        elif limit is not None and release >= limit:
            obstacles.append(
                f"{package} {installed} is too new: it has to be older than {limit[0]}.{limit[1]}"
            )
    return tuple(obstacles)


def refuse_package_obstacles(machine: Machine, *, before: str = "") -> None:
    """Raise MachineError for missing or unfit packages; ``before`` begins its message."""
    obstacles = package_obstacles(machine)
    if obstacles:
        hint = f"`{PREDICTION}` needs no torch; for the rest {INSTALL_HINT}"
        raise MachineError(f"{before}{'; '.join(obstacles)}", hint=hint)


def torch_without_gpu(machine: Machine) -> MachineError | None:
    """The error for a torch that cannot use the driver's GPUs; None if it can. Takes 2 to 3 s."""
    done = answered([sys.executable, "-P", "-c", _ASK_TORCH])
    torch = f"torch {machine.versions.get('torch', '')}".strip()
    reinstall = f"`pip install --force-reinstall '{_TORCH_REQUIREMENT}'`"
    match done.stdout.decode(errors="replace").split()[-2:]:
        case [_, "True"]:
            return None
        case ["None", "False"]:
            problem = f"{torch} is built without CUDA: it cannot use the GPU"
            hint = f"{reinstall} installs a build with CUDA"
        case [cuda, "False"]:
            driver = f"driver {machine.driver_version or '?'}"
            problem = f"{torch} with CUDA {cuda} cannot use the GPU under {driver}"
            hint = "update the driver; `nvidia-smi` shows the newest CUDA that this one runs"
        case _:
            words = done.stderr.decode(errors="replace").strip().splitlines()
            said = (words or [f"exit status {done.returncode}"])[-1]
            problem = f"{torch} cannot be imported: {said}"
            hint = reinstall
    return MachineError(problem, hint=hint)


def visible_indices(uuids: Sequence[str], visible: str | None) -> tuple[int, ...]:
    """The driver's indices of the GPUs that a CUDA program sees, in its order.

    ``visible`` is the value of ``CUDA_VISIBLE_DEVICES``. Entries are indices or beginnings of
    UUIDs; as in CUDA, the list ends before the first entry that names no GPU. Source: CUDA C++
    Programming Guide, environment variables.
    """
    if visible is None:
        return tuple(range(len(uuids)))
    seen: list[int] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdecimal():
            matches = [int(entry)] if int(entry) < len(uuids) else []
        else:
            named = (bool(entry) and uuid.startswith(entry) for uuid in uuids)
            matches = [index for index, is_named in enumerate(named) if is_named]
        if len(matches) != 1 or matches[0] in seen:
            break
        seen.append(matches[0])
    return tuple(seen)


def read_gpus(
    nvml: Any, visible: str | None
) -> tuple[tuple[Gpu, ...], tuple[UnreadableGpu, ...], str | None]:
    """Read the visible GPUs, those of them that fail to be read, and the driver's version. ``nvml``
    is the module ``pynvml`` or a stand-in. A GPU cannot be read if it fell off the bus, or shares
    the host's memory and reports none of its own; the other GPUs are read all the same.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver, no GPU, or no right to it: trials cannot use any either
        return (), (), None
    try:
        driver_version = str(nvml.nvmlSystemGetDriverVersion())
        uuids = [_uuid(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        gpus: list[Gpu] = []
        unreadable: list[UnreadableGpu] = []
        for position, index in enumerate(visible_indices(uuids, visible)):
            try:
                gpus.append(_gpu(nvml, index))
            except nvml.NVMLError as error:
                unreadable.append(UnreadableGpu(index=index, position=position, reason=str(error)))
        return tuple(gpus), tuple(unreadable), driver_version
    except nvml.NVMLError:  # the driver fails as a whole
        return (), (), None
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _uuid(nvml: Any, index: int) -> str:
    try:
        return str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)))
    except nvml.NVMLError:
        return ""  # without a UUID the GPU is known by its index


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        processes = tuple(sorted(int(process.pid) for process in running))
    except nvml.NVMLError:  # some containers hide the processes
        processes = ()
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        name=str(nvml.nvmlDeviceGetName(handle)),
        memory_total_bytes=int(memory.total),
        memory_used_bytes=int(memory.used),
        compute_capability=(int(major), int(minor)),
        processes=processes,
    )


def refuse_missing_package(
    settings: Settings, versions: Mapping[str, str] | None = None, *, reporters: Iterable[str] = ()
) -> None:
    """Raise MachineError if the optimizer, LoRA or one of the ``reporters`` lacks a package, or one
    that is new enough, here or in ``versions``.
    """
    package = settings.optimizer_traits.package
    needed = [] if package is None else [(settings.optimizer, package, "use `--optimizer adamw`")]
    if settings.lora is not None:
        needed.append(("LoRA", "peft", "leave `--lora` out"))
    if settings.lora_base == "nf4":
        needed.append(("a model in nf4", "bitsandbytes", "leave `--lora-base` out"))
    needed += [(f"--report-to {name}", name, f"leave `{name}` out") for name in reporters]
    for what, package, other in needed:
        oldest = OLDEST[package]
        hint = f"`pip install '{package}>={'.'.join(map(str, oldest))}'`, or {other}"
        is_there = find_spec(package) is not None if versions is None else package in versions
        if not is_there:
            raise MachineError(f"{what} needs {package}, which is not installed", hint=hint)
        installed = _version(package) if versions is None else versions[package]
        if installed is not None and release_of(installed) < oldest:
            raise MachineError(f"{what} needs another {package} than {installed}", hint=hint)


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Installed versions by package; a missing package is left out."""
    return {each: found for each in packages if (found := _version(each)) is not None}


def _version(package: str) -> str | None:
    try:
        return _INSTALLED(package)
    except PackageNotFoundError:
        return None


def release_of(installed: str) -> tuple[int, ...]:
    """The first two numbers of a version: (2, 11) of ``2.11.0+cu130``."""
    return tuple(map(int, re.findall(r"\d+", installed)[:2]))


def _ranks_on(gpu: Gpu) -> Generator[psutil.Process]:
    """Yield the processes of our trials and trainings that have memory on the GPU."""
    for pid in gpu.processes:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if _RANK in process.cmdline():
                yield process


def _use_of(gpu: Gpu) -> str:
    by = f" by process {', '.join(map(str, gpu.processes))}" if gpu.processes else ""
    return f"GPU {gpu.index} is in use: {format_bytes(gpu.memory_used_bytes)}{by}"

"""Cluster: GPUs that are not here, as a user names them: ``4xA100-80GB``, ``H200-141GB``, ``8`` of this machine's kind."""

import re
from difflib import get_close_matches
from os.path import commonprefix

from highwater.errors import MachineError, UsageError
from highwater.spec.codec import Noun
from highwater.spec.hardware import OLDEST_CAPABILITY, Gpu, GpuKind, Machine, gpu_catalog, kind_of, lacking
from highwater.units import GIB, format_bytes

_NAMED = re.compile(r"(?:(\d+)\s*[xX×*]\s*)?(.+)")
_EXAMPLE = "`--gpus 4xA100-80GB`"
MOST_GPUS = 16
"""In one machine."""
_DIGITS = 9
_COUNT_ALONE = re.compile(rf"(\d{{1,{_DIGITS}}})\s*[xX×*]")
"""A count that no kind follows."""


class Cluster(Noun, frozen=True, kw_only=True):
    """GPUs of one kind, and what each can hold."""

    gpus: int
    device_name: str
    device_bytes: int
    """Memory of one, as its driver reports it."""
    compute_capability: tuple[int, int] = OLDEST_CAPABILITY
    """The oldest that trains, where nobody named the kind."""

    def machine(self) -> Machine:
        """A machine with these GPUs and nothing else known."""
        gpu = Gpu(
            index=0,
            name=self.device_name,
            memory_total_bytes=self.device_bytes,
            memory_used_bytes=0,
            compute_capability=self.compute_capability,
            processes=(),
        )
        return Machine(
            gpus=(gpu,) * self.gpus,
            driver_version=None,
            cpu_cores=self.gpus,
            host_memory_total_bytes=0,
            host_memory_available_bytes=0,
            versions={},
        )


def cluster(text: str | None, *, gpu_memory_bytes: int | None, machine: Machine | None) -> Cluster:
    """What ``--gpus`` and ``--gpu-memory`` name: a count and a kind of the catalog, or either alone.

    ``machine`` is this one, where somebody has looked: a count without a kind, or nothing at all, means its GPUs.
    Raises UsageError for a kind that is not known, or whose memory nobody has read; MachineError for one without bf16.
    """
    count, name = _parse(text)
    if name is not None:
        kind = _kind(name, count, gpu_memory_bytes)
        if lacking(kind):
            raise MachineError(f"{kind.name} has no {' and no '.join(lacking(kind))}", hint=f"use {_EXAMPLE}")
        memory = gpu_memory_bytes or kind.usable_bytes
        if memory is None:
            raise UsageError(f"the memory of {kind.name} is not in the catalog", hint="add `--gpu-memory 80GiB`, its own")
        return Cluster(gpus=count or 1, device_name=kind.name, device_bytes=memory, compute_capability=kind.compute_capability)
    if gpu_memory_bytes is not None:
        return Cluster(gpus=count or 1, device_name=nameless(gpu_memory_bytes), device_bytes=gpu_memory_bytes)
    if machine is None or not machine.gpus:
        raise UsageError("no GPU is here, and none is named", hint=f"name some: {_EXAMPLE}, or `--gpus 4 --gpu-memory 80GiB`")
    here = machine.gpus[0]
    return Cluster(
        gpus=count or len(machine.gpus),
        device_name=here.name,
        device_bytes=min(g.memory_total_bytes for g in machine.gpus),
        compute_capability=here.compute_capability,
    )


def nameless(device_bytes: int) -> str:
    """What GPUs are called of which nothing but the memory is known."""
    return f"a GPU of {format_bytes(device_bytes)}"


def _parse(text: str | None) -> tuple[int | None, str | None]:
    if text is None:
        return None, None
    if text.strip().isdecimal():
        return _counted(text, text), None
    match = _NAMED.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} names no GPUs", hint=f"for example {_EXAMPLE}")
    return (None if match[1] is None else _counted(match[1], text)), match[2]


def _counted(digits: str, text: str) -> int:
    if len(digits) > _DIGITS or not 1 <= int(digits) <= MOST_GPUS:
        raise UsageError(f"{text!r}: a prediction is about 1 to {MOST_GPUS} GPUs of one machine", hint=f"for example {_EXAMPLE}")
    return int(digits)


def _kind(name: str, count: int | None, gpu_memory_bytes: int | None) -> GpuKind:
    """By the catalog's name, or by what a driver calls it."""
    kinds = {kind.name.lower(): kind for kind in gpu_catalog()}
    found = kinds.get(name.lower()) or kind_of(name)
    if found is not None:
        return found
    usable = {key: kind for key, kind in kinds.items() if kind.usable_bytes}
    alike = get_close_matches(name.lower(), usable, n=len(usable), cutoff=0.4)
    near = max(alike, key=lambda key: len(commonprefix((name.lower(), key))), default=None)  # noqa: RUF071 - names, not paths
    known = ", ".join(kind.name for kind in usable.values())
    counted = _COUNT_ALONE.fullmatch(name) if count is None else None
    gpus = min(max(1, int(counted[1])), MOST_GPUS) if counted else count or 1
    memory = "80GiB" if gpu_memory_bytes is None else _size(gpu_memory_bytes)
    meant = f"use `--gpus {gpus}x{usable[near].name}`" if near else f"name its memory, `--gpus {gpus} --gpu-memory {memory}`"
    raise UsageError(f"the catalog has no GPU {name!r}, it has {known}", hint=meant)


def _size(count: int) -> str:
    """As one types it: ``60.5GiB``, or the bytes themselves."""
    gibibytes = f"{count / GIB:.15g}"
    return f"{gibibytes}GiB" if gibibytes.replace(".", "").isdecimal() else str(count)

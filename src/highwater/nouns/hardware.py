"""Hardware: the GPUs of a machine as its driver reports them, and a catalog of their kinds."""

import json
from functools import cache
from importlib.resources import files
from typing import Literal

from highwater.errors import MachineError
from highwater.nouns.codec import Record, from_builtins

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
    """What one kind of GPU can do. Source of each figure in the catalog's ``source``."""

    name: str
    match: str
    """Words, in lower case, which are all in the driver's name for it."""
    vendor: Literal["NVIDIA", "AMD"] = "NVIDIA"
    """Of AMD's, memory is predicted, and no trial is run."""
    host_gigabytes: tuple[int, ...] = ()
    """Sizes in the driver's name that are not the card's but its host's: ``GH200 480GB``."""
    compute_capability: tuple[int, int]
    """Source: https://developer.nvidia.com/cuda-gpus; of AMD's the oldest that trains."""
    usable_bytes: int | None
    """Memory the driver reports as the card's total; None where nobody has read it."""
    bf16_dense_tflops: float | None
    """Dense bf16 matrix FLOP/s by the datasheet, in units of 10¹²; None: the card has no bf16."""
    flash_attention: bool
    """Whether the flash kernels of PyTorch run on it (compute capability 8.0 and up)."""
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
    """What trials run on."""

    gpus: tuple[Gpu, ...]
    """The visible GPUs, in the order of CUDA, less those that cannot be read."""
    unreadable_gpus: tuple[UnreadableGpu, ...] = ()
    driver_version: str | None
    cpu_cores: int
    host_memory_total_bytes: int
    host_memory_available_bytes: int
    versions: dict[str, str]
    """Installed versions of what trials run with; a package that is missing is absent."""


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
    """Whether trials can run on such a GPU, as far as its name tells: on NVIDIA's alone."""
    kind = kind_of(driver_name)
    return kind is None or kind.vendor == "NVIDIA"


def kernels(compute_capability: tuple[int, int]) -> tuple[Kernel, ...]:
    """The fused attentions to try on such a GPU, the fastest first."""
    return ("cudnn", "flash") if compute_capability >= _HOPPER else ("flash",)


def lacking(kind: GpuKind) -> tuple[str, ...]:
    """What training needs and this kind does not have; empty for one that can train."""
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

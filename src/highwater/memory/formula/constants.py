"""Constants of the formula, each with its source, and a GPU's memory in the parts that a prediction
names: terms, the phases of a step in which they are alive, and the footprint of one GPU.

Frozen in a commit before the measurements that judge them (docs/results/predict).
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from highwater.model.footprint import pinned_state_bytes, staged_gradient_bytes
from highwater.model.model import ModelShape
from highwater.nouns.codec import Record
from highwater.nouns.hardware import CUBLAS_WORKSPACES, NCCL_ALL_TO_ALL, NCCL_GROUP, Constants
from highwater.nouns.layout import Layout
from highwater.nouns.settings import HOST_SHARE, Settings
from highwater.nouns.trial import Device
from highwater.units import GIB, MIB

GENERATION = "generation of completions"
"""Name of the phase in which the policy itself generates, in a step without a rollout engine."""
LOSS = "loss"
"""Name of the phase in which logits are: another trainer has others there."""
HOST_ACTIVATIONS = "activations of layers"
"""Name of the host's term of what layers keep there for their backward pass."""
WORKSPACES = "workspaces of cuBLAS"
"""Name of the term that every phase on a GPU has: what a library keeps in the allocator."""


class Term(Record, frozen=True):
    """One part of the memory, by its name."""

    name: str
    bytes: int


class Phase(Record, frozen=True):
    """One moment of a step, and what is alive in it."""

    name: str
    terms: tuple[Term, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all terms together."""
        return sum(term.bytes for term in self.terms)


class RolloutMemory(Record, frozen=True, kw_only=True):
    """On paper: memory of one GPU of a rollout engine, and of a training's beside it."""

    awake: tuple[Term, ...]
    """What it takes of the GPU while it generates."""
    resting: tuple[Term, ...]
    """What a training keeps on the same GPU meanwhile; empty on GPUs of its own."""
    asleep: tuple[Term, ...]
    """What it keeps on a training's GPU while the step trains."""
    engines: int
    sequences: int
    """Sequences of the length in question that the caches of all engines hold at once."""
    lacks_bytes: int
    """Bytes that a cache lacks for one sequence: without them it does not start."""

    @property
    def bytes(self) -> int:
        """Bytes of the GPU while it generates; they are never added to a step's."""
        return sum(term.bytes for term in (*self.awake, *self.resting))


class Footprint(Record, frozen=True, kw_only=True):
    """Predicted memory of one GPU, and of the host over all of them."""

    phases: tuple[Phase, ...]
    outside: tuple[Term, ...]
    """Device memory that the allocator does not hold."""
    host: tuple[Term, ...]
    filled_share: float
    """Share of the allocator's memory that live tensors can fill."""
    cached_bytes: int = 0
    """Bytes that the allocator keeps between uses, and gives back: reserved, but not needed."""
    rollout: RolloutMemory | None = None
    """The rollout engine, whose memory asleep is among ``outside``; None: there is none."""

    @property
    def peak(self) -> Phase:
        """The phase that needs the most."""
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the live tensors at their peak."""
        return self.peak.bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the allocator takes for the live tensors, and keeps."""
        return round(self.allocated_bytes / self.filled_share) + self.cached_bytes

    @property
    def besides(self) -> tuple[Term, ...]:
        """Terms of what is reserved besides the live tensors of the peak."""
        unfilled_bytes = self.reserved_bytes - self.cached_bytes - self.allocated_bytes
        return present(
            Term("what the allocator cannot fill", unfilled_bytes),
            Term("kept until memory runs short", self.cached_bytes),
        )

    @property
    def used(self) -> tuple[Term, ...]:
        """Terms of all that the driver reports at the peak: their sum is ``device_used_bytes``."""
        return (*self.peak.terms, *self.besides, *self.outside)

    @property
    def outside_bytes(self) -> int:
        """Bytes of device memory that the allocator does not hold."""
        return sum(term.bytes for term in self.outside)

    @property
    def device_used_bytes(self) -> int:
        """Bytes in use as the driver reports them."""
        return self.reserved_bytes + self.outside_bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes that a GPU has to have, to train and to generate: with less it runs out."""
        generating = self.rollout.bytes if self.rollout and self.rollout.resting else 0
        return max(self.device_used_bytes - self.cached_bytes, generating)

    @property
    def lacks_for_rollout_bytes(self) -> int:
        """Bytes that a rollout engine lacks to hold one sequence; 0 without one."""
        return 0 if self.rollout is None else self.rollout.lacks_bytes

    def with_libraries(self, outside: tuple[Term, ...], workspaces_bytes: int) -> "Footprint":
        """The footprint with what was measured outside the allocator, and of cuBLAS in it."""

        def measured(term: Term) -> Term:
            return Term(term.name, workspaces_bytes) if term.name == WORKSPACES else term

        phases = tuple(phase(each.name, *map(measured, each.terms)) for each in self.phases)
        return msgspec.structs.replace(self, phases=phases, outside=outside)

    def within(self, room_bytes: int) -> "Footprint":
        """The footprint on a GPU with this much memory: nothing stays cached beyond it."""
        return msgspec.structs.replace(
            self, cached_bytes=max(0, min(self.cached_bytes, room_bytes - self.needed_bytes))
        )

    @property
    def host_bytes(self) -> int:
        """Bytes that the machine's memory has to have."""
        return sum(term.bytes for term in self.host)

    @property
    def host_needed_bytes(self) -> int:
        """Bytes that the machine's memory has to have for activations to be in their share."""
        activations = sum(term.bytes for term in self.host if term.name == HOST_ACTIVATIONS)
        return max(self.host_bytes, math.ceil(activations / HOST_SHARE))

    def fits_host(self, host_bytes: int | None) -> bool:
        """Whether a machine with this memory holds them; None: it has no end."""
        return host_bytes is None or self.host_needed_bytes <= host_bytes


def present(*terms: Term) -> tuple[Term, ...]:
    """The terms that are not zero."""
    return tuple(term for term in terms if term.bytes)


def phase(name: str, *terms: Term) -> Phase:
    """A phase with those of its terms that are not zero."""
    return Phase(name, present(*terms))


CONTEXT_BYTES: Mapping[Device, int] = {"cuda": 877_527_040, "cpu": 0}
"""Device memory in use outside the allocator after every kernel of a step ran once: context,
cuBLAS, cuDNN, Triton. Read on an H200 (torch 2.11.0, CUDA 13.0, cuDNN 9.19): every trial in
docs/results/find, and part by part ``highwater doctor --measure``
(docs/results/predict/constants-h200.json). Other GPUs are taken to have the same."""
CONTEXT_OF_SEVERAL_BYTES: Mapping[Device, int] = {"cuda": 772 * MIB, "cpu": 0}
"""Context of a process where there are several GPUs: FSDP2 then takes nothing that NCCL has not.
The most of nine searches on two and four H200s, 767 to 771 MiB."""
PAGE_TABLE_BYTES = 2 * MIB
PAGE_TABLE_COVERS_BYTES = 512 * PAGE_TABLE_BYTES
"""A GPU maps a rank's pinned host memory in pages of 4 KiB, 8 bytes each, and takes memory for that
in steps. Read off 39 trials with a reference or offload on 1, 2 and 4 H200s (docs/results/find): 2
to 42 MiB outside the allocator that others lack."""
CPU_PROCESS_BYTES = 412 * MIB
"""Data segment of a rank on the CPU besides its tensors, Python with torch: what trials of ``make
demo`` hold more than their terms (torch 2.13)."""
CUBLAS_WORKSPACES_BYTES = (32 * MIB, 32 * MIB)
"""Workspaces in the allocator for as long as the process lives: one for the thread that runs
forward, one for autograd's. 32 MiB on Hopper. Source: ATen/cuda/CublasHandlePool.cpp of PyTorch
2.11; read by ``highwater doctor --measure``."""

NCCL_BYTES = {1: 0, 2: round(0.82 * GIB), 4: round(0.82 * GIB), 8: round(1.06 * GIB)}
"""Device memory of one communicator after its first collective, by number of GPUs. 2 and 4 read on
H200s (NCCL 2.28.9) by ``highwater doctor --measure``; 8 from
https://github.com/NVIDIA/nccl/issues/1685 (H100)."""
NCCL_SECOND_GROUP_BYTES = 196 * MIB
"""Device memory that a second communicator, of the fewer GPUs that share a sequence, adds before
its first all-to-all: no other collective runs on it. Read off the searches on four H200s with SP 2
(docs/results/find), 642 MiB with an all-to-all of 446."""
NCCL_ALL_TO_ALL_BYTES = {1: 0, 2: round(0.44 * GIB), 4: round(1.19 * GIB), 8: round(3.28 * GIB)}
"""Memory that a communicator's first all-to-all adds, by number of GPUs. Same sources."""

FILLED_SHARE: Mapping[str, float] = {"expandable": 0.992, "native": 0.879}
"""Share of the allocator's memory that live tensors fill before it runs out, by allocator, as dry
runs take it. Fitted to docs/results/find: expandable, less than the fullest trials that fit had
filled (0.988 to 0.999); native, about the least of what trials that fit had filled at their edges
(0.859 to 0.974): there the order of allocations decides, which no formula knows."""
LIKELY_FILLED_SHARE: Mapping[str, float] = {"expandable": 0.998, "native": 0.94}
"""The same share as it most likely is, for predictions by formula and where a search begins:
between the most that a trial which fit had filled and the least that one which ran out would have;
native, the middle of what was seen. What it promises is in its interval (calibration.py)."""


class MachineConstants(Record, frozen=True, kw_only=True):
    """Figures measured on a user's own GPUs, in the place of those above, by number of GPUs."""

    device_name: str
    versions: dict[str, str]
    context_bytes: dict[int, int]
    nccl_bytes: dict[int, int]
    nccl_all_to_all_bytes: dict[int, int]
    cublas_workspaces_bytes: tuple[int, ...]


def machine_constants(read: Sequence[Constants]) -> MachineConstants:
    """The constants that readings on one GPU, and on several, give."""
    several = [each for each in read if each.gpus > 1]
    kept = {reading.name: reading.allocator_bytes for reading in read[0].readings}
    return MachineConstants(
        device_name=read[0].device_name,
        versions=read[0].versions,
        context_bytes={each.gpus: each.context_bytes for each in read},
        nccl_bytes={each.gpus: each.outside_bytes(*NCCL_GROUP) for each in several},
        nccl_all_to_all_bytes={each.gpus: each.outside_bytes(NCCL_ALL_TO_ALL) for each in several},
        cublas_workspaces_bytes=tuple(kept[name] for name in CUBLAS_WORKSPACES),
    )


def workspaces_bytes(own: MachineConstants | None) -> tuple[int, ...]:
    """Bytes of each workspace that cuBLAS keeps in the allocator, by readings where there are."""
    return CUBLAS_WORKSPACES_BYTES if own is None else own.cublas_workspaces_bytes


def context_bytes(device: Device, *, gpus: int) -> int:
    """Bytes that a rank's process takes of its GPU besides the allocator and NCCL."""
    return (CONTEXT_BYTES if gpus == 1 else CONTEXT_OF_SEVERAL_BYTES)[device]


def outside_terms(
    shape: ModelShape,
    settings: Settings,
    layout: Layout,
    device: Device,
    own: MachineConstants | None = None,
    *,
    pinned_activation_bytes: int = 0,
) -> tuple[Term, ...]:
    """Device memory that the allocator does not hold, of one GPU. ``own`` are readings on a user's
    GPUs, which take the place of ours; of a number of GPUs that nobody read they say what the next
    larger one has. ``pinned_activation_bytes`` are in host memory for this GPU.
    """
    if device == "cpu":
        return present(Term("context", context_bytes(device, gpus=layout.gpus)))
    if own is None:
        context = context_bytes(device, gpus=layout.gpus)
        nccl, all_to_all = NCCL_BYTES, NCCL_ALL_TO_ALL_BYTES
    else:
        context = _next_larger(own.context_bytes, layout.gpus)
        nccl = NCCL_BYTES | own.nccl_bytes
        all_to_all = NCCL_ALL_TO_ALL_BYTES | own.nccl_all_to_all_bytes
    pinned = pinned_state_bytes(shape, settings, layout=layout)
    pinned += staged_gradient_bytes(shape, settings, layout=layout)
    pinned = pinned / layout.machine_gpus + pinned_activation_bytes
    pages = math.ceil(pinned / PAGE_TABLE_COVERS_BYTES)
    return present(
        Term("context", context),
        Term("page tables of pinned memory", pages * PAGE_TABLE_BYTES),
        *(() if layout.gpus == 1 else _nccl_terms(shape, layout, nccl, all_to_all)),
    )


def _nccl_terms(
    shape: ModelShape, layout: Layout, nccl: Mapping[int, int], all_to_all: Mapping[int, int]
) -> tuple[Term, ...]:
    """One communicator for all GPUs, and one more for each smaller group: of those that share a
    sequence, trade its heads, pass keys and values on, or share the states. A ring's transfers are
    those of an all-to-all among as many, two at a time: no more. Of linear attention all that share
    a sequence trade its tokens, too.
    """
    groups = [layout.context_degree, layout.ulysses_degree, layout.ring_degree]
    if layout.ulysses_degree == 1 or layout.ring_degree == 1:
        groups = [layout.context_degree]
    traded = {"all-to-all": layout.ulysses_degree, "ring": layout.ring_degree}
    if shape.delta is not None and min(traded.values()) > 1:
        traded["tokens of a ring"] = layout.context_degree
    if layout.replicate_degree > 1:
        groups += [layout.replicate_degree, layout.shard_degree]
    others = sum(1 < degree < layout.gpus for degree in groups)
    group_bytes = _next_larger(nccl, layout.gpus) + others * NCCL_SECOND_GROUP_BYTES
    shared = (
        Term(f"NCCL, {what}", _next_larger(all_to_all, degree))
        for what, degree in traded.items()
        if degree > 1
    )
    return (Term("NCCL", group_bytes), *shared)


def nccl_bytes(gpus: int) -> int:
    """Device memory of one communicator of so many GPUs, after its first collective."""
    return _next_larger(NCCL_BYTES, gpus)


def _next_larger(by_gpus: Mapping[int, int], gpus: int) -> int:
    return by_gpus[min((count for count in by_gpus if count >= gpus), default=max(by_gpus))]

"""Constants of the formula, each with its source, and the parts of a memory prediction: terms, the
phases of a step in which they are allocated, and the footprint of one GPU.

They were committed before the measurements that test them (docs/results/predict).
"""

import math
from collections.abc import Mapping, Sequence

from highwater.model.held_bytes import pinned_state_bytes, staged_gradient_bytes
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
"""Name of the phase that holds the logits; its other terms differ between trainers."""
HOST_ACTIVATIONS = "activations of layers"
"""Name of the host's term for activations that layers keep there until their backward pass."""
WORKSPACES = "workspaces of cuBLAS"
"""Name of a term of every phase on a GPU: memory that cuBLAS keeps in the allocator."""


class Term(Record, frozen=True):
    """One named part of the memory, such as logits or gradients, and its bytes."""

    name: str
    bytes: int


class Phase(Record, frozen=True):
    """A moment of a step, such as the backward pass of the loss, and what is allocated then."""

    name: str
    terms: tuple[Term, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all terms together."""
        return sum(term.bytes for term in self.terms)


class RolloutMemory(Record, frozen=True, kw_only=True):
    """Memory of one GPU while vLLM generates, and of vLLM while the step trains; on paper."""

    awake: tuple[Term, ...]
    """Memory of the engine while it generates."""
    resting: tuple[Term, ...]
    """Memory of the training on the same GPU meanwhile; empty if the engine has its own GPUs."""
    asleep: tuple[Term, ...]
    """Memory of the engine on a training's GPU while the step trains."""
    engines: int
    sequences: int
    """Sequences of the predicted length that the KV caches of all engines hold at once."""
    lacks_bytes: int
    """Bytes that an engine's KV cache lacks for one sequence; above 0 the engine does not start."""

    @property
    def bytes(self) -> int:
        """Bytes of engine and training in generation; never added to those of a training step."""
        return sum(term.bytes for term in (*self.awake, *self.resting))


class Footprint(Record, frozen=True, kw_only=True):
    """Predicted memory of the fullest GPU, by phase and term, and of the host for all GPUs."""

    phases: tuple[Phase, ...]
    outside: tuple[Term, ...]
    """Device memory that the allocator does not hold."""
    host: tuple[Term, ...]
    filled_share: float
    """Share of the allocator's memory that live tensors can fill."""
    cached_bytes: int = 0
    """Bytes that the allocator caches and gives back before it fails: reserved, not needed."""
    rollout: RolloutMemory | None = None
    """Memory of the rollout engine, whose ``asleep`` terms are also in ``outside``; None: none."""

    @property
    def peak(self) -> Phase:
        """The phase that needs the most memory."""
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of live tensors at the peak."""
        return self.peak.bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the allocator reserves at the peak: live tensors, gaps and cached blocks."""
        return round(self.allocated_bytes / self.filled_share) + self.cached_bytes

    @property
    def besides(self) -> tuple[Term, ...]:
        """Terms that the allocator reserves at the peak without a live tensor in them."""
        unfilled_bytes = self.reserved_bytes - self.cached_bytes - self.allocated_bytes
        return present(
            Term("what the allocator cannot fill", unfilled_bytes),
            Term("kept until memory runs short", self.cached_bytes),
        )

    @property
    def used(self) -> tuple[Term, ...]:
        """All terms in use at the peak, as the driver counts: they sum to ``device_used_bytes``."""
        return (*self.peak.terms, *self.besides, *self.outside)

    @property
    def outside_bytes(self) -> int:
        """Bytes of device memory that the allocator does not hold."""
        return sum(term.bytes for term in self.outside)

    @property
    def device_used_bytes(self) -> int:
        """Bytes in use by the driver's count: reserved memory plus memory outside the allocator."""
        return self.reserved_bytes + self.outside_bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes that a GPU must have to train, and to generate on it: with less it runs out."""
        generating = self.rollout.bytes if self.rollout and self.rollout.resting else 0
        return max(self.device_used_bytes - self.cached_bytes, generating)

    @property
    def lacks_for_rollout_bytes(self) -> int:
        """Bytes that vLLM lacks to hold one sequence; 0 if it holds one, or without vLLM."""
        return 0 if self.rollout is None else self.rollout.lacks_bytes

    def with_libraries(self, outside: tuple[Term, ...], workspaces_bytes: int) -> "Footprint":
        """Return the footprint with these bytes outside the allocator and in cuBLAS workspaces."""

        def measured(term: Term) -> Term:
            return Term(term.name, workspaces_bytes) if term.name == WORKSPACES else term

        phases = tuple(phase(each.name, *map(measured, each.terms)) for each in self.phases)
        return self.replace(phases=phases, outside=outside)

    def within(self, room_bytes: int) -> "Footprint":
        """The footprint on a GPU with ``room_bytes``: the allocator caches no more than fits."""
        return self.replace(
            cached_bytes=max(0, min(self.cached_bytes, room_bytes - self.needed_bytes))
        )

    @property
    def host_bytes(self) -> int:
        """Bytes of all terms in host memory."""
        return sum(term.bytes for term in self.host)

    @property
    def host_needed_bytes(self) -> int:
        """Bytes that the host must have, of which activations may fill ``HOST_SHARE``."""
        activations = sum(term.bytes for term in self.host if term.name == HOST_ACTIVATIONS)
        return max(self.host_bytes, math.ceil(activations / HOST_SHARE))

    def fits_host(self, host_bytes: int | None) -> bool:
        """True if ``host_bytes`` of host memory suffice; None is taken as no limit."""
        return host_bytes is None or self.host_needed_bytes <= host_bytes


def present(*terms: Term) -> tuple[Term, ...]:
    """The terms with a nonzero size."""
    return tuple(term for term in terms if term.bytes)


def phase(name: str, *terms: Term) -> Phase:
    """Make a phase of those terms that are not zero."""
    return Phase(name, present(*terms))


CONTEXT_BYTES: Mapping[Device, int] = {"cuda": 877_527_040, "cpu": 0}
"""Device memory in use outside the allocator after every kernel of a step ran once: context,
cuBLAS, cuDNN, Triton. Read on an H200 (torch 2.11.0, CUDA 13.0, cuDNN 9.19): every trial in
docs/results/find, and part by part ``highwater doctor --measure``
(docs/results/predict/constants-h200.json). Other GPUs are taken to have the same."""
CONTEXT_OF_SEVERAL_BYTES: Mapping[Device, int] = {"cuda": 772 * MIB, "cpu": 0}
"""Context of a process of several GPUs: FSDP2 then takes nothing besides NCCL's memory.
The most of nine searches on two and four H200s, 767 to 771 MiB."""
PAGE_TABLE_BYTES = 2 * MIB
PAGE_TABLE_COVERS_BYTES = 512 * PAGE_TABLE_BYTES
"""A GPU maps a rank's pinned host memory in pages of 4 KiB, 8 bytes each, and takes memory for that
in steps. Read off 39 trials with a reference or offload on 1, 2 and 4 H200s (docs/results/find): 2
to 42 MiB outside the allocator that other trials do not have."""
CPU_PROCESS_BYTES = 412 * MIB
"""Data segment of a rank on the CPU without its tensors: Python with torch. Read off trials of
``make demo``: memory beyond their terms (torch 2.13)."""
CUBLAS_WORKSPACES_BYTES = (32 * MIB, 32 * MIB)
"""Workspaces of cuBLAS, in the allocator until the process ends: one for the forward thread, one
for autograd's. 32 MiB on Hopper. Source: ATen/cuda/CublasHandlePool.cpp of PyTorch 2.11; read by
``highwater doctor --measure``."""

NCCL_BYTES = {1: 0, 2: round(0.82 * GIB), 4: round(0.82 * GIB), 8: round(1.06 * GIB)}
"""Device memory of one communicator after its first collective, by number of GPUs. 2 and 4 read on
H200s (NCCL 2.28.9) by ``highwater doctor --measure``; 8 from
https://github.com/NVIDIA/nccl/issues/1685 (H100)."""
NCCL_SECOND_GROUP_BYTES = 196 * MIB
"""Device memory of a second communicator, among the GPUs that share a sequence, before its first
all-to-all, the only collective that runs on it. Read off the searches on four H200s with SP 2
(docs/results/find), 642 MiB with an all-to-all of 446 MiB."""
NCCL_ALL_TO_ALL_BYTES = {1: 0, 2: round(0.44 * GIB), 4: round(1.19 * GIB), 8: round(3.28 * GIB)}
"""Device memory that a communicator's first all-to-all adds, by number of GPUs. Same sources."""

FILLED_SHARE: Mapping[str, float] = {"expandable": 0.992, "native": 0.879}
"""Share of the allocator's memory that live tensors fill before it runs out, by allocator, for dry
runs. Fitted to docs/results/find: expandable, less than the fullest trials that fit had filled
(0.988 to 0.999); native, about the least that fitting trials had filled at their edges (0.859 to
0.974): there the order of allocations decides, which no formula knows."""
LIKELY_FILLED_SHARE: Mapping[str, float] = {"expandable": 0.998, "native": 0.94}
"""The most likely value of the same share, for predictions by formula and the start of a search:
between the most that a trial filled which fit and the least that one would fill which ran out;
native, the middle of what was seen. How far it may be off is in the interval (calibration.py)."""


class MachineConstants(Record, frozen=True, kw_only=True):
    """Bytes that libraries took on a user's own GPUs; the dicts' keys are numbers of GPUs."""

    device_name: str
    versions: dict[str, str]
    context_bytes: dict[int, int]
    nccl_bytes: dict[int, int]
    nccl_all_to_all_bytes: dict[int, int]
    cublas_workspaces_bytes: tuple[int, ...]


def machine_constants(read: Sequence[Constants]) -> MachineConstants:
    """Make a machine's constants from readings on one GPU and on several, fewest GPUs first."""
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
    """Bytes of each of cuBLAS's workspaces; ``own``: the user's readings, else an H200's."""
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
    """Terms of one GPU's memory outside the allocator. ``own``: the user's measurements, instead of
    ours; a number of GPUs that was not measured takes the next larger number's.
    ``pinned_activation_bytes``: activations in host memory for this GPU.
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
    """Terms of NCCL: a communicator for all GPUs, and one for each smaller group: those that share
    a sequence, exchange its heads, form a ring, or share the states. A ring's transfers take as
    much as an all-to-all among as many GPUs, in two directions. With linear attention all GPUs that
    share a sequence also exchange its tokens.
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
    """Bytes of a GPU that NCCL takes for one group of ``gpus`` GPUs, once it has been used."""
    return _next_larger(NCCL_BYTES, gpus)


def _next_larger(by_gpus: Mapping[int, int], gpus: int) -> int:
    return by_gpus[min((count for count in by_gpus if count >= gpus), default=max(by_gpus))]

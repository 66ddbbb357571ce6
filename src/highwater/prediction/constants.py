"""Constants: what no formula knows, read on machines or fitted to tables; each says where it comes from.

Frozen in a commit before the measurements that judge them (docs/results/predict).
"""

from collections.abc import Mapping, Sequence

from highwater.spec.codec import Noun
from highwater.spec.constants import CUBLAS_WORKSPACES, NCCL_ALL_TO_ALL, NCCL_GROUP, Constants
from highwater.spec.trial import Device
from highwater.units import GIB, MIB

CONTEXT_BYTES: Mapping[Device, int] = {"cuda": 877_527_040, "cpu": 0}
"""Device memory in use outside the allocator after every kernel of a step ran once: context, cuBLAS, cuDNN, Triton. Read on an H200
(torch 2.11.0, CUDA 13.0, cuDNN 9.19): every trial in docs/results/find, and part by part ``highwater doctor --measure``
(docs/results/predict/constants-h200.json). Other GPUs are taken to have the same."""
CONTEXT_OF_SEVERAL_BYTES: Mapping[Device, int] = {"cuda": 772 * MIB, "cpu": 0}
"""The same where there are several GPUs: FSDP2 then takes nothing that NCCL has not. The most of nine searches on two and four
H200s, 767 to 771 MiB."""
PAGE_TABLE_BYTES = 2 * MIB
PAGE_TABLE_COVERS_BYTES = 512 * PAGE_TABLE_BYTES
"""A GPU maps a rank's pinned host memory in pages of 4 KiB, 8 bytes each, and takes memory for that in steps. Read off 39
trials with a reference or offload on 1, 2 and 4 H200s (docs/results/find): 2 to 42 MiB outside the allocator that others lack."""
CPU_PROCESS_BYTES = 412 * MIB
"""Data segment of a rank on the CPU besides its tensors, Python with torch: what trials of ``make demo`` hold more than their terms
(torch 2.13)."""
CUBLAS_WORKSPACES_BYTES = (32 * MIB, 32 * MIB)
"""In the allocator for as long as the process lives: one for the thread that runs forward, one for autograd's. 32 MiB on Hopper.
Source: ATen/cuda/CublasHandlePool.cpp of PyTorch 2.11; read by ``highwater doctor --measure``."""

NCCL_BYTES: dict[int, int] = {1: 0, 2: round(0.82 * GIB), 4: round(0.82 * GIB), 8: round(1.06 * GIB)}
"""Outside the allocator, by number of GPUs: one communicator after its first collective. 2 and 4 read on H200s (NCCL 2.28.9) by
``highwater doctor --measure``; 8 from https://github.com/NVIDIA/nccl/issues/1685 (H100)."""
NCCL_SECOND_GROUP_BYTES = 196 * MIB
"""What the communicator of fewer GPUs, which share a sequence, adds before its first all-to-all: no other collective runs on it.
Read off the searches on four H200s with SP 2 (docs/results/find), 642 MiB with an all-to-all of 446."""
NCCL_ALL_TO_ALL_BYTES: dict[int, int] = {1: 0, 2: round(0.44 * GIB), 4: round(1.19 * GIB), 8: round(3.28 * GIB)}
"""What the first all-to-all, Ulysses, adds to it. Same sources."""

FILLED_SHARE: Mapping[str, float] = {"expandable": 0.992, "native": 0.879}
"""Share of the allocator's memory that live tensors fill before it runs out, by allocator: what dry runs take. Fitted to
docs/results/find: expandable, less than the fullest trials that fit had filled (0.988 to 0.999); native, about the least of what
trials that fit had filled at their edges (0.859 to 0.974): there the order of allocations decides, which no formula knows."""
LIKELY_FILLED_SHARE: Mapping[str, float] = {"expandable": 0.998, "native": 0.94}
"""What a prediction by formula is the middle of, and where a search begins: between the most that a trial which fit had filled and
the least that one which ran out would have; native, the middle of what was seen. What it promises is in its interval
(calibration.py)."""


class MachineConstants(Noun, frozen=True, kw_only=True):
    """Measured: the same of a user's own GPUs, in the place of those above, by number of GPUs."""

    device_name: str
    versions: dict[str, str]
    context_bytes: dict[int, int]
    nccl_bytes: dict[int, int]
    nccl_all_to_all_bytes: dict[int, int]
    cublas_workspaces_bytes: tuple[int, ...]


def machine_constants(read: Sequence[Constants]) -> MachineConstants:
    """What readings on one GPU, and on several, say."""
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


TRINITY_LOGITS_BYTES = 8.0
"""Per token x vocabulary in Trinity-RFT and verl, which divide by the temperature in place through a view. Measured, torch 2.11."""
TRINITY_FIXED_BYTES = 2_500_000_000
"""Besides states, embedding and head, context included. Fitted to the published A100 tables."""
TRINITY_EMBEDDING_BYTES = 4
"""Per element of embedding and head, whole on every GPU while in use. Fitted to the published A100 tables."""
TRINITY_FILLED_SHARE: Mapping[str, float] = {"expandable": 1.0, "native": 0.86}
"""Fitted to the published A100 tables, where the native allocator loses 12 to 14 %."""
TRINITY_OUTSIDE_BYTES: Mapping[bool, int] = {False: round(2.0 * GIB), True: round(3.5 * GIB)}
"""By replay: what is not in the trace of its step, by whether GPUs share sequences: context, NCCL, whatever else its workers hold.
Fitted to the published A100 table, of whose cells 2.0, by one, and 3.2 to 3.7 GiB alike give the most exactly
(docs/results/predict/outside_scan.py). Of these workers themselves H200s have 1.6 and 2.0 to 2.8 GiB outside the allocator
(docs/results/predict, Outside the allocator)."""

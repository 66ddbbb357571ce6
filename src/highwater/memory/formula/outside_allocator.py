"""Device memory that the allocator does not hold: the context of a process, NCCL, page tables."""

from collections.abc import Mapping

from highwater.memory.formula.breakdown import Term, present
from highwater.memory.formula.constants import (
    CONTEXT_BYTES,
    CONTEXT_OF_SEVERAL_BYTES,
    NCCL_ALL_TO_ALL_BYTES,
    NCCL_BYTES,
    NCCL_SECOND_GROUP_BYTES,
    PAGE_TABLE_BYTES,
    PAGE_TABLE_COVERS_BYTES,
    MachineConstants,
)
from highwater.model.footprint import pinned_state_bytes, staged_gradient_bytes
from highwater.model.model import ModelShape
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.trial import Device


def context_bytes(device: Device, *, gpus: int) -> int:
    """Bytes that a rank's process takes of its GPU besides the allocator and NCCL."""
    return (CONTEXT_BYTES if gpus == 1 else CONTEXT_OF_SEVERAL_BYTES)[device]


def outside_terms(
    shape: ModelShape,
    settings: Settings,
    layout: Layout,
    device: Device,
    own: MachineConstants | None = None,
) -> tuple[Term, ...]:
    """Device memory that the allocator does not hold, of one GPU.

    ``own`` are readings on a user's GPUs, which take the place of ours; of a number of GPUs that
    nobody read they say what the next larger one has.
    """
    if device == "cpu":
        return present(Term(name="context", bytes=context_bytes(device, gpus=layout.gpus)))
    if own is None:
        context, nccl, all_to_all = (
            context_bytes(device, gpus=layout.gpus),
            NCCL_BYTES,
            NCCL_ALL_TO_ALL_BYTES,
        )
    else:
        context = _next_larger(own.context_bytes, layout.gpus)
        nccl, all_to_all = (
            NCCL_BYTES | own.nccl_bytes,
            NCCL_ALL_TO_ALL_BYTES | own.nccl_all_to_all_bytes,
        )
    return present(
        Term(name="context", bytes=context),
        Term(
            name="page tables of pinned memory",
            bytes=_page_table_bytes(shape, settings, layout),
        ),
        *(() if layout.gpus == 1 else _nccl_terms(layout, nccl, all_to_all)),
    )


def _page_table_bytes(shape: ModelShape, settings: Settings, layout: Layout) -> int:
    """Bytes in which a GPU maps its rank's pinned host memory."""
    states = pinned_state_bytes(shape, settings, layout=layout)
    pinned = states + staged_gradient_bytes(shape, settings, layout=layout)
    return -(-pinned // (layout.machine_gpus * PAGE_TABLE_COVERS_BYTES)) * PAGE_TABLE_BYTES


def _nccl_terms(
    layout: Layout, nccl: Mapping[int, int], all_to_all: Mapping[int, int]
) -> tuple[Term, ...]:
    """One communicator for all GPUs; one more for each group of fewer, which share a sequence,
    trade its heads, pass its keys and values on, or share the states. Between the sizes that were
    read, the next larger.

    A ring's transfers are those of an all-to-all among as many, two at a time: no more.
    """
    groups = [layout.context_degree, layout.ulysses_degree, layout.ring_degree]
    if layout.ulysses_degree == 1 or layout.ring_degree == 1:
        groups = [layout.context_degree]
    if layout.replicate_degree > 1:
        groups += [layout.replicate_degree, layout.shard_degree]
    others = sum(1 < degree < layout.gpus for degree in groups)
    group_bytes = _next_larger(nccl, layout.gpus) + others * NCCL_SECOND_GROUP_BYTES
    shared = (
        Term(name=f"NCCL, {what}", bytes=_next_larger(all_to_all, degree))
        for what, degree in (("all-to-all", layout.ulysses_degree), ("ring", layout.ring_degree))
        if degree > 1
    )
    return (Term(name="NCCL", bytes=group_bytes), *shared)


def _next_larger(by_gpus: Mapping[int, int], gpus: int) -> int:
    return by_gpus[min((count for count in by_gpus if count >= gpus), default=max(by_gpus))]

"""Memory and time of a rank: what the budget leaves for the allocator, and the peaks at the end.

On a GPU three readings matter: the driver's (device used), the caching allocator's (reserved,
active, allocated), and their difference: the context, the libraries' own workspaces and NCCL, which
no allocator cap can bound. On the CPU it is the data segment, which RLIMIT_DATA bounds.
"""

import os
import threading
from pathlib import Path

import torch

from highwater.errors import MachineError
from highwater.nouns.trial import MemoryBudget, RankMemory
from highwater.units import GIB, format_bytes

_SAMPLE_S = 0.001


def device_used_bytes(device: torch.device) -> int:
    """What the driver reports as used on a GPU, by anybody."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def outside_allocator_bytes(device: torch.device) -> int:
    """Device memory in use that the caching allocator does not hold."""
    return device_used_bytes(device) - torch.cuda.memory_reserved(device)


def allocator_settings(device: torch.device) -> dict[str, str]:
    """Settings that the caching allocator says are in force; empty on the CPU."""
    if device.type != "cuda":
        return {}
    # nothing public tells
    snapshot = torch.cuda.memory._snapshot(device)  # pyright: ignore[reportPrivateUsage]
    return {name: str(value) for name, value in snapshot.get("allocator_settings", {}).items()}


def divide_budget(
    device: torch.device, *, budget_bytes: int | None, nccl_bytes: int
) -> MemoryBudget:
    """Bound the allocator so that device used stays within the budget; None bounds it by the card
    itself.

    What is outside the allocator now is the context, but for ``nccl_bytes``.

    Raises MachineError when the budget leaves nothing, or exceeds the card.
    """
    total = torch.cuda.mem_get_info(device)[1]
    context_bytes = outside_allocator_bytes(device) - nccl_bytes
    budget = total if budget_bytes is None else budget_bytes
    cap = budget - context_bytes - nccl_bytes
    if budget > total:
        raise MachineError(
            f"a budget of {format_bytes(budget)} on a GPU of {format_bytes(total)}",
            hint=f"use `--memory {total >> 20}MiB` or less",
        )
    if cap <= 0:
        raise MachineError(
            f"a budget of {format_bytes(budget)} is spent on the context and NCCL "
            f"({format_bytes(context_bytes + nccl_bytes)})",
            hint=f"use `--memory {(context_bytes + nccl_bytes) // GIB + 2}GiB` or more",
        )
    if budget_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(cap / total, device)
    return MemoryBudget(
        budget_bytes=budget,
        context_bytes=context_bytes,
        nccl_bytes=nccl_bytes,
        allocator_cap_bytes=cap,
    )


def past_budget(peaks: RankMemory, budget: MemoryBudget) -> str | None:
    """How the device came to more than its budget, in words; None where it did not, or where no
    driver told.

    The allocator compares with its cap what it is asked for; expandable segments map 20 MiB at a
    time, which can pass it by less.
    """
    used = peaks.device_used_bytes
    if used is None or used <= budget.budget_bytes:
        return None
    past_cap = (peaks.peak_reserved_bytes or 0) - budget.allocator_cap_bytes
    why = "what is outside the allocator grew after the first step began"
    if past_cap > 0:
        why = (
            f"the allocator maps whole pages, with which it passed its cap by "
            f"{format_bytes(past_cap)}"
        )
    return (
        f"{format_bytes(used)} used on the device, {format_bytes(budget.budget_bytes)} "
        f"allowed: {why}"
    )


class MemoryWatch:
    """Follows a rank's memory; ``peaks`` may be read at any time, also after a failure."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._segment = _DataSegment() if device.type == "cpu" else None
        self._device_used = 0

    def begin(self) -> None:
        """Forget what was before; on the CPU, where the limit binds from the start, nothing is
        forgotten.
        """
        self._device_used = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def sample(self) -> None:
        """Read the driver, or the data segment, now: at the ends of phases, when much is alive."""
        if self._segment is not None:
            self._segment.read()
        else:
            self._device_used = max(self._device_used, device_used_bytes(self.device))

    def peaks(self) -> RankMemory:
        """Peaks since the watch was made or last began."""
        self.sample()
        if self._segment is not None:
            return RankMemory(peak_data_segment_bytes=self._segment.peak_bytes)
        stats = torch.cuda.memory_stats(self.device)
        reserved = stats["reserved_bytes.all.peak"]
        return RankMemory(
            peak_allocated_bytes=stats["allocated_bytes.all.peak"],
            peak_active_bytes=stats["active_bytes.all.peak"],
            peak_reserved_bytes=reserved,
            # Between two samples the allocator may have given memory back: its own peak stands in
            # for the driver's.
            device_used_bytes=max(
                self._device_used, reserved + outside_allocator_bytes(self.device)
            ),
            device_total_bytes=torch.cuda.mem_get_info(self.device)[1],
            allocator_retries=stats["num_alloc_retries"],
        )


class _DataSegment:
    """The peak of this process's data segment, which the kernel does not keep: read every
    millisecond.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._statm = Path("/proc/self/statm")
        threading.Thread(target=self._follow, name="data-segment", daemon=True).start()

    def read(self) -> None:
        """Read it once. Field 6 of statm is data plus stack, in pages; source: proc(5)."""
        pages = int(self._statm.read_text().split()[5])
        self.peak_bytes = max(self.peak_bytes, pages * self._page_bytes)

    def _follow(self) -> None:
        pause = threading.Event()
        while not pause.wait(_SAMPLE_S):
            self.read()

"""Statistics log: rank 0 writes the numbers of a trial's steps, one line of JSON for each step, and
tells them to reporters. Also: readings of a rank's memory.

On a GPU three readings matter: the driver's (device used), the caching allocator's (reserved,
active, allocated), and their difference: the context, the libraries' own workspaces and NCCL, which
no allocator cap can bound. On the CPU it is the data segment, which RLIMIT_DATA bounds.
"""

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from highwater.engine.activations.host import HostActivations
from highwater.engine.data.batches import Batch
from highwater.engine.models.decoder import LanguageModel
from highwater.engine.models.loss import LogitRange
from highwater.engine.training.statistics import Reduced, Statistics
from highwater.engine.training.step import Training
from highwater.engine.training.step_quantities import QUANTITIES
from highwater.errors import MachineError
from highwater.model.footprint import step_flops
from highwater.model.model import load_model
from highwater.nouns.hardware import kind_of
from highwater.nouns.trial import MemoryBudget, RankMemory, StatisticsFiles, TrialSpec
from highwater.units import GIB, format_bytes

if TYPE_CHECKING:
    from highwater.engine.training.reporters import Reports

_PEAKS = (
    *("peak_allocated_bytes", "peak_reserved_bytes"),
    *("device_used_bytes", "peak_data_segment_bytes"),
)
"""Fields of RankMemory that every rank adds to the statistics."""


class StatisticsLog:
    """Combines a step's numbers over all ranks and writes them on rank 0."""

    def __init__(
        self, spec: TrialSpec, files: StatisticsFiles, training: Training, *, device_name: str
    ) -> None:
        """Prepare for the steps of ``spec``; only rank 0 uses the files."""
        self._spec = spec
        self._training = training
        self._statistics = Statistics(training.mesh, training.sequence)
        kind, self._flops_per_s = kind_of(device_name), None
        if kind is not None and kind.bf16_dense_tflops is not None:
            self._flops_per_s = kind.bf16_dense_tflops * 1e12 * spec.layout.gpus
        if files.logit_range:
            follow_logits(training)
        self._files = _Files(files) if training.mesh.get_rank() == 0 else None

    def write(
        self, step: int, known: Mapping[str, float], *, step_time_s: float, memory: RankMemory
    ) -> None:
        """Write a step's numbers; ``known`` are those that all ranks have.

        All ranks call this, once the device has done the step.
        """
        began = time.perf_counter()
        statistics, record = self._statistics, self._training.record
        for name, value in known.items():
            statistics.add(name, value)
        record.add_to(statistics, self._training.hyperparameters)
        statistics.add("step_time_s", step_time_s)
        statistics.add("model_flops", self._model_flops(record.micro_batches))
        for name in _PEAKS:
            peak = getattr(memory, name)
            if peak is not None:
                statistics.add(name, peak)
        numbers = statistics.export(most_documents=record.most_documents)
        if self._files is not None:
            tokens, flops, time_s = (
                numbers[name] for name in ("n_tokens", "model_flops", "step_time_s")
            )
            assert isinstance(tokens, int)
            assert isinstance(flops, float)
            assert isinstance(time_s, float)
            told = numbers | {"tokens_per_s": tokens / time_s}
            if self._flops_per_s is not None:
                told["mfu"] = flops / time_s / self._flops_per_s
            told["statistics_time_s"] = time.perf_counter() - began
            self._files.write(step, {name: told[name] for name in QUANTITIES if name in told})

    def write_evaluation(self, step: int, loss: float) -> None:
        """Write the loss of an evaluation after a step, on rank 0."""
        if self._files is not None:
            self._files.write(step, {"evaluation_loss": loss})

    def close(self) -> None:
        """End the reports, after the last step."""
        if self._files is not None and self._files.reports is not None:
            self._files.reports.close()

    def _model_flops(self, micro_batches: Sequence[Batch]) -> float:
        """Return this rank's share of the model FLOPs for its documents."""
        shape = load_model(self._spec.model_directory).shape
        lengths = Counter(length for batch in micro_batches for length in batch.document_lengths)
        flops = sum(
            step_flops(shape, length_tokens=length, sequences=count, settings=self._spec.settings)
            for length, count in lengths.items()
        )
        return flops / self._statistics.coordinates.sharing


class _Files:
    """Files that rank 0 writes. A full disk does not stop the trial; it is reported once."""

    def __init__(self, files: StatisticsFiles) -> None:
        self._path, self._failed = Path(files.path), False
        self.reports: Reports | None = None
        if files.reports_directory is not None:
            from highwater.engine.training import reporters  # few runs have them

            self.reports = reporters.Reports(files.report_to, Path(files.reports_directory))

    def write(self, step: int, numbers: Mapping[str, Reduced]) -> None:
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode({"step": step, **numbers}) + b"\n")
        except OSError as error:
            if not self._failed:
                sys.stdout.write(f"statistics are not written: {error}\n")
            self._failed = True
        if self.reports is not None:
            self.reports.write(step, numbers)


def follow_logits(training: Training) -> None:
    """Record the range of the policy's logits from now on, if it has logits."""
    for module in training.policy.modules():
        if isinstance(module, LanguageModel):
            module.logit_range = training.record.logit_range = LogitRange()


_SAMPLE_S = 0.001


def device_used_bytes(device: torch.device) -> int:
    """Bytes that the driver reports as used on a GPU, by any process."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def outside_allocator_bytes(device: torch.device) -> int:
    """Bytes in use on the device that the caching allocator does not hold."""
    return device_used_bytes(device) - torch.cuda.memory_reserved(device)


def allocator_settings(device: torch.device) -> dict[str, str]:
    """Return the settings that the caching allocator reports; empty on the CPU."""
    if device.type != "cuda":
        return {}
    # there is no public function for this
    snapshot = torch.cuda.memory._snapshot(device)  # pyright: ignore[reportPrivateUsage]
    return {name: str(value) for name, value in snapshot.get("allocator_settings", {}).items()}


def divide_budget(
    device: torch.device,
    *,
    budget_bytes: int | None,
    nccl_bytes: int,
    host: HostActivations | None = None,
) -> MemoryBudget:
    """Bound the allocator so that device memory used stays within the budget; with None nothing but
    the card bounds it. It is bound anew whenever ``host`` maps memory, which takes page tables.

    The bytes now outside the allocator are the context, except for ``nccl_bytes``.

    Raises MachineError if the budget leaves nothing, or exceeds the card.
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

    def bound() -> None:
        left = max(0, budget - outside_allocator_bytes(device))
        torch.cuda.set_per_process_memory_fraction(left / total, device)

    if budget_bytes is not None:
        bound()
        if host is not None:
            host.follow_mapping(bound)
    return MemoryBudget(
        budget_bytes=budget,
        context_bytes=context_bytes,
        nccl_bytes=nccl_bytes,
        allocator_cap_bytes=cap,
    )


def past_budget(peaks: RankMemory, budget: MemoryBudget) -> str | None:
    """Say how the device came to use more than its budget; None if it did not, as far as read.

    The allocator compares its cap with what it is asked for, but expandable segments map 20 MiB at
    a time, so it can pass its cap by less than that.
    """
    used = peaks.device_used_bytes
    if used is None or used <= budget.budget_bytes:
        return None
    past_cap = (peaks.peak_reserved_bytes or 0) - budget.allocator_cap_bytes
    why = "what is outside the allocator grew after the first step began"
    if past_cap > 0:
        past = format_bytes(past_cap)
        why = f"the allocator maps whole pages, with which it passed its cap by {past}"
    allowed = format_bytes(budget.budget_bytes)
    return f"{format_bytes(used)} used on the device, {allowed} allowed: {why}"


class MemoryWatch:
    """Follows a rank's memory; ``peaks`` may be read at any time, also after a failure."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._segment = DataSegment() if device.type == "cpu" else None
        self._device_used = 0

    def begin(self) -> None:
        """Reset the peaks; not on the CPU, whose limit binds from the start of the process."""
        self._device_used = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def sample(self) -> None:
        """Read the driver or the data segment now: called at ends of phases, when much is alive."""
        if self._segment is not None:
            self._segment.read()
        else:
            self._device_used = max(self._device_used, device_used_bytes(self.device))

    def peaks(self) -> RankMemory:
        """Return the peaks since the watch was made or last begun."""
        self.sample()
        if self._segment is not None:
            return RankMemory(peak_data_segment_bytes=self._segment.peak_bytes)
        stats = torch.cuda.memory_stats(self.device)
        reserved, outside = stats["reserved_bytes.all.peak"], outside_allocator_bytes(self.device)
        return RankMemory(
            peak_allocated_bytes=stats["allocated_bytes.all.peak"],
            peak_active_bytes=stats["active_bytes.all.peak"],
            peak_reserved_bytes=reserved,
            # the samples may have missed a peak after which the allocator freed memory
            device_used_bytes=max(self._device_used, reserved + outside),
            device_total_bytes=torch.cuda.mem_get_info(self.device)[1],
            allocator_retries=stats["num_alloc_retries"],
        )


class DataSegment:
    """Peak of this process's data segment, read every millisecond."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._statm = Path("/proc/self/statm")
        threading.Thread(target=self._follow, name="data-segment", daemon=True).start()

    def read(self) -> None:
        """Read the segment once. Field 6 of statm is data plus stack, in pages; source: proc(5)."""
        pages = int(self._statm.read_text().split()[5])
        self.peak_bytes = max(self.peak_bytes, pages * self._page_bytes)

    def _follow(self) -> None:
        pause = threading.Event()
        while not pause.wait(_SAMPLE_S):
            self.read()

"""SimulatedRunner: answers trials from a memory law, for tests, for ``--dry-run``, and for comparing search methods.

A law says what a trial needs (bytes) or how it ends (an outcome); it may also raise. The runner compares the bytes with the
budget and writes the result that a real trial would, labelled ``simulated``: peaks by the law, times by a second law, or unknown.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import msgspec

from highwater.spec.footprint import (
    ENGINE_LOGITS_BYTES,
    FIXED_BYTES,
    device_state_bytes,
    gathered_bytes,
    layer_bytes,
    layer_input_bytes,
)
from highwater.spec.model import ModelShape, load_model
from highwater.spec.study import Cell
from highwater.spec.trial import Device, Failure, MemoryBudget, Outcome, RankMemory, RankReport, TrialResult, TrialSpec
from highwater.units import MIB, format_bytes, format_seconds

CONTEXT_BYTES: Mapping[Device, int] = {"cuda": 1300 * MIB, "cpu": 0}
"""Outside the allocator: the driver's reserve and a context with cuBLAS and cuDNN (read on an H200, torch 2.11), no NCCL.
On the CPU the limit bounds the whole data segment."""

VERL_LOGITS_BYTES = 8.0
"""Per token x vocabulary in Trinity-RFT and verl, which divide by the temperature in place. Measured, torch 2.11."""
NATIVE_USABLE_SHARE = 0.86
"""What fragmentation leaves of the memory without expandable segments. Fitted to the published A100 tables."""

Law = Callable[[TrialSpec], int | Outcome]
"""Bytes that the allocator of one GPU must reserve for a trial, or how the trial ends: FIT, also if it is memory-only."""

TimeLaw = Callable[[TrialSpec], float]
"""Seconds of one optimizer step of a trial that fits."""


class SimulatedRunner:
    """A ``Runner`` that trains nothing and takes no time."""

    def __init__(
        self,
        law: Law,
        *,
        device_total_bytes: int | None = None,
        step_time: TimeLaw | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """``device_total_bytes`` is the card's memory, for trials without a budget; None is a card without end.

        With ``step_time`` a trial that fits is said to take so long, and one beyond ``timeout_s`` to have timed out.
        """
        self._law = law
        self._device_total_bytes = device_total_bytes
        self._step_time = step_time
        self._timeout_s = timeout_s

    def run(self, spec: TrialSpec, *, attempt: int = 1, repeat: int = 0) -> TrialResult:  # noqa: ARG002 (a law knows no repeats)
        """The result by the laws. Raises what they raise."""
        result = self._by_memory(spec, attempt)
        if result.outcome is not Outcome.FIT:
            return result
        if self._step_time is not None:
            result = self._in_time(spec, result, self._step_time(spec))
        if result.outcome is Outcome.FIT and spec.is_memory_only:
            ranks = tuple(msgspec.structs.replace(rank, step_times_s=()) for rank in result.ranks)
            return msgspec.structs.replace(result, outcome=Outcome.MEMORY_ONLY_FIT, ranks=ranks)
        return result

    def _in_time(self, spec: TrialSpec, result: TrialResult, step_s: float) -> TrialResult:
        """The result of a trial that fits, with its times, or its timeout."""
        wall_s = spec.steps * step_s
        if self._timeout_s is not None and wall_s > self._timeout_s:
            reason = f"simulated: not done after {format_seconds(self._timeout_s)}"
            return TrialResult(
                outcome=Outcome.TIMEOUT, reason=reason, attempt=result.attempt, wall_s=self._timeout_s, simulated=True
            )
        ranks = result.ranks or tuple(RankReport(rank=rank) for rank in range(spec.layout.gpus))
        timed = tuple(msgspec.structs.replace(rank, step_times_s=(step_s,) * spec.steps) for rank in ranks)
        return msgspec.structs.replace(result, ranks=timed, wall_s=wall_s)

    def _by_memory(self, spec: TrialSpec, attempt: int) -> TrialResult:
        told = self._law(spec)
        if isinstance(told, Outcome):
            return TrialResult(outcome=told, reason=f"simulated: {told.value}", attempt=attempt, simulated=True)
        cap_bytes = self._cap_bytes(spec)
        fits = cap_bytes is None or told <= cap_bytes
        reason = f"simulated: {format_bytes(told)} needed"
        if cap_bytes is not None:
            reason += f", {format_bytes(cap_bytes)} usable"
        failure = None if fits else Failure(kind="device_memory", phase="backward", text=reason)
        memory = self._memory(spec, reserved_bytes=told if cap_bytes is None else min(told, cap_bytes))
        budget = _budget(spec)
        return TrialResult(
            outcome=Outcome.FIT if fits else Outcome.OUT_OF_MEMORY,
            reason=reason,
            ranks=tuple(RankReport(rank=r, failure=failure, memory=memory, budget=budget) for r in range(spec.layout.gpus)),
            attempt=attempt,
            simulated=True,
        )

    def _cap_bytes(self, spec: TrialSpec) -> int | None:
        """What the allocator may reserve; below zero where not even a context fits."""
        limit_bytes = spec.memory_budget_bytes or self._device_total_bytes
        return None if limit_bytes is None else limit_bytes - CONTEXT_BYTES[spec.device]

    def _memory(self, spec: TrialSpec, *, reserved_bytes: int) -> RankMemory:
        """Peaks of one rank. A trial that failed had reserved all it could."""
        reserved_bytes = max(0, reserved_bytes)
        if spec.device == "cpu":
            return RankMemory(peak_data_segment_bytes=reserved_bytes)
        return RankMemory(
            peak_reserved_bytes=reserved_bytes,
            device_used_bytes=reserved_bytes + CONTEXT_BYTES[spec.device],
            device_total_bytes=self._device_total_bytes,
        )


def _budget(spec: TrialSpec) -> MemoryBudget | None:
    if spec.memory_budget_bytes is None:
        return None
    context_bytes = CONTEXT_BYTES[spec.device]
    return MemoryBudget(
        budget_bytes=spec.memory_budget_bytes,
        context_bytes=context_bytes,
        nccl_bytes=0,
        allocator_cap_bytes=max(0, spec.memory_budget_bytes - context_bytes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaLaw:
    """What a model needs, in closed form: states, gathered weights, and a cost per token of the longest-lived tensors.

    The form that was fitted to the published A100 tables, of which it explains 69 of 80 cells with expandable segments exactly
    and the others within a grid step; with terms of the loss and of one layer for settings that those tables lack. Rough.
    """

    shape: ModelShape | None = None
    """None: each trial's model is read from its directory."""
    logits_bytes: float = ENGINE_LOGITS_BYTES
    """Per token x vocabulary, of the loss ``full``; ``chunked`` has none."""

    def __call__(self, spec: TrialSpec) -> int:
        """Bytes that each GPU's allocator must reserve."""
        settings, layout = spec.settings, spec.layout
        shape = self.shape or _shape(spec.model_directory)
        tokens = -(-spec.sequences * spec.length_tokens // layout.context_degree)
        states = device_state_bytes(shape, settings, device=spec.device) // layout.shard_degree
        fixed = states + gathered_bytes(shape) + FIXED_BYTES[spec.device] - CONTEXT_BYTES[spec.device]
        peak = fixed + tokens * self._bytes_per_token(spec, shape)
        usable_share = NATIVE_USABLE_SHARE if spec.device == "cuda" and settings.allocator == "native" else 1
        return int(peak / usable_share)

    def _bytes_per_token(self, spec: TrialSpec, shape: ModelShape) -> float:
        """What is saved in the forward pass, and the larger of the loss's logits and one layer being recomputed."""
        layer = layer_bytes(shape)
        kept = layer_input_bytes(shape) if spec.settings.recompute == "layer" else layer * shape.layers
        logits = self.logits_bytes * shape.vocab_size if spec.settings.holds_logits else 0
        return kept + max(logits, layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLaw:
    """A table of capacities: a length fits if it is no longer than its cell's. It knows no bytes."""

    capacity_tokens: Mapping[tuple[str, Cell], int]
    """By model name and cell; 0 where nothing fits."""

    def __call__(self, spec: TrialSpec) -> Outcome:
        """Whether the table has a length this long. Raises KeyError for a cell that it does not have."""
        capacity = self.capacity_tokens[spec.model_name, Cell(layout=spec.layout, settings=spec.settings)]
        return Outcome.FIT if spec.length_tokens <= capacity else Outcome.OUT_OF_MEMORY


@cache
def _shape(model_directory: str) -> ModelShape:
    return load_model(model_directory).shape

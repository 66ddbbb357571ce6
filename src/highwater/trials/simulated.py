"""SimulatedRunner: answers trials from a memory law, for ``--dry-run`` and for tests.

A law is a function from a trial to the bytes that it needs, or to its outcome; it may also raise.
The result is like a real trial's, labelled ``simulated``: peaks by the law, and no times.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from highwater.memory.capacity import MemoryLimit
from highwater.memory.formula.constants import Term, context_bytes, outside_terms
from highwater.memory.formula.formula import upper_footprint
from highwater.memory.formula.layers import Step
from highwater.memory.interval.calibration import Calibration
from highwater.memory.predictor import FormulaPredictor
from highwater.memory.trainers import MEMORY
from highwater.model.model import ModelShape
from highwater.nouns.study import Cell, Question
from highwater.nouns.trainer import OURS
from highwater.nouns.trial import (
    Failure,
    Launch,
    MemoryBudget,
    OnPhase,
    Outcome,
    RankMemory,
    RankReport,
    TrialResult,
    TrialSpec,
    unheard,
)
from highwater.units import format_bytes


class OneByOne(ABC):
    """A ``Runner`` of one trial at a time, which ends before ``submit`` returns."""

    @abstractmethod
    def run(self, spec: TrialSpec, *, attempt: int = 1, repeat: int = 0) -> TrialResult:
        """Return the result of a trial; raises the errors of ``Launcher.launch``."""

    def has_room(self, spec: TrialSpec) -> bool:  # noqa: ARG002
        """Return True: trials end within ``submit``, so none is running."""
        return True

    def submit(self, launch: Launch, *, on_phase: OnPhase = unheard) -> Future[TrialResult]:  # noqa: ARG002
        """Run the trial, and return a finished future with its result or its exception."""
        future: Future[TrialResult] = Future()
        try:
            result = self.run(launch.spec, attempt=launch.attempt, repeat=launch.repeat)
        except BaseException as error:  # noqa: BLE001 – whoever waits for the future gets it
            future.set_exception(error)
        else:
            future.set_result(result)
        return future

    def close(self) -> None:
        """Do nothing: no trial runs."""
        return


Law = Callable[[TrialSpec], int | Outcome]
"""Bytes that a trial reserves on one GPU, or its outcome; FIT stands for a memory-only fit too."""


class SimulatedRunner(OneByOne):
    """A ``Runner`` that trains nothing: its law says at once what each trial needs."""

    def __init__(self, law: Law, *, device_total_bytes: int | None = None) -> None:
        """``device_total_bytes``: GPU memory of trials without a budget; None: unlimited."""
        self._law = law
        self._device_total_bytes = device_total_bytes

    def run(self, spec: TrialSpec, *, attempt: int = 1, repeat: int = 0) -> TrialResult:  # noqa: ARG002
        """Return the simulated result of a trial; raises the exceptions of the law."""
        fit = Outcome.MEMORY_ONLY_FIT if spec.is_memory_only else Outcome.FIT
        told = self._law(spec)
        if isinstance(told, Outcome):
            return TrialResult(
                outcome=fit if told is Outcome.FIT else told,
                reason=f"simulated: {told.value}",
                attempt=attempt,
                simulated=True,
            )
        cap_bytes = self._cap_bytes(spec)
        fits = cap_bytes is None or told <= cap_bytes
        reason = f"simulated: {format_bytes(told)} needed"
        if cap_bytes is not None:
            reason += f", {format_bytes(cap_bytes)} usable"
        failure = None if fits else Failure(kind="device_memory", phase="backward", text=reason)
        reserved_bytes = told if cap_bytes is None else min(told, cap_bytes)
        memory, budget = self._memory(spec, reserved_bytes), self._budget(spec)
        return TrialResult(
            outcome=fit if fits else Outcome.OUT_OF_MEMORY,
            reason=reason,
            ranks=tuple(
                RankReport(rank=r, failure=failure, memory=memory, budget=budget)
                for r in range(spec.layout.gpus)
            ),
            attempt=attempt,
            simulated=True,
        )

    def _cap_bytes(self, spec: TrialSpec) -> int | None:
        """Bytes that the allocator may reserve; negative if the budget is below the context."""
        limit_bytes = spec.memory_budget_bytes or self._device_total_bytes
        if isinstance(self._law, LikelyPrediction):
            limit_bytes = self._law.room_bytes(spec)
        return None if limit_bytes is None else limit_bytes - sum(self._outside_bytes(spec))

    def _memory(self, spec: TrialSpec, reserved_bytes: int) -> RankMemory:
        """Peaks of one rank. A failed trial has reserved all that it could."""
        reserved_bytes = max(0, reserved_bytes)
        if spec.device == "cpu":
            return RankMemory(peak_data_segment_bytes=reserved_bytes)
        return RankMemory(
            peak_reserved_bytes=reserved_bytes,
            device_used_bytes=reserved_bytes + sum(self._outside_bytes(spec)),
            device_total_bytes=self._device_total_bytes,
        )

    def _budget(self, spec: TrialSpec) -> MemoryBudget | None:
        if spec.memory_budget_bytes is None:
            return None
        context, nccl = self._outside_bytes(spec)
        return MemoryBudget.split(spec.memory_budget_bytes, context_bytes=context, nccl_bytes=nccl)

    def _outside_bytes(self, spec: TrialSpec) -> tuple[int, int]:
        """Bytes outside the allocator: context and others, and NCCL separately."""
        if not isinstance(self._law, UpperFormula):
            return context_bytes(spec.device, gpus=spec.layout.gpus), 0
        terms = self._law.outside_terms(spec)
        nccl_bytes = sum(term.bytes for term in terms if "NCCL" in term.name)
        return sum(term.bytes for term in terms) - nccl_bytes, nccl_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class UpperFormula:
    """Bytes that our engine's trials need, by the formula's upper estimate: seldom too low."""

    shape: ModelShape

    def __call__(self, spec: TrialSpec) -> int | Outcome:
        """Bytes that each GPU's allocator must reserve for the trial."""
        place = self.shape, spec.settings, spec.layout
        needed = upper_footprint(Step(*place, spec.length_tokens, spec.device, spec.prompt_tokens))
        return needed.needed_bytes - needed.outside_bytes

    def outside_terms(self, spec: TrialSpec) -> tuple[Term, ...]:
        """Memory terms of a GPU outside the allocator."""
        return outside_terms(self.shape, spec.settings, spec.layout, spec.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class LikelyPrediction(UpperFormula):
    """Bytes that trials need by ``highwater predict``, and the room that its intervals leave."""

    question: Question
    limit: MemoryLimit
    known: Calibration | None
    is_tight: bool
    """True if no length leaves the headroom: then the prediction alone decides."""

    def __call__(self, spec: TrialSpec) -> int | Outcome:
        """Bytes that each GPU's allocator must reserve, by the likely prediction."""
        peak = self._predictor(spec).at(spec.length_tokens)
        if not peak.footprint.fits_host(self.limit.host_bytes):
            return Outcome.HOST_OUT_OF_MEMORY
        return peak.needed_bytes - peak.footprint.outside_bytes

    def outside_terms(self, spec: TrialSpec) -> tuple[Term, ...]:
        """Memory terms of a GPU outside the allocator, at the trial's length."""
        return self._predictor(spec).at(spec.length_tokens).footprint.outside

    def room_bytes(self, spec: TrialSpec) -> int:
        """Bytes of a GPU that the prediction may use, so that its upper end fits too."""
        if self.is_tight:
            return self.limit.device_bytes
        known = self.known and self.known.of(spec.settings.allocator)
        return self._predictor(spec).capacity_room_bytes(known)

    def _predictor(self, spec: TrialSpec) -> FormulaPredictor:
        cell = Cell(layout=spec.layout, settings=spec.settings)
        return MEMORY[OURS].by_formula(self.question, cell, self.limit)

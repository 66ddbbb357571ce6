"""Evidence: what a user's own trials say to a prediction: residuals by formula, or each against its own trace."""

import os
import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from highwater.errors import ModelError, UsageError
from highwater.launch.tracing import CachedTracer, fullest_rank, trace_directory, traceable
from highwater.prediction.residuals import (
    Method,
    Residual,
    leave_out,
    refuse_silent,
    study_residuals,
    tells_nothing,
    traced_residual,
    worth_tracing,
)
from highwater.spec.hardware import Kernel
from highwater.spec.model import Model, load_model
from highwater.spec.study import RecordedTrial, Study
from highwater.spec.trial import TrialSpec
from highwater.store.journal import read_study

OnCalibrate = Callable[[int, int], None]
"""Hears before the first trace how many trials are traced, and how many traces are not kept yet."""


def own_residuals(
    studies: Sequence[str | Path], method: Method, *, on_calibrate: OnCalibrate | None, on_trace: Callable[[TrialSpec], None] | None
) -> tuple[Residual, ...]:
    """Of the trials in these files; by trace those of each study that tell the most.

    Raises HighwaterError for those that teach nothing about what is predicted, before anything is traced.
    """
    read = [read_study(Path(path)) for path in studies]
    if method == "formula":
        return tuple(residual for study in read for residual in study_residuals(study))
    if not read:
        return ()
    with ExitStack() as stack:
        each = [_Traceable.of(study, on_trace, stack) for study in read]
        if on_calibrate is not None:
            unmade = {path for one in each for path in one.tracer.unmade(one.spec_of(trial) for trial in one.trials)}
            on_calibrate(sum(len(one.trials) for one in each), len(unmade))
        return tuple(residual for one in each for residual in one.residuals())


@dataclass(frozen=True, slots=True)
class _Traceable:
    """A study, the trials of it that are traced, and what traces them."""

    study: Study
    model: Model
    """As it is here."""
    trials: tuple[RecordedTrial, ...]
    tracer: CachedTracer

    @classmethod
    def of(cls, study: Study, on_trace: Callable[[TrialSpec], None] | None, stack: ExitStack) -> "_Traceable":
        refuse_silent(study)
        trials = worth_tracing(study, traceable(study.question)[0])
        kernels = [rank.attention_kernel for trial in trials if trial.result is not None for rank in trial.result.ranks]
        kernel: Kernel | None = next((name for name in ("cudnn", "flash") if name in kernels), None)
        if kernel is None:
            raise tells_nothing(study)
        tracer = stack.enter_context(CachedTracer(trace_directory(os.environ), kernel=kernel, on_trace=on_trace))
        return cls(study, _model_here(study), trials, tracer)

    def spec_of(self, trial: RecordedTrial) -> TrialSpec:
        return msgspec.structs.replace(trial.spec, model_directory=self.model.directory)

    def residuals(self) -> list[Residual]:
        """Two traces at once."""
        with ThreadPoolExecutor(max_workers=2) as pool:
            found = [each for each in pool.map(self._residual, self.trials) if each is not None]
        if not found:
            raise tells_nothing(self.study)
        return found

    def _residual(self, trial: RecordedTrial) -> Residual | None:
        spec = self.spec_of(trial)
        assert trial.result is not None  # noqa: S101 -- chosen for it
        return traced_residual(self.model.shape, trial.spec, trial.result, self.tracer(spec), rank=fullest_rank(spec))


def _model_here(study: Study) -> Model:
    """The study may have been written on another machine: its directory, or the catalog's model of the same configuration."""
    asked = study.question.model
    for place in (asked.directory, asked.name):
        try:
            model = load_model(place)
        except ModelError:
            continue
        if model.config_digest == asked.config_digest:
            return model
    where = shlex.quote(asked.directory)
    raise UsageError(f"{study.path} is of {asked.name}, whose config.json is not at {where} any more", hint=leave_out(study))

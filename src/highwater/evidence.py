"""Evidence: what a user's own machine says to a prediction: constants read on its GPUs, and trials, by formula or each traced."""

import os
import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from highwater.errors import ModelError, UsageError
from highwater.launch.tracing import CachedTracer, fullest_rank, trace_directory
from highwater.prediction.constants import MachineConstants, machine_constants
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
from highwater.spec.cluster import Cluster
from highwater.spec.codec import from_json
from highwater.spec.constants import CUBLAS_WORKSPACES, NCCL_ALL_TO_ALL, NCCL_GROUP, Constants, MeasuredConstants
from highwater.spec.files import CONFIG_BYTES, read_file
from highwater.spec.hardware import Kernel, kind_of
from highwater.spec.model import Model, load_model
from highwater.spec.study import RecordedTrial, Study
from highwater.spec.trial import TrialSpec
from highwater.store.journal import read_study

_SCHEMA_VERSION = 1
"""Of the files of constants that are read."""
OnCalibrate = Callable[[int, int], None]
"""Hears before the first trace how many trials are traced, and how many traces are not kept yet."""


def own_constants(path: Path, where: Cluster) -> MachineConstants:
    """The readings in a file that ``highwater doctor --measure --json`` printed on such GPUs; raises UsageError for others."""
    hint = "leave `--constants` out, or make the file where the GPUs are: `highwater doctor --measure --json > constants.json`"
    try:
        found = from_json(read_file(path, most_bytes=CONFIG_BYTES), MeasuredConstants)
    except OSError as error:
        raise UsageError(f"the constants {path} cannot be read: {error.strerror}", hint=hint) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not what `highwater doctor --measure --json` prints: {error}", hint=hint) from error
    names = {each.device_name for each in found.constants}
    kinds = {kind_of(name) for name in names}
    asked = kind_of(where.device_name)
    refusals = (
        (found.schema_version != _SCHEMA_VERSION, f"is of version {found.schema_version}, this reads {_SCHEMA_VERSION}"),
        (not found.constants, "has no readings: it was printed without `--measure`"),
        (len(names) > 1, f"is of several kinds of GPUs: {', '.join(sorted(names))}"),
        (asked is not None and kinds != {asked}, f"was read on {', '.join(names)}, and {where.device_name} is asked"),
        (not all(map(_is_whole, found.constants)), "lacks readings of context, of cuBLAS, or of NCCL where there are several GPUs"),
    )
    for is_refused, what in refusals:
        if is_refused:
            raise UsageError(f"{path} {what}", hint=hint)
    return machine_constants(sorted(found.constants, key=lambda each: each.gpus))


def _is_whole(read: Constants) -> bool:
    """With all that a prediction takes from it, and nothing below zero in sum."""
    names = {reading.name for reading in read.readings}
    needed = {"context", *CUBLAS_WORKSPACES, *((*NCCL_GROUP, NCCL_ALL_TO_ALL) if read.gpus > 1 else ())}
    sums = (read.context_bytes, *(reading.outside_bytes for reading in read.readings if reading.name in needed))
    return read.gpus >= 1 and needed <= names and min(sums) >= 0 and read.context_bytes > 0


def own_residuals(
    studies: Sequence[str | Path],
    method: Method,
    constants: MachineConstants | None,
    *,
    on_calibrate: OnCalibrate | None,
    on_trace: Callable[[TrialSpec], None] | None,
) -> tuple[Residual, ...]:
    """Of the trials in these files; by trace those of each study that tell the most.

    Raises HighwaterError for those that teach nothing about what is predicted, before anything is traced.
    """
    read = [read_study(Path(path)) for path in studies]
    if method == "formula":
        return tuple(residual for study in read for residual in study_residuals(study, constants))
    if not read:
        return ()
    with ExitStack() as stack:
        each = [_Traceable.of(study, on_trace, stack) for study in read]
        if on_calibrate is not None:
            unmade = {path for one in each for path in one.tracer.unmade(one.spec_of(trial) for trial in one.trials)}
            on_calibrate(sum(len(one.trials) for one in each), len(unmade))
        return tuple(residual for one in each for residual in one.residuals(constants))


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
        trials = worth_tracing(study, study.question)
        kernels = [rank.attention_kernel for trial in trials if trial.result is not None for rank in trial.result.ranks]
        kernel: Kernel | None = next((name for name in ("cudnn", "flash") if name in kernels), None)
        if kernel is None:
            raise tells_nothing(study)
        tracer = stack.enter_context(CachedTracer(trace_directory(os.environ), kernel=kernel, on_trace=on_trace))
        return cls(study, _model_here(study), trials, tracer)

    def spec_of(self, trial: RecordedTrial) -> TrialSpec:
        return msgspec.structs.replace(trial.spec, model_directory=self.model.directory)

    def residuals(self, constants: MachineConstants | None) -> list[Residual]:
        """Two traces at once."""
        with ThreadPoolExecutor(max_workers=2) as pool:
            found = [each for each in pool.map(partial(self._residual, constants), self.trials) if each is not None]
        if not found:
            raise tells_nothing(self.study)
        return found

    def _residual(self, constants: MachineConstants | None, trial: RecordedTrial) -> Residual | None:
        spec = self.spec_of(trial)
        assert trial.result is not None  # noqa: S101 -- chosen for it
        log, shape = self.tracer(spec), self.study.question.model.shape
        return traced_residual(shape, trial.spec, trial.result, log, rank=fullest_rank(spec), own=constants)


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

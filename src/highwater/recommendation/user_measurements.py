"""Measurements of a user's machine, for a prediction: constants of GPUs, residuals of trials."""

import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from highwater.errors import ModelError, UsageError
from highwater.memory.formula.constants import MachineConstants, machine_constants
from highwater.memory.interval.residuals import (
    PredictionMethod,
    Residual,
    refuse_silent,
    tells_nothing,
    traced_residual,
    unfit,
    worth_tracing,
)
from highwater.memory.trainers import MEMORY
from highwater.model.model import Model, load_model
from highwater.nouns.cluster import Cluster
from highwater.nouns.codec import record_in
from highwater.nouns.hardware import (
    CUBLAS_WORKSPACES,
    MEASURED_SCHEMA_VERSION,
    NCCL_ALL_TO_ALL,
    NCCL_GROUP,
    Constants,
    Kernel,
    MeasuredConstants,
    kind_of,
)
from highwater.nouns.study import RecordedTrial, Study
from highwater.nouns.trainer import OURS, TrainerName
from highwater.nouns.trial import TrialSpec
from highwater.store.journal import read_study
from highwater.trainers.user_file import study_as_told
from highwater.trials.traced import CachedTracer, fullest_rank
from highwater.trials.trial_process import cache_directory

OnCalibrate = Callable[[int, int], None]
"""Called before the first trace: with the number of trials to trace, and of traces not kept yet."""


def own_constants(path: Path, where: Cluster) -> MachineConstants:
    """Read the constants that ``highwater doctor --measure --json`` printed on such GPUs. Raises
    UsageError for constants of other GPUs, and for a file of another kind.
    """
    hint = (
        "leave `--constants` out, or make the file where the GPUs are: `highwater doctor "
        "--measure --json > constants.json`"
    )
    what = "what `highwater doctor --measure --json` prints"
    found = record_in(path, MeasuredConstants, called="constants", what=what, hint=hint)
    obstacle = _obstacle(found, where)
    if obstacle is not None:
        raise UsageError(f"{path} {obstacle}", hint=hint)
    return machine_constants(sorted(found.constants, key=lambda each: each.gpus))


def _obstacle(found: MeasuredConstants, where: Cluster) -> str | None:
    """Reason why these measurements do not apply to the GPUs ``where``; None if they do."""
    names = {each.device_name for each in found.constants}
    asked = kind_of(where.device_name)
    if found.schema_version != MEASURED_SCHEMA_VERSION:
        return f"is of version {found.schema_version}, this reads {MEASURED_SCHEMA_VERSION}"
    if not found.constants:
        return "has no readings: it was printed without `--measure`"
    if len(names) > 1:
        return f"is of several kinds of GPUs: {', '.join(sorted(names))}"
    if asked is not None and {kind_of(name) for name in names} != {asked}:
        return f"was read on {', '.join(names)}, and {where.device_name} is asked"
    if not all(map(_is_whole, found.constants)):
        return "lacks readings of context, of cuBLAS, or of NCCL where there are several GPUs"
    return None


def _is_whole(read: Constants) -> bool:
    """True if readings have all figures that a prediction needs, and no negative sum."""
    names = {reading.name for reading in read.readings}
    nccl = (*NCCL_GROUP, NCCL_ALL_TO_ALL) if read.gpus > 1 else ()
    needed = {"context", *CUBLAS_WORKSPACES, *nccl}
    taken = (reading.outside_bytes for reading in read.readings if reading.name in needed)
    sums = (read.context_bytes, *taken)
    return read.gpus >= 1 and needed <= names and min(sums) >= 0 and read.context_bytes > 0


def own_residuals(
    studies: Sequence[str | Path],
    method: PredictionMethod,
    constants: MachineConstants | None,
    *,
    trainer: TrainerName = OURS,
    on_calibrate: OnCalibrate | None,
    on_trace: Callable[[TrialSpec], None] | None,
) -> tuple[tuple[Residual, ...], tuple[str, ...]]:
    """Residuals of the trials in these files (by trace, of the most informative trials only); and
    notes on assumptions about the trials. Raises HighwaterError, before any tracing, for studies
    that do not apply here.
    """
    learn, notes = MEMORY[trainer].learn, dict[str, None]()
    assert learn is not None, "it is refused before"  # noqa: S101
    read = [study_as_told(read_study(Path(path)), trainer, notes) for path in studies]
    if method == "formula":
        return tuple(each for study in read for each in learn(study, constants)), tuple(notes)
    each = [_traceable(study, on_trace) for study in read]
    if on_calibrate is not None:
        unmade = {path for one in each for path in one.tracer.unmade(one.specs)}
        on_calibrate(sum(len(one.specs) for one in each), len(unmade))
    return tuple(residual for one in each for residual in _traced_residuals(one, constants)), ()


class _Traceable(NamedTuple):
    """A study, its trials that are to be traced, and a tracer for them."""

    study: Study
    trials: tuple[RecordedTrial, ...]
    specs: list[TrialSpec]
    """The trials' specs, with the model as it lies on this machine."""
    tracer: CachedTracer


def _traceable(study: Study, on_trace: Callable[[TrialSpec], None] | None) -> _Traceable:
    refuse_silent(study)
    trials = worth_tracing(study, study.question)
    results = [trial.result for trial in trials if trial.result is not None]
    kernels = [rank.attention_kernel for result in results for rank in result.ranks]
    kernel: Kernel | None = next((name for name in ("cudnn", "flash") if name in kernels), None)
    if kernel is None:
        raise tells_nothing(study)
    tracer = CachedTracer(cache_directory("traces"), kernel=kernel, on_trace=on_trace)
    directory = _model_here(study).directory
    specs = [trial.spec.replace(model_directory=directory) for trial in trials]
    return _Traceable(study, trials, specs, tracer)


def _traced_residuals(one: _Traceable, own: MachineConstants | None) -> list[Residual]:
    """Trace the trials, two at once, and close the tracer."""
    shape = one.study.question.model.shape

    def residual(trial: RecordedTrial, spec: TrialSpec) -> Residual | None:
        assert trial.result is not None, "worth_tracing chooses trials with a result"  # noqa: S101
        log, rank = one.tracer(spec), fullest_rank(spec)
        return traced_residual(shape, trial.spec, trial.result, log, rank=rank, own=own)

    with ThreadPoolExecutor(max_workers=2) as pool, one.tracer:
        found = [each for each in pool.map(residual, one.trials, one.specs) if each is not None]
    if not found:
        raise tells_nothing(one.study)
    return found


def _model_here(study: Study) -> Model:
    """The study's model on this machine: from its directory, or by its name in the catalog."""
    asked = study.question.model
    for place in (asked.directory, asked.name):
        try:
            model = load_model(place)
        except ModelError:
            continue
        if model.config_digest == asked.config_digest:
            return model
    where = shlex.quote(asked.directory)
    raise unfit(study, f"is of {asked.name}, whose config.json is not at {where} any more")

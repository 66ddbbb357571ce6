"""Residuals: GPU memory that recorded trials used, divided by the predicted memory."""

import shlex
from collections.abc import Sequence
from importlib.resources import files
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

from highwater.errors import UsageError
from highwater.memory.formula.constants import MachineConstants, workspaces_bytes
from highwater.memory.formula.formula import (
    Formula,
    likely_footprint,
    outside_terms_of,
    refuse_unknown_family,
)
from highwater.memory.formula.layers import Step
from highwater.memory.trace.replay import replay
from highwater.model.model import ModelShape
from highwater.nouns.codec import Record, from_json
from highwater.nouns.events import EventLog
from highwater.nouns.layout import Layout
from highwater.nouns.objective import Objective, OptimizerName
from highwater.nouns.settings import (
    Activations,
    Allocator,
    AttentionMethod,
    Loss,
    Offload,
    Parameters,
    Recompute,
    Settings,
    Strategy,
)
from highwater.nouns.study import Cell, Question, RecordedTrial, Study, counted_ranks
from highwater.nouns.trainer import OURS, TrainerName, trainer_title
from highwater.nouns.trial import Outcome, RankReport, TrialResult, TrialSpec
from highwater.version import __version__

PredictionMethod = Literal["formula", "trace"]
"""The closed form, or the engine's steps on fake tensors, replayed in a simulated allocator."""

MOST_TRACED = 8
"""Most trials of a study that are traced, which takes long: both sides of four edges."""


class Residual(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Memory that a trial used on its fullest GPU, its prediction, and traits that the error may
    depend on: a field and a row of ``traits_of`` each. Later fields default to all earlier trials'
    value.
    """

    method: PredictionMethod
    trial: str
    """Digest of the trial's specification."""
    measured_bytes: int
    """Most bytes that the driver reported of a GPU; of a trial that ran out though predicted to
    fit, the bytes that it was given."""
    predicted_bytes: int
    device_name: str
    model_name: str
    length_tokens: int
    allocator: Allocator
    gpus: int
    ulysses: bool
    offload: Offload
    strategy: Strategy
    recompute: Recompute
    objective: Objective
    ring: bool = False
    copies: bool = False
    activations: Activations = "gpu"
    one_micro_batch: bool = False
    attention: AttentionMethod = "dense"
    lora: bool = False
    optimizer: OptimizerName = "adamw"
    parameters: Parameters = "float32"
    loss: Loss = "full"
    at_least_bytes: int | None = None
    """Lower bound of a trial watched from outside, by its edge (memory/interval/calibration.py);
    ``measured_bytes`` is then the upper bound. None: ``measured_bytes`` is exact."""

    @property
    def factor(self) -> float:
        """Measured bytes over predicted ones; the most it can be if only two bounds are known."""
        return self.measured_bytes / self.predicted_bytes

    @property
    def least_factor(self) -> float:
        """Measured bytes over predicted ones; the least it can be if only two bounds are known."""
        if self.at_least_bytes is None:
            return self.factor
        return self.at_least_bytes / self.predicted_bytes


class Trait(NamedTuple):
    """A property of settings or layout by which predictions may be off, as LoRA or offload."""

    field: str
    """Name of the field of ``Residual``."""
    value: object
    words: str
    """Words for the trait in ``Calibration.unlike``."""


def traits_of(settings: Settings, layout: Layout) -> tuple[Trait, ...]:
    """Properties of a cell by which predictions may be off, besides GPU, model and length."""
    offload = "moments on host" if settings.offloads_states else "states on host"
    return (
        Trait("allocator", settings.allocator, f"{settings.allocator} segments"),
        Trait("loss", settings.loss, f"{settings.loss} loss"),
        Trait("gpus", layout.gpus, counted_ranks(layout.gpus, "cuda")),
        Trait("ulysses", layout.ulysses_degree > 1, "Ulysses"),
        Trait("ring", layout.ring_degree > 1, "a ring"),
        Trait("copies", layout.replicate_degree > 1, "copies"),
        Trait("offload", settings.offload, offload),
        Trait("objective", settings.objective, settings.objective),
        Trait("strategy", settings.strategy, settings.strategy),
        Trait("recompute", settings.recompute, f"recompute {settings.recompute}"),
        Trait("activations", settings.activations, "activations on host"),
        Trait("one_micro_batch", not settings.accumulates, "one micro-batch a step"),
        Trait("lora", settings.lora is not None, "LoRA"),
        Trait("attention", settings.attention, f"{settings.attention} attention"),
        Trait("optimizer", settings.optimizer, f"optimizer {settings.optimizer}"),
        Trait("parameters", settings.parameters, f"parameters in {settings.parameters}"),
    )


def unlike_cell(unlike: Sequence[str], cell: Cell, cells: Sequence[Cell]) -> tuple[str, ...]:
    """Return the words of ``unlike`` that name this cell's traits, or no trait of any cell."""
    words = [
        {each.words for each in traits_of(one.settings, one.layout) if each.value is not False}
        for one in (cell, *cells)
    ]
    here, anywhere = words[0], set[str]().union(*words)
    return tuple(each for each in unlike if each in here or each not in anywhere)


def bundled_residuals() -> tuple[Residual, ...]:
    """Comparisons of recorded trials with their predictions; the package has them in a file."""
    text = (files("highwater.memory.interval") / "residuals.json").read_bytes()
    return from_json(text, tuple[Residual, ...])


def study_residuals(
    study: Study,
    own: MachineConstants | None = None,
    *,
    trainer: TrainerName = OURS,
    formula: Formula = likely_footprint,
) -> tuple[Residual, ...]:
    """Residuals, by a trainer's formula, of every trial that reports the memory it needs, each
    trial once. ``own``: constants measured on the same GPUs. Raises UsageError for a study of a
    different trainer, ModelError for an unknown family.
    """
    refuse_silent(study, trainer)
    shape = study.question.model.shape
    told: dict[str, Residual] = {}
    for trial in study.trials:
        if trial.result is None:
            continue
        spec, result = trial.spec, trial.result
        step, read = step_of(shape, spec), _of_its_gpus(own, result)
        taken = formula(step).with_libraries(
            outside_terms_of(step, read), sum(workspaces_bytes(read))
        )
        found = residual(
            *(spec, result, "formula", taken.needed_bytes),
            cached_bytes=taken.cached_bytes,
            device_name=study.question.device_name,
        )
        if found is not None:
            told.setdefault(spec.key, found)
    if not told:
        raise tells_nothing(study)
    return tuple(told.values())


def worth_tracing(study: Study, question: Question) -> tuple[RecordedTrial, ...]:
    """The most informative trials, at most ``MOST_TRACED``: for each cell of the question the
    longest that fit, then the shortest that ran out, then the next of both. Each counts once.
    """
    columns: list[list[RecordedTrial]] = []
    for cell in question.cells:
        told = {each.spec.key: each for each in reversed(study.trials_of(cell)) if each.result}
        by_length = sorted(told.values(), key=lambda trial: trial.spec.length_tokens)
        ended = [(each, each.result.outcome) for each in by_length if each.result]
        fits = [trial for trial, outcome in reversed(ended) if outcome.is_fit]
        ran_out = [trial for trial, outcome in ended if outcome is Outcome.OUT_OF_MEMORY]
        pairs = zip_longest(fits, ran_out)
        columns.append([trial for pair in pairs for trial in pair if trial is not None])
    rows = zip_longest(*columns)
    return tuple(trial for row in rows for trial in row if trial is not None)[:MOST_TRACED]


def traced_residual(
    shape: ModelShape,
    spec: TrialSpec,
    result: TrialResult,
    log: EventLog,
    *,
    rank: int,
    own: MachineConstants | None = None,
) -> Residual | None:
    """The residual of one trial, by a replay of the trace of rank ``rank``, with the memory that
    the rank was given; None if the replay runs out, or the trial does not report its memory.
    """
    budget = next((each.budget for each in result.ranks if each.rank == rank), None)
    capacity = None if budget is None else budget.allocator_cap_bytes
    read = _of_its_gpus(own, result)
    replayed = replay(
        log,
        allocator=spec.settings.allocator,
        capacity_bytes=capacity,
        is_share=spec.memory_budget_bytes is not None,
        workspaces_bytes=workspaces_bytes(read),
    )
    if not replayed.fits:
        return None
    outside = outside_terms_of(step_of(shape, spec), read)
    outside_bytes = sum(term.bytes for term in outside)
    return residual(spec, result, "trace", replayed.peak_reserved_bytes + outside_bytes)


def step_of(shape: ModelShape, spec: TrialSpec) -> Step:
    """The step of a trial, as formulas take it."""
    settings, layout, prompt = spec.settings, spec.layout, spec.prompt_tokens
    return Step(shape, settings, layout, spec.length_tokens, spec.device, prompt)


def _of_its_gpus(own: MachineConstants | None, result: TrialResult) -> MachineConstants | None:
    """``own`` if it was measured on the kind of GPU that the trial ran on, else None."""
    names = [rank.device_name for rank in result.ranks]
    return own if own is not None and own.device_name in names else None


def residual(
    spec: TrialSpec,
    result: TrialResult,
    method: PredictionMethod,
    needed_bytes: int,
    *,
    cached_bytes: int = 0,
    device_name: str = "a GPU that told no name",
) -> Residual | None:
    """The residual of one trial; None if the trial does not report its memory. A trial that fits
    also keeps ``cached_bytes``, as far as the GPU has them. A trial that ran out though predicted
    to fit needs more than it was given: its residual is a lower bound of the error.
    """
    all_used = [rank.memory.device_used_bytes for rank in result.ranks]
    used = [size for size in all_used if size is not None]
    all_given = map(_given_bytes, result.ranks)
    given = max((size for size in all_given if size is not None), default=None)
    if result.outcome.is_fit and used:
        measured_bytes, predicted_bytes = max(used), needed_bytes + cached_bytes
        if given is not None:
            predicted_bytes = max(needed_bytes, min(predicted_bytes, given))
    elif result.outcome is Outcome.OUT_OF_MEMORY and given is not None and given > needed_bytes:
        measured_bytes, predicted_bytes = given, needed_bytes
    else:
        return None
    return residual_of(
        spec,
        method=method,
        measured_bytes=measured_bytes,
        predicted_bytes=predicted_bytes,
        device_name=result.ranks[0].device_name or device_name,
    )


def residual_of(spec: TrialSpec, **told: Any) -> Residual:
    """Compare a trial with its prediction; ``told``: bytes of both, the method, the GPU's name."""
    traits: dict[str, Any] = {
        each.field: each.value for each in traits_of(spec.settings, spec.layout)
    }
    return Residual(
        trial=spec.key,
        model_name=spec.model_name,
        length_tokens=spec.length_tokens,
        **traits,
        **told,
    )


def _given_bytes(rank: RankReport) -> int | None:
    return rank.memory.device_total_bytes if rank.budget is None else rank.budget.budget_bytes


def refuse_silent(study: Study, trainer: TrainerName = OURS) -> None:
    """Raise UsageError for a study whose trials are not of the kind that a trainer's predictions
    are about, ModelError for a family that is not predicted.
    """
    question, foreign = study.question, study.question.foreign
    theirs = OURS if foreign is None else foreign.trainer
    results = [trial.result for trial in study.trials if trial.result is not None]
    ranks = [rank for result in results for rank in result.ranks]
    versions = {rank.versions.get("highwater", "unknown") for rank in ranks if rank.versions}
    others = sorted(versions - {__version__})
    refusals = (
        (
            theirs != trainer,
            f"is of trials of {trainer_title(theirs)}: predictions are about "
            f"{trainer_title(trainer)}",
        ),
        (
            question.simulated or any(result.simulated for result in results),
            "is of simulated trials: nothing was measured",
        ),
        (question.device != "cuda", "is of trials on the CPU: predictions are about GPUs"),
        (
            question.data is not None,
            "is of trials on data of their own: predictions are about synthetic sequences",
        ),
        (others, f"is of highwater {', '.join(others)}: this is {__version__}, another engine"),
    )
    for is_refused, what in refusals:
        if is_refused:
            raise unfit(study, what)
    refuse_unknown_family(question.model)


def tells_nothing(study: Study) -> UsageError:
    """The error for a study that no prediction can learn from."""
    return unfit(study, "has no trial that says how much memory it used")


def unfit(
    study: Study, what: str, instead: str = "name a study that `highwater find` wrote on GPUs"
) -> UsageError:
    """The error for a study that no interval can be learned from. ``what``: the reason, a predicate
    after the file's name; ``instead``: another action for the hint.
    """
    hint = f"leave `--calibrate {shlex.quote(study.path or '')}` out, or {instead}"
    return UsageError(f"{study.path} {what}", hint=hint)

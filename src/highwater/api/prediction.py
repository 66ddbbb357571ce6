"""Predictions: what fits on GPUs, which need not be in this machine.

What only ``exact``, ``calibrate_with`` or ``constants`` needs is imported where it is used: a
prediction by formula starts without trials, journals and traces.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from highwater.errors import UsageError
from highwater.memory.capacity import FailedAllocation, Prediction, failed_allocation
from highwater.memory.formula.formula import refuse_unknown_family
from highwater.memory.formula.layers import Step
from highwater.memory.formula.rollout import rollout_of
from highwater.memory.interval.residuals import PredictionMethod
from highwater.memory.question import UNMEASURED, PredictionTask, memory_limit_of, prediction_of
from highwater.memory.trainers import MEMORY, calibration_of, predict_untraced, untimed
from highwater.model.model import load_model
from highwater.nouns.cells import simplicity
from highwater.nouns.events import EventLog
from highwater.nouns.hardware import kernels
from highwater.nouns.objective import RolloutRequest
from highwater.nouns.request import TOPICS, request_from
from highwater.nouns.study import Question
from highwater.nouns.trainer import OURS, REGISTRY, TRAINERS, TrainerName
from highwater.nouns.trial import TrialSpec
from highwater.recommendation.candidates import trainer_question, trainers_gpus
from highwater.trials.probe import gpus_meant
from highwater.units import parse_amount, parse_price, parse_tokens


def predict(
    model: str,
    *,
    gpus: str | int | None = None,
    length: int | str | None = None,
    trainer: TrainerName = OURS,
    gpu_memory: str | int | None = None,
    host_memory: str | int | None = None,
    reserved: str | int = 0,
    rollout_gpus: int = 0,
    tokens: int | str | None = None,
    price: float | str | None = None,
    tried_to_allocate: str | int | None = None,
    exact: bool = False,
    timeline: str | Path | None = None,
    calibrate_with: Sequence[str | Path] = (),
    constants: str | Path | None = None,
    on_trace: Callable[[TrialSpec], None] | None = None,
    on_calibrate: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> Prediction:
    """Predict the longest context that ``model`` trains with in each cell, a rung on a layout of
    the GPUs; with ``length`` which cells train it.

    A length fits if the upper end of its interval does. Intervals are learned from recorded trials;
    ``calibrate_with`` are studies whose trials are added: with ``exact`` only the most informative,
    each traced first. ``on_calibrate`` is called with the number of traces done and needed.

    ``constants`` is a file that ``highwater doctor --measure --json`` printed on such GPUs:
    context, cuBLAS and NCCL memory are read from it, instead of the figures of H200s.

    ``gpus`` names GPUs of any machine, ``"4xA100-80GB"``; default: this machine's. ``gpu_memory``
    is the memory of one GPU, for a kind that is not in the catalog; ``host_memory`` is the
    machine's, by default that of a usual machine with such GPUs; ``reserved`` is used by other
    processes on each GPU. ``rollout_gpus`` of the GPUs are for the rollout only; ``rollout="vllm"``
    predicts the memory of vLLM on these GPUs, or on the training's. With ``tokens``, ``"500M"``, or
    a ``price`` of one GPU for an hour, the answer has a ``cost``: default: a million tokens, the
    catalog's price. With ``tried_to_allocate``, from PyTorch's message, ``tried`` has the tensors
    of that size. ``settings`` are the fields of ``Request`` that name a trial, a grid of lengths or
    a rollout. Nothing is trained.

    A prediction by formula takes milliseconds, without torch. ``exact`` traces the engine's own
    steps on fake tensors, in processes with torch, at the lengths around each edge: half a minute
    to minutes a trace; traces are cached, and ``on_trace`` is called before each. ``timeline`` is a
    file to write for PyTorch's memory viewer: all allocations of the cell ``explained``. Raises
    HighwaterError for invalid settings.
    """
    refuse_unknown_family(load_model(model))
    _refuse_method(trainer, exact, timeline, calibrate_with, constants)
    where = trainers_gpus(gpus_meant(gpus, gpu_memory), rollout_gpus)
    if exact and trainer != OURS and (where.gpus > 1 or calibrate_with):
        raise UsageError(
            f"{TRAINERS[trainer].step} is traced on one GPU, and without `--calibrate`",
            hint="leave `--exact` out, or name one GPU and no study",
        )
    own_readings, residuals = None, ()
    if constants is not None:
        from highwater.recommendation.user_measurements import own_constants

        own_readings = own_constants(Path(constants), where)
    memory_limit = memory_limit_of(
        where, host_memory=host_memory, reserved=reserved, constants=own_readings
    )
    length_tokens = None if length is None else parse_tokens(str(length))
    said: tuple[str, ...] = ()
    if (own_file := settings.pop("trainer_config", None)) is not None:
        from highwater.trainers.user_file import settings_of

        is_asked = {row.name for row in TOPICS["lengths"]} & {*settings}
        held = 0 if is_asked else length_tokens
        read = settings_of(trainer, Path(own_file), gpus=where.gpus, typed=settings, length=held)
        settings, said = {**read.settings, **settings}, read.notes
        if length_tokens is None and not is_asked and read.length_tokens is not None:
            length_tokens = read.length_tokens
    of, is_file = (model, where), own_file is not None
    question, notes = trainer_question(*of, trainer, length_tokens, settings, is_file=is_file)
    if is_file and "allocator" not in settings:  # no file says the environment
        native = (e.changed(allocator="native") for e in question.cells if not e.settings.offload)
        question = question.replace(cells=tuple(dict.fromkeys((*native, *question.cells))))
    request = request_from({"model": model, **settings}, keywords=True)
    if request.rollout_request != RolloutRequest():
        traits = TRAINERS[trainer].rollout
        rollout = rollout_of(request, question, traits, rollout_gpus=rollout_gpus)
        memory_limit = memory_limit.replace(rollout=rollout)
    if exact and memory_limit.rollout is not None:
        raise UsageError("a rollout is predicted beside a formula", hint="leave `--exact` out")
    unmeasured = {*UNMEASURED.values()} & {*notes}
    if exact and (unmeasured or settings.get("attention") == "block_sparse"):
        what = "DeepSpeed" if unmeasured else "block-sparse attention"
        what = "paged moments" if question.cells[0].settings.paged else what
        raise UsageError(f"steps with {what} are not traced", hint="leave `--exact` out")
    method: PredictionMethod = "trace" if exact else "formula"
    if calibrate_with:
        from highwater.recommendation.user_measurements import own_residuals

        residuals, of_studies = own_residuals(
            calibrate_with,
            method,
            own_readings,
            trainer=trainer,
            on_calibrate=on_calibrate,
            on_trace=on_trace,
        )
        said += of_studies
    calibration = calibration_of(question, trainer, method=method, own=residuals)
    hour_price = parse_price(price)
    amount = None if tokens is None and hour_price is None else parse_amount(str(tokens or "1M"))
    if amount is not None and memory_limit.rollout is not None:
        problem = "what training costs beside a rollout: how long it generates is not predicted"
        raise UsageError(problem, hint="leave `--price` and `--tokens` out")
    every_note = (*said, *notes, *(() if amount is None else untimed(trainer)))
    task = PredictionTask(
        question=question,
        where=where,
        memory_limit=memory_limit,
        trainer=trainer,
        calibration=calibration,
        method=method,
        length_tokens=length_tokens,
        amount_tokens=amount,
        hour_dollars=hour_price,
        tried=_failed(tried_to_allocate, question, length_tokens),
        notes=tuple(dict.fromkeys(every_note)),
    )
    if not exact:
        return prediction_of(task, predict_untraced(question, memory_limit, trainer, calibration))
    return _traced(task, timeline, on_trace)


def _traced(
    task: PredictionTask,
    timeline: str | Path | None,
    on_trace: Callable[[TrialSpec], None] | None,
) -> Prediction:
    """Predict a task by traces of its step, and write the ``timeline`` of its explained cell."""
    from highwater.trials.traced import CachedTracer, predict_traced
    from highwater.trials.trial_process import cache_directory

    kernel = kernels(task.where.compute_capability)[0]
    traced = REGISTRY[task.trainer].trains_by or task.trainer
    with CachedTracer(
        cache_directory("traces"), kernel=kernel, trainer=traced, on_trace=on_trace
    ) as tracer:
        cells = predict_traced(
            task.question, task.memory_limit, tracer, task.calibration, task.trainer
        )
        prediction = prediction_of(task, cells)
        if timeline is not None:
            _write_timeline(Path(timeline), task.question, prediction, tracer)
    return prediction


def _failed(
    tried: str | int | None, question: Question, length_tokens: int | None
) -> FailedAllocation | None:
    """Tensors of a step that have the size ``tried``, for which PyTorch found no room; None if no
    size is named. Raises UsageError without a length.
    """
    if tried is None:
        return None
    if length_tokens is None:
        hint = "add the length of that step, for example `--length 32k`"
        raise UsageError("an allocation that failed, and no length", hint=hint)
    each = sorted(question.cells, key=simplicity)
    steps = [Step(question.model.shape, c.settings, c.layout, length_tokens) for c in each]
    return failed_allocation(str(tried), steps)


def _refuse_method(
    trainer: TrainerName,
    exact: bool,
    timeline: str | Path | None,
    calibrate_with: Sequence[str | Path],
    constants: str | Path | None,
) -> None:
    """Raise UsageError for ways to predict that a trainer's step does not have."""
    traits = TRAINERS[trainer]
    if exact and traits.traces != "made":
        raise UsageError(
            "what is traced are this engine's own steps, with its own optimizers",
            hint="leave `--exact` out, or `--trainer`",
        )
    if timeline is not None:
        if not exact:
            raise UsageError("a timeline is drawn from a trace", hint="add `--exact`")
        from highwater.store.directory import check_new_file

        check_new_file(Path(timeline), flag="--timeline", name="timeline.pickle")
    for is_refused, what in (
        (calibrate_with and MEMORY[trainer].learn is None, "trials of"),
        (constants is not None and traits.traces != "made", "constants as measured for"),
    ):
        if is_refused:
            raise UsageError(
                f"{what} this engine say nothing about {traits.step}", hint="leave `--trainer` out"
            )


def _write_timeline(
    path: Path, question: Question, prediction: Prediction, tracer: Callable[[TrialSpec], EventLog]
) -> None:
    from highwater.memory.trace.replay import timeline
    from highwater.store.directory import write_new_file

    shown = prediction.explained
    length_tokens = shown.capacity_tokens or shown.does_not_fit_tokens or question.grid.start_tokens
    log = tracer(question.trial(shown.cell, length_tokens))
    capacity = (
        prediction.memory_limit.device_bytes - question.margin_bytes - shown.footprint.outside_bytes
    )
    workspaces = prediction.memory_limit.cublas_workspaces_bytes
    allocator = shown.cell.settings.allocator
    drawn = timeline(log, allocator=allocator, capacity_bytes=capacity, workspaces_bytes=workspaces)
    write_new_file(path, drawn, flag="--timeline")

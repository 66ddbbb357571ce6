"""Tried settings: the cells that a search tries if the user names none: for each number of GPUs
those predicted simplest and longest (docs/decisions/003); and the memory law of a dry run.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress

from highwater.errors import HighwaterError, ModelError
from highwater.memory.capacity import CellPrediction, MemoryLimit, Prediction
from highwater.memory.formula.formula import refuse_unknown_family
from highwater.memory.question import (
    PredictionTask,
    memory_limit_of,
    predicted_question,
    prediction_of,
)
from highwater.memory.trainers import calibration_of, predict_untraced
from highwater.model.model import load_model
from highwater.nouns.cluster import Cluster, cluster
from highwater.nouns.declaration import words_of
from highwater.nouns.hardware import Machine
from highwater.nouns.plan import Plan, plan
from highwater.nouns.request import Request, taken_by
from highwater.nouns.study import Cell, Question, default_headroom_bytes
from highwater.nouns.trainer import OURS
from highwater.nouns.trial_hardware import hardware_of
from highwater.trials.simulated import LikelyPrediction, UpperFormula

_DEGREES = ("ulysses", "ring", "copies")
"""Settings of which several may be named: each is tried."""


def searched(request: Request, machine: Machine, study: tuple[Cell, ...] = ()) -> Plan:
    """Plan of a search: the simplest and the longest settings among those that the request leaves
    open, for each Ulysses degree if it names several, and a note on the others; the whole grid if
    it leaves none open; or the cells of a ``study``, if they are among those.
    """
    device = request.device or ("cuda" if machine.gpus else "cpu")
    open_to_it = (request.allocator, request.loss, request.offload, request.activations)
    # all that a search chooses itself is named, as the published one does
    names_grid = None not in (*open_to_it, request.ulysses)
    if device == "cpu" or request.trainer != OURS or names_grid or request.nodes > 1:
        return plan(request, machine)
    predictions: list[Prediction] = []
    with suppress(HighwaterError):  # what cannot be predicted may train all the same
        model = load_model(request.model)
        refuse_unknown_family(model)
        counts = hardware_of(request, machine, model, device).counts
        predictions = [each for gpus in counts for each in _predicted(request, machine, gpus)]
    every = {cell.cell: cell.cell.layout.gpus for each in predictions for cell in each.cells}
    if every.keys() >= set(study) and {*every.values()} == {cell.layout.gpus for cell in study}:
        return plan(request, machine, cells=study)
    ends = [cell for each in predictions for cell in (each.simplest.cell, each.explained.cell)]
    chosen = tuple(dict.fromkeys(ends))
    planned = plan(request, machine, cells=chosen)
    left = [cell for cell in every if cell not in chosen]
    return planned.replace(notes=(*planned.notes, *_others(request, left)))


def _predicted(request: Request, machine: Machine, gpus: int) -> Iterator[Prediction]:
    """Predictions of all settings on ``gpus`` of these GPUs, one for each named degree."""
    where, limit = _memory(machine, gpus, request.memory_bytes, request.host_memory_bytes)
    usual = Request(model=request.model)
    every = {row.name: getattr(request, row.name) for row in taken_by("predict")}
    named = {name: value for name, value in every.items() if value != getattr(usual, name)}
    question, _ = predicted_question(request.model, where, OURS, None, named)
    known = calibration_of(question, OURS)
    groups: dict[tuple[int, ...], list[CellPrediction]] = {}
    for each in predict_untraced(question, limit, OURS, known):
        degrees = each.cell.layout.degree_settings
        several = (degrees.get(name, 1) for name in _DEGREES if len(named.get(name, ())) > 1)
        groups.setdefault(tuple(several), []).append(each)
    for group in groups.values():
        task = PredictionTask(
            question=question.replace(cells=tuple(each.cell for each in group)),
            where=where,
            memory_limit=limit,
            trainer=OURS,
            calibration=known,
        )
        yield prediction_of(task, tuple(group))


def _memory(
    machine: Machine, gpus: int, memory_bytes: int | None, host_bytes: int | None
) -> tuple[Cluster, MemoryLimit]:
    """Return ``gpus`` GPUs of the machine, or of a dry run's memory, and what each GPU may use."""
    here = machine.replace(gpus=machine.gpus[:gpus])
    named_bytes = None if machine.gpus else memory_bytes
    where = cluster(str(gpus), gpu_memory_bytes=named_bytes, machine=here)
    reserved_bytes = max(0, where.device_bytes - (memory_bytes or where.device_bytes))
    return where, memory_limit_of(where, host_memory=host_bytes, reserved=reserved_bytes)


def _others(request: Request, left: Sequence[Cell]) -> Iterator[str]:
    """A note on how many predicted settings are not tried, and the flags that would try them."""
    if not left:
        return
    degrees = sorted({cell.layout.ulysses_degree for cell in left})
    is_open = len(degrees) > 1 and request.ulysses is None
    named = f"`{' '.join(words_of({'ulysses': degrees}))}` or " if is_open else ""
    yield f"{len(left)} other settings are not tried: {named}`--help=trial`"


def dry_run_law(question: Question, machine: Machine, *, is_roomy: bool) -> UpperFormula:
    """Return the law that gives the bytes of a dry run's trials: the prediction for trials on GPUs,
    else the closed form. ``is_roomy``: no headroom was named, so that the default one is kept.
    """
    by_formula = UpperFormula(shape=question.model.shape)
    if question.device != "cuda" or question.foreign is not None:
        return by_formula
    with suppress(ModelError):
        refuse_unknown_family(question.model)
        gpus = max(cell.layout.gpus for cell in question.cells)
        memory_bytes, host_bytes = question.memory_budget_bytes, question.host_memory_bytes
        where, limit = _memory(machine, gpus, memory_bytes, host_bytes)
        if is_roomy:
            kept_bytes = default_headroom_bytes(where.device_bytes)
            question = question.replace(margin_bytes=kept_bytes)
        known = calibration_of(question, OURS)
        cells = predict_untraced(question, limit, OURS, known, extent="fit")
        is_tight = not any(cell.capacity_tokens for cell in cells)
        return LikelyPrediction(
            shape=by_formula.shape, question=question, limit=limit, known=known, is_tight=is_tight
        )
    return by_formula

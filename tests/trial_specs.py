"""Trials, questions of one cell, their answers, and trainings, which a test describes by what is
special of them; and a simulated runner whose trials take time.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from highwater.model.model import load_model
from highwater.nouns.corpus import Corpus
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell, CellAnswer, Grid, Question, RecordedTrial, Study
from highwater.nouns.training import Schedule, TrainingSpec
from highwater.nouns.trial import (
    MemoryBudget,
    Outcome,
    RankMemory,
    RankReport,
    Runner,
    TrialResult,
    TrialSpec,
)
from highwater.search.cell_outcomes import CellAnswered, SearchEvent, TrialFinished
from highwater.search.scheduler import search_cells
from highwater.trials.simulated import Law, SimulatedRunner
from highwater.units import GIB


def trial_of(model: str | Path, **fields: Any) -> TrialSpec:
    """A trial of a model on one GPU; ``fields`` are its own, or of its layout or settings."""
    known = load_model(str(model))
    named = {"model_name": known.name, "config_digest": known.config_digest}
    return _trial({**named, "model_directory": known.directory, "device": "cuda"}, fields)


def trial_in(folder: str | Path, **fields: Any) -> TrialSpec:
    """A trial on the CPU of a folder's model, which is not read."""
    named = {"model_name": "model", "model_directory": str(folder), "config_digest": ""}
    usual = {"device": "cpu", "memory_budget_bytes": GIB, "length_tokens": 64}
    return _trial({**named, **usual}, fields)


def _trial(usual: Mapping[str, Any], fields: Mapping[str, Any]) -> TrialSpec:
    own = {name: fields[name] for name in fields if name in TrialSpec.__struct_fields__}
    degrees = {name: fields[name] for name in fields if name in Layout.__struct_fields__}
    settings = Settings(
        **{name: fields[name] for name in fields.keys() - own.keys() - degrees.keys()}
    )
    layout = own.pop("layout", degrees)
    if not isinstance(layout, Layout):
        layout = Layout(**layout)
    usual = {"length_tokens": 4096, **usual, "layout": layout, "settings": settings}
    return TrialSpec(**{**usual, **own})


def grid_of(step: int, most: int, *, native: int | None = None, beyond: int | None = None) -> Grid:
    """Lengths up to ``most``, each ``step`` tokens longer, past the native length ``beyond``."""
    return Grid(
        start_tokens=step,
        step_tokens=step,
        native_length_tokens=native or step,
        beyond_step_tokens=beyond or step,
        max_tokens=most,
    )


def question_on(grid: Grid, *cells: Cell, model: str = "Qwen3-0.6B", **changes: Any) -> Question:
    """About a GPU that nobody has read, and one cell unless others are named."""
    fields = {
        "model": load_model(model),
        "device": "cuda",
        "device_name": "simulated GPU",
        "device_total_bytes": None,
        "memory_budget_bytes": None,
        "cells": cells or (Cell(layout=Layout(), settings=Settings()),),
        "grid": grid,
    }
    return Question(**(fields | changes))


def answer_of(cell: Cell, fits: int | None, fails: int | None, **fields: Any) -> CellAnswer:
    """An answer that memory ended, of the longest length that fits and the next one, which does
    not, unless ``fields`` say otherwise.
    """
    usual = {"limit": "memory", "reason": "memory ran out", "trials": 2}
    return CellAnswer(cell=cell, capacity_tokens=fits, does_not_fit_tokens=fails, **usual | fields)


def answers_among(events: Iterable[SearchEvent]) -> list[CellAnswer]:
    return [event.answer for event in events if isinstance(event, CellAnswered)]


def trial_among(event: TrialFinished) -> RecordedTrial:
    return RecordedTrial(
        spec=event.spec, attempt=event.attempt, repeat=event.repeat, result=event.result
    )


def study_found(question: Question, runner: Runner) -> Study:
    """The study of a search that nobody interrupts."""
    events = list(search_cells(question, runner))
    trials = tuple(trial_among(event) for event in events if isinstance(event, TrialFinished))
    return Study(question=question, trials=trials, answers=tuple(answers_among(events)))


def training_of(trial: TrialSpec, **fields: Any) -> TrainingSpec:
    """A training as this trial, on a small corpus."""
    steps = fields.get("steps", 4)
    usual = {
        "corpus": corpus_of(length_tokens=trial.length_tokens),
        "steps": steps,
        "micro_batches": trial.micro_batches,
        "schedule": Schedule(steps=steps),
        "output_directory": "/run",
        "model_directory": "/run/model",
    }
    return TrainingSpec(trial=trial, **usual | fields)


def corpus_of(**fields: Any) -> Corpus:
    """One document that fills a length and is trained but for its first token."""
    length = fields.get("length_tokens", 64)
    usual = {
        "directory": "/corpus",
        "digest": "0",
        "objective": "sft",
        "length_tokens": length,
        "documents": 1,
        "units": 1,
        "tokens": length,
        "trained_tokens": length - 1,
        "longest_tokens": length,
    }
    return Corpus(**usual | fields)


def rank_that_used(used_bytes: int | None, of_bytes: int = 80 * GIB, **fields: Any) -> RankReport:
    """What rank 0 says of a GPU that it used so much of, all of its budget being the
    allocator's.
    """
    budget = MemoryBudget.split(of_bytes)
    memory = RankMemory(
        peak_reserved_bytes=used_bytes, device_used_bytes=used_bytes, device_total_bytes=80 * GIB
    )
    return RankReport(**{"rank": 0, "memory": memory, "budget": budget, **fields})


def fits_up_to(tokens: int) -> Law:
    return lambda spec: Outcome.FIT if spec.length_tokens <= tokens else Outcome.OUT_OF_MEMORY


TimeLaw = Callable[[TrialSpec], float]
"""Seconds of one optimizer step of a trial that fits."""


class TimedRunner(SimulatedRunner):
    """A simulated runner whose trials that fit take so long, or longer than they may."""

    def __init__(self, law: Law, *, step_time: TimeLaw, timeout_s: float | None = None) -> None:
        super().__init__(law)
        self._step_time = step_time
        self._timeout_s = timeout_s

    def run(self, spec: TrialSpec, *, attempt: int = 1, repeat: int = 0) -> TrialResult:
        result = super().run(spec, attempt=attempt, repeat=repeat)
        if not result.outcome.is_fit:
            return result
        step_s = self._step_time(spec)
        wall_s = spec.steps * step_s
        if self._timeout_s is not None and wall_s > self._timeout_s:
            return TrialResult(
                outcome=Outcome.TIMEOUT,
                reason="simulated: not done in time",
                attempt=attempt,
                wall_s=self._timeout_s,
                simulated=True,
            )
        if spec.is_memory_only:
            return msgspec.structs.replace(result, wall_s=wall_s)
        ranks = result.ranks or tuple(RankReport(rank=rank) for rank in range(spec.layout.gpus))
        times_s = (step_s,) * spec.steps
        timed = tuple(msgspec.structs.replace(rank, step_times_s=times_s) for rank in ranks)
        return msgspec.structs.replace(result, ranks=timed, wall_s=wall_s)

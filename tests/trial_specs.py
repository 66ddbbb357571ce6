"""Trials, and questions of one cell, that a test describes by what is special of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from highwater.model.model import load_model
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell, Grid, Question
from highwater.nouns.trial import Outcome, TrialSpec
from highwater.trials.simulated import Law
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


def fits_up_to(tokens: int) -> Law:
    return lambda spec: Outcome.FIT if spec.length_tokens <= tokens else Outcome.OUT_OF_MEMORY

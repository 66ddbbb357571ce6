"""The picture of the README: how long a sequence each rung trains on H200s, measured, beside what a
trace predicted.
"""

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from templates import environment

from highwater import open_study
from highwater.memory.capacity import Prediction
from highwater.nouns.capacities import Capacity, study_capacities
from highwater.nouns.cells import simplicity
from highwater.nouns.codec import from_json
from highwater.nouns.study import counted_ranks
from highwater.units import format_bytes, format_tokens

HERE = Path(__file__).parent
FOUND = HERE / "results" / "find"
TIMED = HERE / "results" / "speed"
DEVICE = "H200-141GB with 79.15 GiB"
PANELS = (("Qwen3-0.6B", 1), ("Qwen3-1.7B", 1), ("Qwen3-4B", 1), ("Qwen3-8B", 2))
"""Model and number of GPUs, row by row, two in each."""
HUGGING_FACE = {"Qwen3-0.6B": "step-0.6b.json", "Qwen3-1.7B": "step-1.7b.json"}
"""Its longest length is the longest that was timed in a process of its own: it fills the whole
card."""

PANEL_WIDTH, LABEL_WIDTH, BAR_WIDTH, ROW_HEIGHT = 490, 276, 140, 24
LONGEST_TOKENS = 5 * 131_072
"""Of the axis; what is longer goes on beyond it."""


class Bar(NamedTuple):
    """One rung of one model."""

    label: str
    full_tokens: int
    """Trained in full."""
    most_tokens: int
    """Known to fit, if by memory alone."""
    predicted_tokens: int | None
    is_ours: bool


class Panel(NamedTuple):
    """One model on one number of GPUs."""

    heading: str
    note: str
    bars: tuple[Bar, ...]
    x: int
    y: int


def picture() -> str:
    """The whole SVG. Everything drawn is read from the recorded trials, their predictions and the
    benchmark's files.
    """
    templates = environment()
    templates.filters |= {"width": _width, "tokens": format_tokens}
    panels = tuple(_panels())
    return templates.get_template("capacities.svg.j2").render(
        panels=panels,
        label_width=LABEL_WIDTH,
        row_height=ROW_HEIGHT,
        height=max(panel.y + len(panel.bars) * ROW_HEIGHT for panel in panels),
        ticks=[
            (_width(tokens), f"{tokens // 1024}k" if tokens else "0")
            for tokens in range(0, LONGEST_TOKENS + 1, 131_072)
        ],
        longest_in_full=format_tokens(
            max(bar.full_tokens for panel in panels for bar in panel.bars)
        ),
        whole_card=format_bytes(_benchmark("Qwen3-0.6B")["environment"]["gpu_total_bytes"]),
        description=". ".join(_in_words(panel) for panel in panels),
    )


def _panels() -> Iterator[Panel]:
    capacities = [
        each
        for path in sorted(FOUND.glob("*.jsonl"))
        for each in study_capacities(open_study(path))
    ]
    predicted = dict(_predicted())
    y = 96
    for row in (PANELS[:2], PANELS[2:]):
        made = []
        for column, (model, gpus) in enumerate(row):
            own = [
                each
                for each in capacities
                if (each.model_name, each.cell.layout.gpus, each.device_name)
                == (model, gpus, DEVICE)
                and each.cell.settings.objective == "sft"
            ]
            bars = (*_hugging_face(model), *_bars(own, predicted))
            made.append(
                Panel(model, counted_ranks(gpus, "cuda"), bars, 20 + column * PANEL_WIDTH, y)
            )
        yield from made
        y += max(len(panel.bars) for panel in made) * ROW_HEIGHT + 50


def _bars(capacities: list[Capacity], predicted: dict[tuple[str, str], int]) -> Iterator[Bar]:
    """A bar for each cell, the simplest first; of several files the longest counts."""
    in_order = sorted(capacities, key=lambda each: (simplicity(each.cell), each.cell.words))
    for label, group in groupby(in_order, key=lambda each: each.cell.words):
        own = list(group)
        full = max(each.capacity_tokens for each in own if not each.is_memory_only)
        most = max(each.capacity_tokens for each in own)
        yield Bar(label, full, most, predicted.get((own[0].model_name, label)), True)


def _hugging_face(model: str) -> Iterator[Bar]:
    if model in HUGGING_FACE:
        tokens = max(row["length_tokens"] for row in _benchmark(model)["rows"])
        yield Bar("Hugging Face ¹", tokens, tokens, None, False)


def _benchmark(model: str) -> dict[str, Any]:
    return json.loads((TIMED / HUGGING_FACE[model]).read_text())


def _predicted() -> Iterator[tuple[tuple[str, str], int]]:
    """What was predicted of each cell before its search; the search of a study has its name."""
    for path in sorted(FOUND.glob("*.prediction.json")):
        study = path.with_name(path.name.replace(".prediction.json", ".jsonl"))
        if not study.is_file() or open_study(study).question.memory_budget_bytes is None:
            continue
        prediction = from_json(path.read_bytes(), Prediction)
        for each in prediction.cells:
            if each.cell.settings.objective == "sft":
                yield (prediction.model_name, each.cell.words), each.capacity_tokens


def _width(tokens: int) -> float:
    return round(tokens / LONGEST_TOKENS * BAR_WIDTH, 1)


def _in_words(panel: Panel) -> str:
    return f"{panel.heading}, {panel.note}: " + ", ".join(
        f"{bar.label} {format_tokens(bar.most_tokens)}" for bar in panel.bars
    )

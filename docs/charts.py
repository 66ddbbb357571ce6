"""The pictures of docs/results: bars, drawn from the raw JSON and tables that lie beside them."""

import csv
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from templates import environment

from highwater.nouns.study import usual_grid

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PUBLISHED = HERE.parent / "tests" / "data"
ROW_HEIGHT, LABEL_WIDTH, BAR_WIDTH, TOP = 24, 385, 340, 78
LEGEND_WIDTH = 250
GRID = usual_grid(40960)
FEW_FAMILIES = 3
"""Reasons that fewer families have are one bar."""


class Row(NamedTuple):
    """One bar, made of parts."""

    label: str
    parts: tuple[tuple[str, float], ...]
    """Style and length of each, in the chart's unit."""
    figure: str


class Group(NamedTuple):
    """Bars below one heading."""

    heading: str
    rows: tuple[Row, ...]


class Chart(NamedTuple):
    """One picture."""

    title: str
    groups: tuple[Group, ...]
    legend: tuple[tuple[str, str], ...] = ()
    """Styles, and what they mean."""
    unit: str = ""
    notes: tuple[str, ...] = ()
    mark: float | None = None
    """Where a line stands that bars are compared with."""


def pictures() -> dict[str, str]:
    """Every picture by its path below docs/."""
    charts = {
        "results/speed/speed.svg": speed(),
        "results/predict/errors.svg": errors(),
        "results/h20/agreement.svg": agreement(),
        "results/layer/layer.svg": layer(),
        "results/families/families.svg": families(),
    }
    return {path: drawn(chart) for path, chart in charts.items()}


def speed() -> Chart:
    """Tokens/s as ratios over Hugging Face, with and without Liger's kernels."""

    def rows(*names: str, without: str = "") -> Iterator[Row]:
        for name in names:
            record = _read(f"speed/{name}.json")
            for each in record["rows"]:
                for contender, ratio in each["speed_ratio"].items():
                    if contender not in (each["speed_over"], without):
                        words = "attention kept" if contender == "attention-kept" else contender
                        yield Row(
                            f"{record['model']}, {each['length_tokens']:,} tokens, {words}",
                            (("full", ratio),),
                            f"{ratio:.2f}",
                        )

    liger = ("liger-0.6b-32768", "liger-0.6b-131072", "liger-1.7b-32768", "liger-1.7b-131072")
    return Chart(
        title="Tokens/s of this engine, over Hugging Face's",
        groups=(
            Group(
                "over plain Hugging Face", tuple(rows("step-0.6b", "step-1.7b", without="chunked"))
            ),
            Group("over Hugging Face with Liger's kernels", tuple(rows(*liger))),
        ),
        unit="measured in turns on one H200; the line is 1.0",
        mark=1.0,
    )


def errors() -> Chart:
    """How far off each way to predict is, of the reserved memory of trials that were held out."""
    rows = [
        row
        for row in _read("predict/traced.json").values()
        if row["held_out"] and row["measured"]["fits"] and row["traced"]["fits"]
    ]

    def off(by: str) -> list[float]:
        return [_off(row[by], row["measured"], "peak_reserved_bytes") for row in rows]

    trackers = [
        _off(answers[0], each["measured"], "peak_allocated_bytes", "peak_reserved_bytes")
        for each in _read("lab/peers.json")["trackers"].values()
        if (answers := [found for found in each["answers"].values() if "error" not in found])
    ]
    return Chart(
        title="How far off predicted memory was, without a GPU",
        groups=(
            Group(
                f"of {len(rows)} trials that were predicted before they ran",
                (
                    _spread("by trace, as first compared", off("judged")),
                    _spread("by trace, since mended by what they showed", off("traced")),
                    _spread("by formula, as first compared", off("formula_judged")),
                    _spread("by formula, since mended", off("formula")),
                ),
            ),
            Group(
                f"of {len(trackers)} of all trials",
                (_spread("PyTorch's own memory trackers", trackers),),
            ),
        ),
        legend=(("full", "half of the trials are no further off"), ("memory", "95 % of them")),
        notes=(
            "Off by, as a share of the measured peak of reserved memory. "
            "The trackers tell allocated bytes only.",
        ),
    )


def agreement() -> Chart:
    """Cells of the published tables that are predicted exactly, and within a step of the grid."""
    words = {
        "vanilla": "nothing set",
        "env": "expandable",
        "env+offload": "expandable, states on host",
        "env+offload+never": "expandable, states on host, no model saved",
    }

    def rows(published: Path, predicted: Path) -> Iterator[Row]:
        known, ours = _cells(published), _cells(predicted)
        for name, said in words.items():
            offs = [
                abs(GRID.index_at_most(int(ours[cell])) - GRID.index_at_most(int(tokens)))
                for cell, tokens in known.items()
                if cell[0] == name and tokens
            ]
            if offs:
                exact, near = offs.count(0), offs.count(1)
                parts = (
                    ("full", exact),
                    ("memory", near),
                    ("other", len(offs) - exact - near),
                )
                yield Row(said, parts, f"{exact}, {exact + near} of {len(offs)}")

    here = RESULTS / "h20"
    return Chart(
        title="Trinity-RFT's published capacities, as they were predicted",
        groups=(
            Group(
                "H20-96GB: tables that nobody here had seen",
                tuple(
                    rows(here / "published_capacity_h20_96gb.csv", here / "predicted_h20_96gb.csv")
                ),
            ),
            Group(
                "A100-80GB: the table that constants were fitted to",
                tuple(
                    rows(
                        PUBLISHED / "published_capacity_a100_80gb.csv",
                        here / "predicted_a100_80gb.csv",
                    )
                ),
            ),
        ),
        legend=(
            ("full", "exact"),
            ("memory", "one step of the grid off"),
            ("other", "further off"),
        ),
        notes=("Figures: cells that are exact, and cells within one step of the grid.",),
    )


def layer() -> Chart:
    """What a token costs in the backward pass of one layer."""
    files = (
        ("qwen3-0.6b-before", "Qwen3-0.6B, family's own layers", "other"),
        ("qwen3-0.6b", "Qwen3-0.6B", "full"),
        ("qwen3-1.7b", "Qwen3-1.7B", "full"),
        ("qwen3-4b", "Qwen3-4B", "full"),
        ("qwen3-30b-a3b", "Qwen3-30B-A3B, experts (in no tiles yet)", "full"),
    )
    return Chart(
        title="What a token costs in the backward pass of one layer",
        groups=(
            Group(
                "",
                tuple(
                    Row(label, ((style, kilobytes),), f"{kilobytes:.1f} KB")
                    for name, label, style in files
                    for kilobytes in (_read(f"layer/{name}.json")["layer_bytes_per_token"] / 1e3,)
                ),
            ),
        ),
        unit="tensors alive at the peak, counted on a CPU",
    )


def families() -> Chart:
    """How many families of transformers train, and why the others are refused."""
    sweep = _read("families/sweep.json")
    reasons = Counter(
        refused["why"].partition(": ")[0].partition(", ")[0].partition(" (")[0]
        for refused in sweep["refused"].values()
    )
    many = [(why, count) for why, count in reasons.most_common() if count >= FEW_FAMILIES]
    others = len(sweep["refused"]) - sum(count for _, count in many)
    return Chart(
        title="Causal families of transformers: trained, or refused by name",
        groups=(
            Group(
                "trained, equal to the family's own class",
                (
                    Row(
                        "equal in every layout",
                        (("full", len(sweep["trained"])),),
                        str(len(sweep["trained"])),
                    ),
                ),
            ),
            Group(
                f"refused: {len(sweep['refused'])}",
                tuple(
                    Row(why, (("other", count),), str(count))
                    for why, count in (*many, ("something else", others))
                ),
            ),
        ),
        unit="families",
    )


def drawn(chart: Chart) -> str:
    """The SVG of a chart."""
    longest = max(_total(row.parts) for group in chart.groups for row in group.rows)
    scale = BAR_WIDTH / longest

    def placed(parts: Iterable[tuple[str, float]]) -> Iterator[tuple[str, float, float]]:
        at = 0.0
        for kind, length in parts:
            if length:
                yield kind, round(at * scale, 1), round(length * scale, 1)
            at += length

    y, groups = TOP, []
    for group in chart.groups:
        y += 22 if group.heading else 0
        groups.append((group, y))
        y += len(group.rows) * ROW_HEIGHT + 18
    templates = environment()
    templates.filters |= {
        "placed": placed,
        "total": lambda parts: round(_total(parts) * scale, 1),
    }
    return templates.get_template("bars.svg.j2").render(
        chart=chart,
        groups=groups,
        legend=[(*each, 20 + LEGEND_WIDTH * at) for at, each in enumerate(chart.legend)],
        label_width=LABEL_WIDTH,
        row_height=ROW_HEIGHT,
        mark=None if chart.mark is None else round(chart.mark * scale, 1),
        height=y + 17 * len(chart.notes),
        description=". ".join(map(_in_words, chart.groups)),
    )


def _read(path: str) -> Any:
    return json.loads((RESULTS / path).read_text(encoding="utf-8"))


def _cells(path: Path) -> dict[tuple[str, ...], str]:
    """Capacities in a table, as they stand there, by settings, GPUs, SP and model."""
    with path.open(encoding="utf-8", newline="") as file:
        return {
            tuple(row[name] for name in ("settings", "gpus", "sp", "model")): row["max_model_len"]
            for row in csv.DictReader(file)
        }


def _off(ours: dict[str, Any], known: dict[str, Any], peak: str, of: str | None = None) -> float:
    """Absolute, as a share of what was measured, in percent."""
    return 100 * abs(ours[peak] / known[of or peak] - 1)


def _spread(label: str, off: list[float]) -> Row:
    """The middle one, and how far it is from there to the 95th percentile."""
    middle = statistics.median(off)
    most = sorted(off)[min(len(off) - 1, int(0.95 * len(off)))]
    return Row(
        label, (("full", middle), ("memory", most - middle)), f"{middle:.2f} %, {most:.2f} %"
    )


def _total(parts: Iterable[tuple[str, float]]) -> float:
    return sum(length for _, length in parts)


def _in_words(group: Group) -> str:
    heading = f"{group.heading}: " if group.heading else ""
    return heading + "; ".join(f"{row.label} {row.figure}" for row in group.rows)

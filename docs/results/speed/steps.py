"""Step times that were recorded, and which of them the model of speed was fitted to.

``python docs/results/speed/steps.py`` prints the trials by split. The split is by model and number
of GPUs, and was written down before anything was fitted: Qwen3-0.6B on any number of GPUs and 4B on
one or two are there to fit, 1.7B, 8B and what came later are held out. Apart are trials with
offload, which ran beside others on their host or alone on theirs, and those of an engine before
norm and rotation were one kernel. All are of H200s but those alone, of an H100.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import msgspec

import highwater
from highwater.nouns.layout import Layout
from highwater.nouns.objective import LoraBase
from highwater.nouns.settings import Recompute, Settings
from highwater.nouns.trial import Outcome, TrialResult

RESULTS = Path(__file__).parents[1]
Split = Literal["fitted", "held out", "offload alone", "beside others", "older engine"]
FITTED = (("Qwen3-0.6B", 1), ("Qwen3-0.6B", 2), ("Qwen3-0.6B", 4), ("Qwen3-4B", 1), ("Qwen3-4B", 2))
ALONE, H100 = "offload_alone", "NVIDIA H100 80GB HBM3"
"""Trials with offload beside which nothing else ran on their machine."""
OLDER = "qwen3-"
"""How studies of that engine begin (docs/results/lab/searches.md, the first table)."""


class TimedStep(NamedTuple):
    """One trial whose steps were timed."""

    source: str
    model_name: str
    settings: Settings
    layout: Layout
    length_tokens: int
    micro_batches: int
    seconds: float
    split: Split
    device_name: str = "NVIDIA H200"


def steps() -> Iterator[TimedStep]:
    """Every full trial that is on record, its last step."""
    for path in sorted((RESULTS / "find").glob("*.jsonl")):
        for trial in highwater.open_study(path).trials:
            spec = trial.spec
            if trial.result is None or not _is_timed(trial.result):
                continue
            how = (spec.model_name, spec.settings, spec.layout, spec.length_tokens)
            yield _step(path.stem, *how, spec.micro_batches, _seconds(trial.result))
    for row in (*_rows("speeds"), *_rows(ALONE)):
        if row["outcome"] == "FIT":
            settings = Settings(
                loss="chunked",
                allocator="expandable",
                offload=row["offload"],
                recompute=row["recompute"],
            )
            layout = Layout(gpus=row["gpus"], ulysses_degree=row["ulysses_degree"])
            how = (row["model"], settings, layout, row["length_tokens"])
            source = ALONE if row["device_name"] == H100 else "speeds"
            yield _step(source, *how, 2, row["step_time_s"])
    for trial in json.loads((RESULTS / "lora" / "cells" / "trials.json").read_text()):
        result, spec = msgspec.convert(trial["result"], TrialResult), trial["spec"]
        if _is_timed(result):
            settings = msgspec.convert(spec["settings"], Settings)
            layout = msgspec.convert(spec["layout"], Layout)
            how = (spec["model_name"], settings, layout, spec["length_tokens"])
            yield _step("lora", *how, spec["micro_batches"], _seconds(result))
    bases: tuple[LoraBase, ...] = ("bf16", "nf4")
    kept: tuple[tuple[str, Recompute], ...] = (
        ("chunked", "layer"),
        ("attention-kept", "all-but-attention"),
    )
    for base in bases:
        name = "step_32k.json" if base == "bf16" else "step_32k_nf4.json"
        (row,) = json.loads((RESULTS / "lora" / name).read_text())["rows"]
        for contender, recompute in kept:
            settings = Settings(
                loss="chunked",
                allocator="expandable",
                recompute=recompute,
                lora=32,
                lora_base=base,
                accumulates=False,
            )
            how = ("Llama-3.1-8B", settings, Layout(), row["length_tokens"])
            yield _step("lora", *how, 1, median(row["step_times_s"][contender]))


def _rows(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / "speed" / f"{name}.json").read_text())


def _is_timed(result: TrialResult) -> bool:
    return result.outcome is Outcome.FIT and bool(result.ranks[0].step_times_s)


def _seconds(result: TrialResult) -> float:
    return max(rank.step_times_s[-1] for rank in result.ranks)


def _step(
    source: str,
    model_name: str,
    settings: Settings,
    layout: Layout,
    length_tokens: int,
    micro_batches: int,
    seconds: float,
) -> TimedStep:
    split: Split = "held out"
    if source.startswith(OLDER):
        split = "older engine"
    elif source == ALONE:
        split = "offload alone"
    elif settings.offload:
        split = "beside others"
    elif source != "lora" and (model_name, layout.gpus) in FITTED:
        split = "fitted"
    device_name = H100 if source == ALONE else "NVIDIA H200"
    return TimedStep(
        source,
        model_name,
        settings,
        layout,
        length_tokens,
        micro_batches,
        seconds,
        split,
        device_name,
    )


def main() -> None:
    """Print how many trials each split has, and those that are held out."""
    every = list(steps())
    print(dict(Counter(step.split for step in every)))
    for step in every:
        if step.split == "held out":
            print(
                f"{step.source} {step.model_name} {step.settings.label} {step.layout.gpus} GPUs "
                f"{step.length_tokens:,} {step.seconds:.2f} s"
            )


if __name__ == "__main__":
    main()

"""Eight cells of one GPU each, searched one after another and side by side on the GPUs of this
machine: the same answers, and the time that each way took.

    python docs/results/concurrent/eight_cells.py --json docs/results/concurrent/eight_cells.json
    python docs/results/concurrent/eight_cells.py --table

The cells differ in how the loss, the MLP and the recomputation are done. Each search is a study of
its own, with a journal; both have fresh processes for every trial.
"""

import argparse
import itertools
import json
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from highwater.nouns.codec import to_builtins
from highwater.nouns.plan import plan
from highwater.nouns.request import request_from
from highwater.nouns.settings import Settings, short_settings
from highwater.nouns.study import Cell, Question
from highwater.search.scheduler import recorded_search
from highwater.store.journal import open_journal, read_study
from highwater.trials.engine_trial import EngineLauncher
from highwater.trials.local import LocalRunner
from highwater.trials.probe import environment, probe

MODEL = "Qwen3-0.6B"
FOUND = Path(__file__).with_suffix(".json")
TIMEOUT_S = 120.0


def question(memory: str, resolution: str) -> Question:
    """Eight cells of one GPU, held to so much memory that a trial takes seconds."""
    named = {"model": MODEL, "gpus": [1], "memory": memory, "resolution": resolution}
    asked = plan(request_from({**named, "proof": "full"}, keywords=True), probe()).question
    (layout,) = {cell.layout for cell in asked.cells}
    ways = itertools.product(("full", "chunked"), (1, 4), ("layer", "none"))
    cells = tuple(
        Cell(
            layout=layout,
            settings=Settings(
                allocator="expandable", loss=loss, mlp_tiles=tiles, recompute=recompute
            ),
        )
        for loss, tiles, recompute in ways
    )
    return msgspec.structs.replace(asked, cells=cells)


def searched(asked: Question, folder: Path, most_trials: int | None) -> dict[str, Any]:
    """One whole search, so many trials at a time at most."""
    launcher = EngineLauncher(log_directory=folder / "logs", timeout_s=TIMEOUT_S)
    runner = LocalRunner(launcher, most_trials=most_trials)
    path, began = folder / "study.jsonl", time.monotonic()
    with open_journal(path, asked) as journal, closing(runner):
        for event in recorded_search(asked, runner, journal):
            print(f"{time.monotonic() - began:6.1f} s {type(event).__name__}", flush=True)
    took_s, study = time.monotonic() - began, read_study(path)
    return {
        "most_trials": most_trials,
        "took_s": round(took_s, 1),
        "trials": [
            {
                "settings": short_settings(trial.spec.settings),
                "length_tokens": trial.spec.length_tokens,
                "outcome": trial.result.outcome.value,
                "wall_s": round(trial.result.wall_s, 1),
                "peak_reserved_bytes": trial.result.peak_reserved_bytes,
                "tokens_per_s": trial.result.tokens_per_s,
            }
            for trial in study.trials
            if trial.result is not None
        ],
        "answers": [
            {
                "settings": short_settings(answer.cell.settings),
                "capacity_tokens": answer.capacity_tokens,
                "does_not_fit_tokens": answer.does_not_fit_tokens,
                "peak_reserved_bytes": answer.peak_reserved_bytes,
                "tokens_per_s": answer.tokens_per_s,
            }
            for answer in study.answers
        ],
    }


def measured(memory: str, resolution: str) -> dict[str, Any]:
    """Both searches, the faster one first: what is cached then helps the other."""
    asked = question(memory, resolution)
    found: dict[str, Any] = {"memory": memory, "environment": to_builtins(environment())}
    for name, most_trials in (("side by side", None), ("one after another", 1)):
        with tempfile.TemporaryDirectory() as folder:
            found[name] = searched(asked, Path(folder), most_trials)
    return found


def table(found: dict[str, Any]) -> str:
    """The answers of both ways beside each other, and their times, as a Markdown table."""
    beside, after = found["side by side"], found["one after another"]
    lines = [
        "| settings | longest, side by side | one after another | tokens/s, as a ratio |",
        "|---|---:|---:|---:|",
    ]
    for one, other in zip(beside["answers"], after["answers"], strict=True):
        ratio = one["tokens_per_s"] / other["tokens_per_s"]
        lines.append(
            f"| {one['settings']} | {one['capacity_tokens']:,} | {other['capacity_tokens']:,} "
            f"| {ratio:.2f} |"
        )
    lines.append(
        f"| time | {beside['took_s']:.0f} s | {after['took_s']:.0f} s "
        f"| {beside['took_s'] / after['took_s']:.2f} |"
    )
    return "\n".join(lines)


def main() -> None:
    """Measure, or print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="measure, and write what was found")
    parser.add_argument(
        "--table", type=Path, nargs="?", const=FOUND, help="print the table of what was found"
    )
    parser.add_argument("--memory", default="20GiB")
    parser.add_argument("--resolution", default="8k")
    arguments = parser.parse_args()
    if arguments.json:
        found = measured(arguments.memory, arguments.resolution)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(table(found))
    if arguments.table:
        print(table(json.loads(arguments.table.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()

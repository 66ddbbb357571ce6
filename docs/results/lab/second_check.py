"""Each predicted cell once more, with no more memory than was predicted of it; writes JSON, prints
the table.

``python docs/results/lab/second_check.py --gpus 1`` (GPUs) tries the capacity of every
prediction beside the studies of docs/results/find, memory-only, capped at the bytes that the driver
was to report there; it goes on with ``second_check.json`` beside it, and ``--table`` only prints.
xMem's second check: a prediction that is a byte too low may run out of memory here.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import highwater
from highwater.memory.capacity import CellPrediction, Prediction
from highwater.model.model import load_model
from highwater.nouns.codec import from_json
from highwater.nouns.study import Study
from highwater.nouns.trial import Outcome, TrialResult, TrialSpec
from highwater.trials.engine_trial import EngineLauncher
from highwater.trials.local import LocalRunner
from highwater.units import GIB, format_tokens

STUDIES = Path(__file__).parents[1] / "find"
FILE = Path(__file__).with_suffix(".json")
TIMEOUT_S = 600.0
"""Of a trial; what takes longer is in no row, and is tried again the next time."""
HEADINGS = (
    "search",
    "length",
    "predicted, GiB",
    "measured without the cap",
    "capped at what was predicted",
    "headroom, MiB",
)


def main() -> None:
    """Try what is not in the file yet, then print what it says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gpus", type=int, nargs="+", default=[1], help="numbers of GPUs whose cells are tried"
    )
    parser.add_argument(
        "--searches", nargs="+", help="names of the searches whose cells are tried (default: all)"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="begin none after this long")
    parser.add_argument(
        "--part", type=int, nargs=2, default=(0, 1), help="K of N: every Nth cell, from the Kth on"
    )
    parser.add_argument("--output", type=Path, default=FILE, help="the JSON file")
    parser.add_argument(
        "--log-dir", type=Path, default=Path("logs/second-check"), help="directory of logs"
    )
    parser.add_argument("--table", action="store_true", help="print the table, measure nothing")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = (
        json.loads(arguments.output.read_text()) if arguments.output.is_file() else []
    )
    if not arguments.table:
        runner, end = (
            LocalRunner(EngineLauncher(log_directory=arguments.log_dir, timeout_s=TIMEOUT_S)),
            time.monotonic() + 60 * arguments.minutes,
        )
        which, of = arguments.part
        asked = [pair for pair in capped() if pair[1].cell.layout.gpus in arguments.gpus]
        asked = [
            pair for pair in asked if arguments.searches is None or pair[0] in arguments.searches
        ]
        for name, cell, spec in asked[which::of]:
            if time.monotonic() < end and not any(
                row["search"] == name and row["rung"] == cell.cell.settings.label for row in rows
            ):
                result = runner.run(spec)
                if result.outcome is not Outcome.TIMEOUT:
                    rows.append(row(name, cell, spec, result))
                    arguments.output.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


def capped() -> Iterator[tuple[str, CellPrediction, TrialSpec]]:
    """Of every study with a prediction beside it: each predicted cell, and its capacity as a trial
    with the predicted memory.
    """
    for path in sorted(STUDIES.glob("*.prediction.json")):
        study_path = path.with_name(path.name.replace(".prediction.json", ".jsonl"))
        if not study_path.is_file():
            continue
        question = highwater.open_study(study_path).question
        directory = load_model(question.model.name).directory
        for cell in from_json(path.read_bytes(), Prediction).cells:
            if cell.capacity_tokens and cell.cell in question.cells:
                spec = question.trial(cell.cell, cell.capacity_tokens, memory_only=True)
                yield (
                    path.name.removesuffix(".prediction.json"),
                    cell,
                    msgspec.structs.replace(
                        spec, memory_budget_bytes=cell.device_used_bytes, model_directory=directory
                    ),
                )


def row(name: str, cell: CellPrediction, spec: TrialSpec, result: TrialResult) -> dict[str, Any]:
    """What was predicted, and how the trial with no more than that ended."""
    return {
        "search": name,
        "rung": cell.cell.settings.label,
        "length_tokens": spec.length_tokens,
        "predicted_bytes": cell.device_used_bytes,
        "outcome": result.outcome,
        "reason": result.reason,
        "device_used_bytes": [rank.memory.device_used_bytes for rank in result.ranks],
        "peak_reserved_bytes": [rank.memory.peak_reserved_bytes for rank in result.ranks],
        "wall_s": result.wall_s,
        "versions": result.ranks[0].versions if result.ranks else {},
        "environment": {
            key: value for key, value in os.environ.items() if key.startswith("PYTORCH_")
        },
    }


def table(rows: list[dict[str, Any]]) -> str:
    """One line a cell, then the sum."""
    lines = [f"| {' | '.join(HEADINGS)} |", f"|{'---|' * len(HEADINGS)}"]
    for each in rows:
        used = max((n for n in each["device_used_bytes"] if n is not None), default=None)
        spare = "" if used is None else f"{(each['predicted_bytes'] - used) / 2**20:,.0f}"
        without = _uncapped(each)
        lines.append(
            f"| {each['search']}: {each['rung']} | {format_tokens(each['length_tokens'])} | "
            f"{each['predicted_bytes'] / GIB:.2f} "
            f"| {'' if without is None else f'{without / GIB:.2f}'} | "
            f"{str(each['outcome']).replace('_', ' ')} | {spare} |"
        )
    judged = [
        each
        for each in rows
        if Outcome(each["outcome"]) is Outcome.MEMORY_ONLY_FIT or Outcome(each["outcome"]).is_memory
    ]
    ran_out = sum(Outcome(each["outcome"]).is_memory for each in judged)
    return "\n".join(
        [
            *lines,
            "",
            f"{len(judged) - ran_out} of {len(judged)} cells fit what was predicted of them, "
            f"{ran_out} ran out",
        ]
    )


def _uncapped(row: dict[str, Any]) -> int | None:
    """What the driver reported of the same length in the search, which had more memory."""
    study: Study = highwater.open_study(STUDIES / f"{row['search']}.jsonl")
    used = [
        rank.memory.device_used_bytes
        for trial in study.trials
        if trial.result is not None
        and (trial.spec.settings.label, trial.spec.length_tokens)
        == (row["rung"], row["length_tokens"])
        and not trial.result.outcome.is_memory
        for rank in trial.result.ranks
    ]
    return max((n for n in used if n is not None), default=None)


if __name__ == "__main__":
    main()

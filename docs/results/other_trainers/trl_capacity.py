"""Capacities of TRL on GPUs, found by ``highwater find``'s own search, and ours beside them.

    python trl_capacity.py OUT                          every case but the slow ones
    python trl_capacity.py OUT --case one-gpu --trl /tmp/site/bin/trl

One JSON line for each trial goes to ``OUT/trials.jsonl`` as it ends, a study for each search to
``OUT/<case>-<trainer>.jsonl``, logs below ``OUT/logs``; a table at the end to standard output. What
fails is recorded, and the next search goes on; called again, finished trials are not repeated. A
search ends after ``--minutes``, and what it found by then stands.

The model's weights are random: a catalog shape has none. They are prepared before the first trial.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import highwater
from highwater.errors import HighwaterError
from highwater.search.cell_outcomes import SearchEvent, TrialFinished
from highwater.trainers.logs import logged_steps
from highwater.units import GIB

MODEL = "Qwen3-4B"
COMMON: dict[str, Any] = {"allocator": "expandable", "steps": 2}
CASES: dict[str, dict[str, Any]] = {
    # states of 60 GiB, and 20 GiB for everything else: seconds a step
    "one-gpu": {
        "gpus": [1],
        "memory": "80GiB",
        "start_length": 8192,
        "resolution": 8192,
        "max_length": 90112,
    },
    # states of 30 GiB on each of two, which share every sequence
    "two-gpus-ring": {
        "gpus": [2],
        "ring": [2],
        "memory": "40GiB",
        "start_length": 8192,
        "resolution": 8192,
        "max_length": 40960,
    },
    # minutes a trial: attention's share grows with the square of the length
    "one-gpu-100": {
        "gpus": [1],
        "memory": "100GiB",
        "start_length": 49152,
        "resolution": 16384,
        "max_length": 180224,
    },
    # a whole H200: minutes a step, so that one micro-batch and a coarse grid have to do
    "whole-gpu": {
        "gpus": [1],
        "start_length": 98304,
        "resolution": 32768,
        "max_length": 294912,
        "micro_batches": 1,
    },
}
SLOW = ("one-gpu-100", "whole-gpu")


def main() -> None:
    """Search every case that was named, TRL first, and print what was found."""
    words = arguments()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched: the model is made here
    words.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for case in words.case:
        for trainer in words.trainer:
            row = {"case": case, "trainer": trainer}
            rows.append(searched(words.out, row, MODEL, settings_of(words, case, trainer)))
            print(json.dumps(rows[-1]), flush=True)
    print(table(rows))


def arguments() -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--case", nargs="+", choices=CASES, default=[c for c in CASES if c not in SLOW]
    )
    parser.add_argument(
        "--trainer", nargs="+", choices=("trl", "highwater"), default=["trl", "highwater"]
    )
    parser.add_argument("--trl", default="trl", help="the program that starts TRL")
    parser.add_argument("--minutes", type=float, default=9.0, help="longest time of one search")
    parser.add_argument("--resolution", type=int, help="step between lengths, for every case")
    parser.add_argument("--start-length", type=int, help="shortest length, for every case")
    return parser.parse_args()


def settings_of(words: argparse.Namespace, case: str, trainer: str) -> dict[str, Any]:
    """What ``find`` is asked."""
    asked = COMMON | CASES[case]
    for name in ("resolution", "start_length"):
        asked |= {} if getattr(words, name) is None else {name: getattr(words, name)}
    ours = {"loss": "chunked"}
    theirs = {"trainer": "trl", "command": words.trl}
    asked |= theirs if trainer == "trl" else ours
    return asked | {
        "study": str(words.out / f"{case}-{trainer}.jsonl"),
        "log_dir": str(words.out / "logs"),
        "budget": f"{words.minutes:.1f}m",
        "no_diagnose": True,
    }


def searched(
    out: Path, row: dict[str, Any], model: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """The answer of one search, or why there is none, beside what the row has."""
    began = time.monotonic()
    try:
        study = highwater.find(model, on_event=recorder(out / "trials.jsonl", row), **settings)
    except (HighwaterError, OSError) as error:
        return row | {"error": str(error), "hint": getattr(error, "hint", None)}
    row |= {"launches": len(study.trials), "took_s": round(time.monotonic() - began, 1)}
    fits = [
        trial.result
        for answer in study.answers
        for trial in study.trials
        if trial.spec.length_tokens == answer.capacity_tokens and trial.result is not None
    ]
    for answer in study.answers:
        row |= {
            "capacity_tokens": answer.capacity_tokens,
            "does_not_fit_tokens": answer.does_not_fit_tokens,
            "limit": answer.limit,
            "reason": answer.reason,
            "trials": answer.trials,
        }
    for result in fits:
        row |= measured(result)
    return row | {"notes": list(study.notes)}


def recorder(path: Path, row: dict[str, Any]) -> Callable[[SearchEvent], None]:
    """Writes a line for each trial that ends, to the file and to standard output."""

    def hear(event: SearchEvent) -> None:
        if not isinstance(event, TrialFinished):
            return
        spec, result = event.spec, event.result
        line = {
            **row,
            "length_tokens": spec.length_tokens,
            "gpus": spec.layout.gpus,
            "ring": spec.layout.ring_degree,
            "outcome": result.outcome.value,
            "reason": result.reason,
            "wall_s": round(result.wall_s, 1),
            "is_recorded": event.is_recorded,
            **measured(result),
        }
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    return hear


def measured(result: Any) -> dict[str, Any]:
    """Peak and time of a trial: the mean step of TRL or transformers, our engine's last."""
    used = [rank.memory.device_used_bytes for rank in result.ranks]
    known = [each for each in used if each is not None]
    found: dict[str, Any] = {
        "device_used_gib": round(max(known) / GIB, 2) if known else None,
        "step_s": result.step_time_s,
    }
    log = None if result.log_path is None else Path(result.log_path)
    if result.step_time_s is None and log is not None and log.is_file():
        text = log.read_text(encoding="utf-8", errors="replace")
        found["steps"] = steps = [dict(step) for step in logged_steps(text)]
        total_s = runtime_s(text)
        # they say the time of all steps, the first of which warms up
        found["step_s"] = None if total_s is None or not steps else total_s / len(steps)
    return found


def runtime_s(text: str) -> float | None:
    """The time of all steps, as transformers' trainer and TRL say it when they are done."""
    _, said, rest = text.rpartition("'train_runtime': ")
    return float(rest.partition(",")[0].strip("' ")) if said else None


def table(rows: list[dict[str, Any]]) -> str:
    """What was found, in Markdown."""
    lines = [
        "| case | trainer | capacity | does not fit | trials | device used, GiB | a step, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["case"], row["trainer"]]
        cells += [
            row.get("error") or row.get("capacity_tokens"),
            *(row.get(name) for name in ("does_not_fit_tokens", "trials", "device_used_gib")),
            None if row.get("step_s") is None else round(row["step_s"], 2),
        ]
        lines.append("| " + " | ".join("" if c is None else str(c) for c in cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

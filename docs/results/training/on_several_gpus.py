"""`highwater train` on two or four GPUs: 200 steps of Qwen3-1.7B's shape on packed documents, by
every layout, and once killed and gone on with another layout.

    python docs/results/training/on_several_gpus.py OUT >> docs/results/training/on_two_gpus.ndjson
    python docs/results/training/on_several_gpus.py --table

``--gpus 4`` is for four: ``on_four_gpus.ndjson``. Four rows of 8,192 tokens make a step in every
layout, so that all train the same: rows of its own for each GPU by data parallel, and each row
shared by the GPUs by Ulysses or by a ring. Each run prints a line of JSON with its losses, and one
that fails a line that says why. ``--small`` tries the script on the CPU.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from on_a_gpu import CHUNKED, WARM, environment, histogram, of_the_cpu, speed, steps_of
from on_a_gpu import write_documents as write

RECORDS = {
    gpus: Path(__file__).with_name(f"on_{word}_gpus.ndjson")
    for gpus, word in ((2, "two"), (4, "four"))
}
LAYOUTS: Mapping[int, Mapping[str, tuple[str, ...]]] = {
    2: {
        "data parallel": (),
        "Ulysses 2": ("--ulysses", "2"),
        "ring 2": ("--ring", "2"),
        "copies 2": ("--copies", "2"),
    },
    4: {
        "data parallel": (),
        "Ulysses 4": ("--ulysses", "4"),
        "ring 4": ("--ring", "4"),
        "Ulysses 2 x ring 2": ("--ulysses", "2", "--ring", "2"),
        "copies 2": ("--copies", "2"),
    },
}
GONE_ON = {2: ("ring 2", "Ulysses 2"), 4: ("ring 4", "Ulysses 4")}
"""The layout that is killed, and the one that goes on from its checkpoint."""


def main() -> None:
    """Run every layout, or print what is recorded."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", nargs="?", type=Path, help="a folder for data and runs")
    parser.add_argument("--small", action="store_true", help="on the CPU, to try this script")
    parser.add_argument("--steps", type=int, help="of each run, of the same data; default: 200")
    parser.add_argument("--model", default="Qwen3-1.7B")
    parser.add_argument("--gpus", type=int, choices=LAYOUTS, default=2)
    parser.add_argument("--runs", nargs="+", help="names of layouts, or killed; default: all")
    parser.add_argument("--table", action="store_true")
    words = parser.parse_args()
    if words.table:
        lines = RECORDS[words.gpus].read_text().splitlines()
        print(table([json.loads(line) for line in lines]))
        return
    folder = words.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    length, steps = (256, 12) if words.small else (8192, 200)
    write(folder / "packed.jsonl", histogram(length, 4 * length * (steps // 3)))
    steps = words.steps or steps
    device = "cpu" if words.small else "cuda"
    more = ("--memory", "2GiB") if words.small else ("--allocator", "expandable")
    common = [
        *(
            sys.executable,
            "-P",
            "-m",
            "highwater",
            "train",
            "tiny" if words.small else words.model,
        ),
        *("--data", str(folder / "packed.jsonl"), "--device", device, "--gpus", str(words.gpus)),
        *("--length", str(length), "--rows", "4", "--learning-rate", "1e-4", *CHUNKED, *more),
    ]
    place = environment(of_the_cpu(folder)) if words.small else environment_of_gpus()
    runs = {
        name: partial(trained, [*common, *layout, "--steps", str(steps)], folder)
        for name, layout in LAYOUTS[words.gpus].items()
    }
    gone_on = GONE_ON[words.gpus]
    layouts = {name: LAYOUTS[words.gpus][name] for name in gone_on}
    runs["killed"] = partial(
        killed, common, folder, layouts, steps=max(12, steps // 3), every=max(4, steps // 10)
    )
    for name in words.runs or runs:
        tell(name, place, runs[name])


def environment_of_gpus() -> dict[str, Any]:
    """Names and versions, without a context on a GPU of this process."""
    from importlib.metadata import version

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    cards = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    names = ("torch", "transformers")
    return {"device": cards, "versions": {name: version(name) for name in names}}


def tell(name: str, place: dict[str, Any], run: Callable[[], dict[str, Any]]) -> None:
    """Print a run's line; of one that fails why."""
    try:
        found = run()
    except Exception:  # noqa: BLE001 - the others are still worth their time
        found = {"failed": traceback.format_exc()[-2000:]}
    print(json.dumps({"run": name, **found, **place}), flush=True)


def trained(command: list[str], folder: Path) -> dict[str, Any]:
    """Train, and forget what it saved."""
    output, began = folder / "run", time.monotonic()
    done = subprocess.run(
        [*command, "--output", str(output), "--json"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-1800:])
    said, steps = json.loads(done.stdout), steps_of(output)
    shutil.rmtree(output)
    return {
        "command": " ".join(["highwater", *command[4:]]).replace(f"{folder}/", ""),
        "status": said["status"],
        "peak_bytes": said["peak_bytes"],
        "losses": [each["loss"] for each in steps],
        "tokens_per_s": speed(steps),
        "median_step_s": sorted(each["step_time_s"] for each in steps[WARM:])[len(steps) // 2 - 1],
        "wall_s": time.monotonic() - began,
    }


def killed(
    common: list[str],
    folder: Path,
    layouts: Mapping[str, tuple[str, ...]],
    *,
    steps: int,
    every: int,
) -> dict[str, Any]:
    """By one layout, killed after some steps, and on from its last checkpoint by another."""
    output = folder / "run"
    first, second = layouts.values()
    words = [*common, "--steps", str(steps), "--save-every", str(every), "--output", str(output)]
    process = subprocess.Popen(
        [*words, *first], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while process.poll() is None and not (
        (output / "statistics.jsonl").exists() and len(steps_of(output)) >= every + 3
    ):
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = len(steps_of(output))
    found = trained([*words[:-2], *second], folder)
    return {**found, "layouts": list(layouts), "steps_before_the_kill": before}


def model_of(line: dict[str, Any]) -> str:
    """The model that a run trained."""
    return line.get("command", "highwater train -").split()[2]


def table(lines: list[dict[str, Any]]) -> str:
    """What was recorded, a row for each run."""
    alone = {model_of(each): each["losses"] for each in lines if each["run"] == "data parallel"}
    shown = [
        "| run | steps | first and last loss | furthest from data parallel | tokens/s | a step |",
        "|---|---|---|---|---|---|",
    ]
    for each in lines:
        if "failed" in each:
            shown.append(f"| {each['run']} | failed | | | | |")
            continue
        losses = each["losses"]
        beside = zip(losses, alone.get(model_of(each), ()), strict=False)
        off = max((abs(a - b) / b for a, b in beside), default=None)
        name = " then ".join(each.get("layouts", [])) or each["run"]
        shown.append(
            f"| {name} | {len(losses)} | {losses[0]:.4f}, {losses[-1]:.4f} "
            f"| {'-' if off is None else format(off, '.1e')} "
            f"| {each['tokens_per_s']:,.0f} | {each['median_step_s']:.3f} s |"
        )
    return "\n".join(shown)


if __name__ == "__main__":
    main()

"""Capacities of LoRA and of optimizers with few bits: predicted, then found by memory-only trials.

``python docs/results/lora/cells.py --predict`` (no GPU) writes ``cells/predicted.json``, which is
committed before anything is measured; ``--find --minutes 9`` goes on with the studies beside it on
the GPU of this machine, each search until it is answered or time is up; ``--table`` prints both.
"""

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

import highwater
from highwater.spec.trial import Outcome
from highwater.units import GIB

HERE = Path(__file__).parent / "cells"
PREDICTED = HERE / "predicted.json"
_ONE = "--micro-batches 1 --loss chunked --allocator expandable --rope yarn"
_LORA, _FEW = f"--lora 32 {_ONE}", f"--optimizer adamw-8bit {_ONE}"
CELLS = {
    "0.6b-lora": ("Qwen3-0.6B", "24GiB", 16384, _LORA),
    "0.6b-8bit": ("Qwen3-0.6B", "24GiB", 16384, _FEW),
    "0.6b-bf16": (
        "Qwen3-0.6B",
        "24GiB",
        16384,
        f"--optimizer adamw-bf16 --parameters bf16 {_ONE}",
    ),
    "4b-lora": ("Qwen3-4B", "40GiB", 8192, _LORA),
    "4b-lora-offload": ("Qwen3-4B", "24GiB", 8192, f"--offload {_LORA}"),
    "4b-8bit": ("Qwen3-4B", "56GiB", 8192, _FEW),
    "4b-8bit-bf16": ("Qwen3-4B", "40GiB", 8192, f"--parameters bf16 {_FEW}"),
    "8b-8bit-bf16": ("Llama-3.1-8B", "79.15GiB", 16384, f"--parameters bf16 {_FEW}"),
    "8b-lora": ("Llama-3.1-8B", "79.15GiB", 32768, _LORA),
    "8b-lora-offload": ("Llama-3.1-8B", "79.15GiB", 32768, f"--offload {_LORA}"),
}
"""By name: the model, the bound on the GPU's memory, the grid's step in tokens, its flags."""


def main() -> None:
    """Predict, find or print, as the flags say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--predict", action="store_true", help="write what is predicted")
    parser.add_argument("--find", action="store_true", help="search on this machine's GPU")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after this long")
    parser.add_argument("--only", nargs="+", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--out", type=Path, default=HERE, help="where the studies are written")
    arguments = parser.parse_args()
    if arguments.predict:
        predict(arguments.only)
    if arguments.find:
        find(arguments.only, arguments.out, deadline=time.monotonic() + 60 * arguments.minutes)
    print(table(arguments.out))


def _grid(step: int) -> list[str]:
    return ["--start-length", str(step), "--resolution", str(step)]


def predict(names: list[str]) -> None:
    """Write the formula's capacity and peak of each cell; what is there is kept."""
    written: dict[str, Any] = _predicted()
    for name in names:
        model, memory, step, flags = CELLS[name]
        words = ["predict", model, "--json", "--gpus", "1xH200-141GB", "--gpu-memory", memory]
        said = subprocess.run(
            [sys.executable, "-P", "-m", "highwater.cli.app", *words, *_grid(step), *flags.split()],
            stdout=subprocess.PIPE,
            check=True,
        )
        cells = msgspec.json.decode(said.stdout)["cells"]
        (cell,) = (
            each
            for each in cells
            if each["cell"]["settings"]["offload"] == ("--offload" in flags.split())
        )
        kept = ("capacity_tokens", "likely_tokens", "does_not_fit_tokens", "device_bytes")
        written.setdefault(name, {key: cell[key] for key in kept if key in cell})
    PREDICTED.write_bytes(msgspec.json.format(msgspec.json.encode(written)) + b"\n")


def _predicted() -> dict[str, Any]:
    return msgspec.json.decode(PREDICTED.read_bytes()) if PREDICTED.is_file() else {}


def find(names: list[str], out: Path, *, deadline: float) -> None:
    """Search cell after cell; when time is up the running search is interrupted as a person
    would.
    """
    for name in names:
        model, memory, step, flags = CELLS[name]
        words = ["find", model, "--gpus", "1", "--memory", memory, "--proof", "memory"]
        study = ["--study", str(out / f"{name}.jsonl"), "--log-dir", f"/tmp/logs/{name}"]
        with subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "highwater.cli.app"),
                *(*words, *_grid(step), *flags.split(), *study, "--no-diagnose"),
                *("--timeout", "3m"),
            ]
        ) as search:
            try:
                search.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                search.send_signal(signal.SIGINT)
        if time.monotonic() > deadline:
            return


def table(out: Path) -> str:
    """A row for each cell: what was predicted, what fits and what ran out."""
    head = ("cell", "model", "memory", "predicted", "likely", "fits", "ran out", "peak reserved")
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, (model, memory, _, _) in CELLS.items():
        said = _predicted().get(name, {})
        row = [name, model, memory, *(_tokens(said.get(f"{k}_tokens")) for k in _SAID)]
        rows.append("| " + " | ".join([*row, *_measured(out / f"{name}.jsonl")]) + " |")
    return "\n".join(rows)


_SAID = ("capacity", "likely")


def _measured(path: Path) -> list[str]:
    if not path.is_file():
        return ["-", "-", "-"]
    results = {
        trial.spec.length_tokens: trial.result
        for trial in highwater.open_study(path).trials
        if trial.result is not None
    }
    fits = [n for n, r in results.items() if r.outcome is Outcome.MEMORY_ONLY_FIT]
    longest = max(fits, default=None)
    out = [n for n, r in results.items() if r.outcome.is_memory]
    peak = "-"
    if longest is not None:
        peak = f"{(results[longest].peak_reserved_bytes or 0) / GIB:.2f} GiB"
    return [_tokens(longest), _tokens(min(out, default=None)), peak]


def _tokens(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


if __name__ == "__main__":
    main()

"""Capacities of LoRA and of optimizers with few bits: predicted, then tried.

``python docs/results/lora/cells.py --predict`` (no GPU) writes ``cells/predicted.json``, which is
committed before anything is measured; ``--try --minutes 9`` tries two lengths of each cell on this
machine's GPU, memory-only. Without either it prints both. Trials of ``cells/trials.json`` with
another length of attention than one layer were made by ``highwater find --proof memory``.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from highwater.nouns.trial import Outcome, TrialResult
from highwater.units import GIB

HERE = Path(__file__).parent / "cells"
LEAST_S = 60.0
"""Seconds that a trial takes at the least."""
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
    "8b-nf4": ("Llama-3.1-8B", "79.15GiB", 32768, f"--lora-base nf4 {_LORA}"),
    "8b-nf4-24gib": ("Llama-3.1-8B", "24GiB", 8192, f"--lora-base nf4 {_LORA}"),
    "8b-lora": ("Llama-3.1-8B", "79.15GiB", 32768, _LORA),
    "8b-lora-offload": ("Llama-3.1-8B", "79.15GiB", 32768, f"--offload {_LORA}"),
}
"""By name: the model, the bound on the GPU's memory, the grid's step in tokens, its flags."""


def main() -> None:
    """Predict, try or print, as the flags say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--predict", action="store_true", help="write what is predicted")
    parser.add_argument("--try", action="store_true", dest="tries", help="measure, on a GPU")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after this long")
    parser.add_argument("--only", nargs="+", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--out", type=Path, default=HERE, help="where trials are written")
    arguments = parser.parse_args()
    if arguments.predict:
        predict(arguments.only)
    if arguments.tries:
        measure(arguments.only, arguments.out, deadline=time.monotonic() + 60 * arguments.minutes)
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


def measure(names: list[str], out: Path, *, deadline: float) -> None:
    """Try the longest likely length of each cell, then the next one, or the one before where that
    ran out; each trial is a line of ``trials.json``.
    """
    for name in names:
        step = CELLS[name][2]
        length = _predicted()[name]["likely_tokens"]
        first = _try(name, length, out, deadline)
        if first is not None:
            _try(name, length + step if first.is_fit else length - step, out, deadline)


def _try(name: str, length: int, out: Path, deadline: float) -> Outcome | None:
    """One memory-only trial; None where its time is not there."""
    left = deadline - time.monotonic()
    if left < LEAST_S:
        return None
    model, memory, _, flags = CELLS[name]
    words = ["try", model, "--json", "--gpus", "1", "--memory", memory, "--length", str(length)]
    more = ["--attention-depth", "1", "--log-dir", "logs", "--timeout", f"{left:.0f}s"]
    said = subprocess.run(
        [*(sys.executable, "-P", "-m", "highwater.cli.app"), *words, *more, *flags.split()],
        stdout=subprocess.PIPE,
        check=False,
    )
    trial = msgspec.json.decode(said.stdout)
    for unkept in ("log", "log_path"):
        trial.pop(unkept, None)
    trials = [*_trials(out), {"cell": name, "length_tokens": length, **trial}]
    lines = b",\n".join(map(msgspec.json.encode, trials))
    (out / "trials.json").write_bytes(b"[\n" + lines + b"\n]\n")
    return Outcome(trial["result"]["outcome"])


def table(out: Path) -> str:
    """A row for each cell: what was predicted, what fits and what ran out."""
    head = ("cell", "model", "memory", "predicted", "likely", "fits", "ran out", "peak reserved")
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, (model, memory, _, _) in CELLS.items():
        said = _predicted().get(name, {})
        row = [name, model, memory, *(_tokens(said.get(f"{k}_tokens")) for k in _SAID)]
        rows.append("| " + " | ".join([*row, *_measured(name, out)]) + " |")
    return "\n".join(rows)


_SAID = ("capacity", "likely")


def _measured(name: str, out: Path) -> list[str]:
    results = _results(name, out)
    longest = max((n for n, r in results.items() if r.outcome.is_fit), default=None)
    ran_out = min((n for n, r in results.items() if r.outcome.is_memory), default=None)
    peak = "-"
    if longest is not None:
        peak = f"{(results[longest].peak_reserved_bytes or 0) / GIB:.2f} GiB"
    return [_tokens(longest), _tokens(ran_out), peak]


def _results(name: str, out: Path) -> dict[int, TrialResult]:
    """By length: what became of the trials of a cell."""
    return {
        trial["length_tokens"]: msgspec.convert(trial["result"], TrialResult)
        for trial in _trials(out)
        if trial["cell"] == name
    }


def _trials(out: Path) -> list[dict[str, Any]]:
    path = out / "trials.json"
    return msgspec.json.decode(path.read_bytes()) if path.is_file() else []


def _tokens(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


if __name__ == "__main__":
    main()

"""Whole models with layers of a gated delta rule, and of Gemma 4, on GPUs: peaks beside what the
formula and a trace said before.

    python docs/results/families/hybrids.py --predict [--exact]
    python docs/results/families/hybrids.py --measure
    python docs/results/families/hybrids.py --table

``hybrids.json`` beside this file has a row for each trial of ``highwater try``, two full steps
each; ``--measure`` gives each the GPUs it asks for, so that two on one GPU run side by side.
``--attention-depth 1``: memory-only.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

GIB = 1024**3
FILE = Path(__file__).with_suffix(".json")
COMMON = "--loss chunked --allocator expandable --micro-batches 1"
SMALL_CARD = "--memory 79.15GiB"
OF_GEMMA = "--lora 16 --lora-targets q_proj,k_proj,v_proj,o_proj"
TRIALS = tuple(
    f"{trial} {COMMON}" + f" {SMALL_CARD}" * ("--memory" not in trial)
    for trial in (
        "Qwen3.5-9B --length 122880 --lora 16 --activations gpu",
        "Qwen3.5-27B --length 8192 --lora 16 --activations gpu",
        "Qwen3.5-9B --length 16384 --lora 16 --activations gpu",
        "Qwen3.5-9B --length 32768 --lora 16 --activations gpu",
        "Qwen3.5-9B --length 32768 --lora 16 --activations host",
        "Qwen3.5-9B --length 16384 --lora 16 --activations gpu --recompute all-but-attention",
        "Qwen3.5-27B --length 16384 --lora 16 --activations host",
        "Qwen3.5-9B --length 65536 --lora 16 --activations host",
        "Qwen3.5-9B --length 8192 --lora 64 --activations gpu",
        "Qwen3.5-9B --gpus 2 --ulysses 2 --length 65536 --lora 16 --activations gpu",
        "Qwen3.5-9B --gpus 2 --ring 2 --length 65536 --lora 16 --activations gpu",
        "Qwen3.6-35B-A3B --length 16384 --lora 16 --activations gpu --memory 130GiB",
        "Qwen3.5-9B --length 262144 --lora 16 --activations host",
        "Qwen3.5-9B --length 458752 --lora 16 --activations host --attention-depth 1",
        f"gemma-4-E4B --length 16384 {OF_GEMMA},gate_proj,up_proj,down_proj --activations gpu",
        f"gemma-4-E4B --length 65536 {OF_GEMMA} --activations host",
        f"gemma-4-26B-A4B --length 8192 {OF_GEMMA} --activations gpu",
    )
)
"""What ``highwater try`` is asked."""
LIMIT_S = 480
"""A trial that takes longer is ended."""


def main() -> None:
    """Predict, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--exact", action="store_true", help="by a trace too, minutes each")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--table", action="store_true")
    words = parser.parse_args()
    rows: dict[str, Any] = json.loads(FILE.read_text()) if FILE.is_file() else {}
    if words.predict:
        for trial in TRIALS:
            rows.setdefault(trial, {"command": f"highwater try {trial} --json"})
            row = rows[trial]
            if words.exact and "trace_allocated_bytes" not in row:
                row |= traced(trial)
            elif not words.exact:
                row |= by_formula(trial)
            FILE.write_text(json.dumps(rows, indent=1) + "\n")
    if words.measure:
        for trial, found in measured([trial for trial in rows if "measured" not in rows[trial]]):
            rows[trial]["measured"] = found
            FILE.write_text(json.dumps(rows, indent=1) + "\n")
            print(trial, json.dumps(found)[:400], flush=True)
    print(table(rows))


def by_formula(trial: str) -> dict[str, Any]:
    """What the formula says."""
    footprint = asked(trial)["footprint"]
    phases = [sum(term["bytes"] for term in phase["terms"]) for phase in footprint["phases"]]
    return {
        "formula_allocated_bytes": max(phases),
        "formula_host_bytes": sum(term["bytes"] for term in footprint["host"]),
    }


def traced(trial: str) -> dict[str, Any]:
    """What a trace says."""
    replayed = asked(trial, "--exact")["replayed"]
    return {
        "trace_allocated_bytes": replayed["peak_allocated_bytes"],
        "trace_reserved_bytes": replayed["peak_reserved_bytes"],
    }


def asked(trial: str, *more: str) -> dict[str, Any]:
    """The one cell that ``highwater predict`` answers."""
    words = re.sub(r"--memory \S+|--attention-depth 1", "", trial).split()
    gpus = words[words.index("--gpus") + 1] if "--gpus" in words else "1"
    at = words.index("--gpus") if "--gpus" in words else len(words)
    rest = words[:at] + words[at + 2 :]
    command = [sys.executable, "-m", "highwater", "predict", *rest]
    card = "H100-80GB" if SMALL_CARD in trial else "H200-141GB"
    command += ["--gpus", f"{gpus}x{card}", "--json", *more]
    if "--ulysses" not in words:
        command += ["--ulysses", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{trial}: {done.stderr}")
    cells = json.loads(done.stdout)["cells"]
    offload = "--offload" in words
    (cell,) = (each for each in cells if each["cell"]["settings"]["offload"] is offload)
    return cell


def measured(trials: list[str]) -> Any:
    """Each trial's figures as it ends: those on two GPUs one after the other at the end, the others
    two at a time.
    """
    import os

    free: SimpleQueue[str] = SimpleQueue()
    for gpu in ("1", "0"):
        free.put(gpu)

    def run(trial: str, gpus: str | None = None) -> dict[str, Any]:
        gpu = gpus or free.get()
        try:
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
            command = [sys.executable, "-m", "highwater", "try", *trial.split(), "--json"]
            began = time.monotonic()
            done = subprocess.run(
                [*command, "--timeout", str(LIMIT_S)],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            wall = {"wall_s": time.monotonic() - began, "exit": done.returncode}
            try:
                return {"document": json.loads(done.stdout), **wall}
            except ValueError:
                return {"error": (done.stdout + done.stderr)[-1500:], **wall}
        finally:
            if gpus is None:
                free.put(gpu)

    alone = [trial for trial in trials if "--gpus 2" not in trial]
    with ThreadPoolExecutor(2) as pool:
        yield from zip(alone, pool.map(run, alone), strict=True)
    for trial in trials:
        if trial not in alone:
            yield trial, run(trial, "0,1")


def table(rows: dict[str, Any]) -> str:
    """Predicted beside measured, in Markdown."""
    lines = [
        "| trial | allocated: measured | formula | trace | a step |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for trial, row in rows.items():
        found = row.get("measured", {}).get("document", {})
        peak, steps = figures(found)
        cells = [f"{peak / GIB:.3f} GiB" if peak else "not run"]
        for by in ("formula", "trace"):
            bytes_ = row.get(f"{by}_allocated_bytes")
            off = f", {bytes_ / peak - 1:+.2%}" if peak and bytes_ else ""
            cells.append(f"{bytes_ / GIB:.3f}{off}" if bytes_ else "")
        cells.append(f"{steps[-1]:.1f} s" if steps else "")
        named = trial.replace(f" {COMMON}", "").replace(f" {SMALL_CARD}", "")
        lines.append(f"| {named} | {' | '.join(cells)} |")
    return "\n".join(lines)


def figures(document: dict[str, Any]) -> tuple[int | None, list[float]]:
    """Allocated peak of the fullest rank, and times of steps; nothing of a trial that failed."""
    ranks = document.get("ranks") or document.get("result", {}).get("ranks") or []
    peaks = [rank["memory"]["peak_allocated_bytes"] for rank in ranks if rank.get("memory")]
    times = ranks[0].get("step_times_s", []) if ranks else []
    return max(peaks, default=None), times


if __name__ == "__main__":
    main()

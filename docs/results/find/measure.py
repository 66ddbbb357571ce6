"""Measure the capacities on the page beside this file: every search on a GPU of its own, several at once; then print the table.

``python docs/results/find/measure.py --gpus 8 --minutes 20`` goes on with the studies beside it; ``--table`` only prints.
A search that time cuts off keeps its finished trials: the next call answers the rest.
"""

import argparse
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import highwater
from highwater.spec.study import Cell, Study
from highwater.spec.trial import Outcome
from highwater.units import GIB, format_tokens

HERE = Path(__file__).parent
GRID = "--gpus 1 --start-length 8192 --resolution 8192 --max-length 262144 --timeout 15m"
SEARCHES = {
    # The longest searches first, so that no GPU is left with one at the end.
    "qwen3-4b-card-chunked": "Qwen3-4B --loss chunked",
    "qwen3-4b-card-full": "Qwen3-4B --loss full",
    "qwen3-1.7b-card-full": "Qwen3-1.7B --loss full",
    "qwen3-0.6b-card-full": "Qwen3-0.6B --loss full",
    "qwen3-0.6b-79gib-full": "Qwen3-0.6B --memory 79.15GiB --loss full",
    "qwen3-1.7b-79gib-full": "Qwen3-1.7B --memory 79.15GiB --loss full",
    "qwen3-1.7b-79gib-chunked": "Qwen3-1.7B --memory 79.15GiB --loss chunked",
    "qwen3-4b-79gib": "Qwen3-4B --memory 79.15GiB",
    "qwen3-0.6b-79gib-chunked": "Qwen3-0.6B --memory 79.15GiB --loss chunked",
}


def main() -> None:
    """Search on every GPU until all is answered or time is up, then print what is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, help="GPUs to use at once")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this long; finished trials are kept")
    parser.add_argument("--only", nargs="+", choices=list(SEARCHES), default=list(SEARCHES), help="searches to run")
    parser.add_argument("--table", action="store_true", help="print the table, measure nothing")
    arguments = parser.parse_args()
    if not arguments.table:
        measure(arguments.only, gpus=arguments.gpus, deadline=time.monotonic() + 60 * arguments.minutes)
    print(table())


def measure(names: list[str], *, gpus: int, deadline: float) -> None:
    """Run the searches, one per GPU at a time."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)
    threads = [threading.Thread(target=_work, args=(gpu, waiting, deadline)) for gpu in range(gpus)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def table() -> str:
    """One row per search and rung: capacity or longest fit, what ended it, the peak, tokens/s."""
    rows = [
        "| search | rung | longest that trained | next, ran out | peak reserved GiB | tokens/s | MFU |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in SEARCHES:
        path = HERE / f"{name}.jsonl"
        if path.is_file():
            study = highwater.open_study(path)
            rows += [f"| {name} | {_figures(study, cell)} |" for cell in study.question.cells]
    return "\n".join(rows)


def _figures(study: Study, cell: Cell) -> str:
    """What the trials of one cell tell, also before its edge is known."""
    results = {
        t.spec.length_tokens: t.result
        for t in study.trials
        if t.result and t.spec == study.question.trial(cell, t.spec.length_tokens)
    }
    fits = max((length for length, result in results.items() if result.outcome is Outcome.FIT), default=0)
    longer = min((length for length, result in results.items() if result.outcome.is_memory and length > fits), default=None)
    ran_out = format_tokens(longer)
    if not fits:
        return f"{cell.settings.label} | - | {ran_out} | - | - | -"
    best = results[fits]
    over = " (over its budget)" if (best.headroom_bytes or 0) < 0 else ""
    reserved_gib = (best.peak_reserved_bytes or 0) / GIB
    speed = f"{best.tokens_per_s or 0:,.0f} | {best.mfu or 0:.1%}"
    return f"{cell.settings.label} | {format_tokens(fits)}{over} | {ran_out} | {reserved_gib:.2f} | {speed}"


def _work(gpu: int, waiting: "queue.SimpleQueue[str]", deadline: float) -> None:
    while time.monotonic() < deadline:
        try:
            name = waiting.get_nowait()
        except queue.Empty:
            return
        words = [*SEARCHES[name].split(), *GRID.split(), "--study", str(HERE / f"{name}.jsonl"), "--log-dir", f"logs/{name}"]
        with Path(f"{name}.log").open("w") as log:
            search = subprocess.Popen(
                [sys.executable, "-m", "highwater.cli.app", "find", *words],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                search.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                search.send_signal(signal.SIGINT)
                search.wait()


if __name__ == "__main__":
    main()

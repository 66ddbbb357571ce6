"""Measure the capacities on the pages beside this file: each search on GPUs of its own, several at
once; print the tables.

``python docs/results/find/measure.py --page sft --gpus 4 --minutes 20`` goes on with the studies of
that page beside it; ``--table`` only prints. A search that time cuts off keeps its finished trials:
the next call answers the rest. ``--predict`` (no GPU, a minute or three a cell) writes what traces
predict of each search, before it is measured.
"""

import argparse
import csv
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

import highwater
from highwater.nouns.study import Cell, Study
from highwater.nouns.trial import Outcome, TrialResult
from highwater.units import GIB, format_tokens

HERE = Path(__file__).parent
PUBLISHED = HERE.parents[2] / "tests" / "data" / "published_capacity_a100_80gb.csv"
PUBLISHED_SETTINGS = {
    "vanilla": "vanilla",
    "Env": "env",
    "Env + entropy-saving": "env",
    "Env + Offload": "env+offload+never",
}
"""By rung, what the published table calls it; entropy saving is not in that table, its cells stand
beside those without."""

_SFT = "--start-length 8192 --resolution 8192 --max-length 262144 --timeout 15m --gpus 1"
_GRPO = (
    "--objective grpo --sequences-per-micro-batch 2 --memory 79.15GiB --resolution 8192 "
    "--proof memory"
)
_SHORT, _LONGER = "--timeout 75s", "--timeout 2m"
_ENV = "--loss full --entropy full --allocator expandable"
_SAVING = "--loss full --entropy chunked --allocator expandable"
_CHUNKED = "--loss chunked --allocator expandable --proof memory"
_LONG = f"{_CHUNKED} --timeout 5m"
_FURTHER = f"{_CHUNKED} --timeout 8m --max-length 4m"
"""Past a million tokens, where a memory-only trial takes minutes."""
_GRID = "--start-length 32768 --resolution 32768"
_TO_EDGE = "--start-length 8192 --resolution 8192 --memory 79.15GiB --proof memory"
_EDGE = f"{_TO_EDGE} --timeout 2m"
_EDGE_OFFLOAD = f"{_TO_EDGE} --timeout 5m"
PAGES: dict[str, dict[str, str]] = {
    "sft": {
        # The longest searches first, so that no GPU is left with one at the end.
        "qwen3-4b-card-chunked": f"Qwen3-4B --loss chunked {_SFT}",
        "qwen3-4b-card-full": f"Qwen3-4B --loss full {_SFT}",
        "qwen3-1.7b-card-full": f"Qwen3-1.7B --loss full {_SFT}",
        "qwen3-0.6b-card-full": f"Qwen3-0.6B --loss full {_SFT}",
        "qwen3-0.6b-79gib-full": f"Qwen3-0.6B --memory 79.15GiB --loss full {_SFT}",
        "qwen3-1.7b-79gib-full": f"Qwen3-1.7B --memory 79.15GiB --loss full {_SFT}",
        "qwen3-1.7b-79gib-chunked": f"Qwen3-1.7B --memory 79.15GiB --loss chunked {_SFT}",
        "qwen3-4b-79gib": f"Qwen3-4B --memory 79.15GiB {_SFT}",
        "qwen3-0.6b-79gib-chunked": f"Qwen3-0.6B --memory 79.15GiB --loss chunked {_SFT}",
    },
    "published": {
        # Whole machines first: what needs fewer GPUs then fills what is left. Each begins at the
        # published length.
        "grpo-8b-4-sp4": f"Qwen3-8B --gpus 4 --ulysses 4 --start-length 51200 {_ENV} {_GRPO} "
        f"{_LONGER}",
        "grpo-4b-4-sp4": f"Qwen3-4B --gpus 4 --ulysses 4 --start-length 81920 {_ENV} {_GRPO} "
        f"{_LONGER}",
        "grpo-0.6b-4-sp4": f"Qwen3-0.6B --gpus 4 --ulysses 4 --start-length 112640 {_ENV} {_GRPO} "
        f"{_SHORT}",
        "grpo-4b-4-sp2": f"Qwen3-4B --gpus 4 --ulysses 2 --start-length 40960 {_ENV} {_GRPO} "
        f"{_LONGER}",
        "grpo-4b-4-sp1": f"Qwen3-4B --gpus 4 --ulysses 1 --start-length 20480 {_ENV} {_GRPO} "
        f"{_LONGER}",
        "grpo-0.6b-4-sp2": f"Qwen3-0.6B --gpus 4 --ulysses 2 --start-length 51200 {_ENV} {_GRPO} "
        f"{_SHORT}",
        "grpo-0.6b-4-sp1": f"Qwen3-0.6B --gpus 4 --ulysses 1 --start-length 28672 {_ENV} {_GRPO} "
        f"{_SHORT}",
        "grpo-4b-2-sp2": f"Qwen3-4B --gpus 2 --ulysses 2 --start-length 32768 {_ENV} {_GRPO} "
        f"{_LONGER}",
        "grpo-4b-2-sp1": f"Qwen3-4B --gpus 2 --ulysses 1 --start-length 16384 {_ENV} {_GRPO} "
        f"{_LONGER}",
        "grpo-0.6b-2-sp2": f"Qwen3-0.6B --gpus 2 --ulysses 2 --start-length 51200 {_ENV} {_GRPO} "
        f"{_SHORT}",
        "grpo-0.6b-2-sp1": f"Qwen3-0.6B --gpus 2 --ulysses 1 --start-length 28672 {_ENV} {_GRPO} "
        f"{_SHORT}",
        "grpo-1.7b-1": f"Qwen3-1.7B --gpus 1 --strategy fsdp --loss full --entropy full "
        f"--start-length 16384 {_GRPO} {_SHORT}",
        "grpo-0.6b-1": f"Qwen3-0.6B --gpus 1 --strategy fsdp --loss full --entropy full "
        f"--start-length 24576 {_GRPO} {_SHORT}",
        "grpo-1.7b-1-offload": f"Qwen3-1.7B --gpus 1 --offload {_ENV} --start-length 28672 "
        f"{_GRPO} {_LONGER}",
        "grpo-0.6b-1-offload": f"Qwen3-0.6B --gpus 1 --offload {_ENV} --start-length 28672 "
        f"{_GRPO} {_SHORT}",
        "grpo-1.7b-1-entropy": f"Qwen3-1.7B --gpus 1 {_SAVING} --start-length 16384 {_GRPO} "
        f"{_LONGER}",
        "grpo-0.6b-1-entropy": f"Qwen3-0.6B --gpus 1 {_SAVING} --start-length 24576 {_GRPO} "
        f"{_SHORT}",
    },
    "edges": {
        # One cell each: a search that knows its edge may be ended by hand, and no other cell waits
        # behind it.
        "edge-8b-2-full-native": f"Qwen3-8B --gpus 2 --ulysses 2 --loss full --allocator native "
        f"{_EDGE}",
        "edge-8b-2-full": f"Qwen3-8B --gpus 2 --ulysses 2 --loss full --allocator expandable "
        f"{_EDGE}",
        "edge-4b-2-full-native": f"Qwen3-4B --gpus 2 --ulysses 2 --loss full --allocator native "
        f"{_EDGE}",
        "edge-4b-2-full": f"Qwen3-4B --gpus 2 --ulysses 2 --loss full --allocator expandable "
        f"{_EDGE}",
        "edge-4b-1-full-offload": f"Qwen3-4B --gpus 1 --offload --loss full --allocator "
        f"expandable {_EDGE_OFFLOAD}",
        "edge-4b-1-chunked-offload": f"Qwen3-4B --gpus 1 --offload --loss chunked --allocator "
        f"expandable {_EDGE_OFFLOAD}",
        "edge-1.7b-1-full-offload": f"Qwen3-1.7B --gpus 1 --offload --loss full --allocator "
        f"expandable {_EDGE}",
        "edge-1.7b-1-chunked": f"Qwen3-1.7B --gpus 1 --loss chunked --allocator expandable {_EDGE}",
        "edge-4b-1-full-native": f"Qwen3-4B --gpus 1 --loss full --allocator native {_EDGE}",
        "edge-4b-1-full": f"Qwen3-4B --gpus 1 --loss full --allocator expandable {_EDGE}",
        "edge-4b-1-chunked": f"Qwen3-4B --gpus 1 --loss chunked --allocator expandable {_EDGE}",
        "edge-1.7b-1-full-native": f"Qwen3-1.7B --gpus 1 --loss full --allocator native {_EDGE}",
        "edge-1.7b-1-full": f"Qwen3-1.7B --gpus 1 --loss full --allocator expandable {_EDGE}",
        "edge-0.6b-1-full-native": f"Qwen3-0.6B --gpus 1 --loss full --allocator native {_EDGE}",
        "edge-0.6b-1-full": f"Qwen3-0.6B --gpus 1 --loss full --allocator expandable {_EDGE}",
        "edge-8b-4-full-native": f"Qwen3-8B --gpus 4 --ulysses 4 --loss full --allocator native "
        f"{_EDGE}",
        "edge-8b-4-full": f"Qwen3-8B --gpus 4 --ulysses 4 --loss full --allocator expandable "
        f"{_EDGE}",
    },
    "long": {
        "long-8b-4": f"Qwen3-8B --gpus 4 --ulysses 4 {_GRID} {_FURTHER}",
        "long-8b-4-offload": f"Qwen3-8B --gpus 4 --ulysses 4 --offload {_GRID} {_FURTHER}",
        "long-8b-2": f"Qwen3-8B --gpus 2 --ulysses 2 {_GRID} {_LONG}",
        "long-8b-2-offload": f"Qwen3-8B --gpus 2 --ulysses 2 --offload {_GRID} {_CHUNKED} "
        f"--timeout 10m",
        "long-0.6b-79gib": f"Qwen3-0.6B --gpus 1 --memory 79.15GiB --start-length 131072 "
        f"--resolution 8192 {_LONG}",
        "long-0.6b-1": f"Qwen3-0.6B --gpus 1 {_GRID} {_FURTHER}",
        "long-1.7b-1": f"Qwen3-1.7B --gpus 1 {_GRID} {_LONG}",
        "long-4b-1": f"Qwen3-4B --gpus 1 {_GRID} {_LONG}",
        # For machines of eight.
        "long-8b-8": f"Qwen3-8B --gpus 8 --ulysses 8 {_GRID} {_FURTHER}",
        "long-8b-8-offload": f"Qwen3-8B --gpus 8 --ulysses 8 --offload {_GRID} {_FURTHER}",
        "long-30b-a3b-8": f"Qwen3-30B-A3B --gpus 8 --ulysses 8 {_GRID} {_FURTHER}",
    },
}


def main() -> None:
    """Search on every GPU until all is answered or time is up, then print what is known."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--page",
        nargs="+",
        choices=list(PAGES),
        default=list(PAGES),
        help="pages to measure or print",
    )
    parser.add_argument(
        "--gpus", type=int, default=1, help="GPUs to use at once; what needs more is left out"
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="stop after this long; finished trials are kept"
    )
    parser.add_argument("--only", nargs="+", help="names of searches to run")
    parser.add_argument("--table", action="store_true", help="print the tables, measure nothing")
    parser.add_argument(
        "--predict",
        action="store_true",
        help="write NAME.prediction.json where there is none, measure nothing",
    )
    arguments = parser.parse_args()
    searches = {
        name: flags
        for page in arguments.page
        for name, flags in PAGES[page].items()
        if name in (arguments.only or PAGES[page])
    }
    if arguments.predict:
        for name, flags in searches.items():
            predict(name, flags)
        return
    if not arguments.table:
        measure(searches, gpus=arguments.gpus, deadline=time.monotonic() + 60 * arguments.minutes)
    for page in arguments.page:
        print(f"{table(page)}\n")


def measure(searches: dict[str, str], *, gpus: int, deadline: float) -> None:
    """Run the searches in their order, each as soon as its GPUs are free."""
    cards = _Cards(gpus)
    threads: list[threading.Thread] = []
    for name, flags in searches.items():
        count = _gpus(flags)
        if count > gpus:
            continue
        own = cards.take(count)
        if time.monotonic() > deadline:
            break
        threads.append(threading.Thread(target=_search, args=(name, flags, own, cards, deadline)))
        threads[-1].start()
    for thread in threads:
        thread.join()


class _Cards:
    """The GPUs that nobody uses."""

    def __init__(self, count: int) -> None:
        self._free = set(range(count))
        self._changed = threading.Condition()

    def take(self, count: int) -> list[int]:
        """Wait until this many are free, and take them."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) >= count)
            own = sorted(self._free)[:count]
            self._free -= set(own)
            return own

    def give_back(self, own: list[int]) -> None:
        """Others may have them."""
        with self._changed:
            self._free |= set(own)
            self._changed.notify_all()


def _gpus(flags: str) -> int:
    words = flags.split()
    return int(words[words.index("--gpus") + 1])


def _search(name: str, flags: str, own: list[int], cards: _Cards, deadline: float) -> None:
    """One search on its GPUs; when time is up it is interrupted as a person would."""
    words = [*flags.split(), "--study", str(HERE / f"{name}.jsonl"), "--log-dir", f"logs/{name}"]
    prediction = HERE / f"{name}.prediction.json"
    if prediction.is_file():
        words += ["--prediction", str(prediction)]
    try:
        with Path(f"{name}.log").open("w") as log:
            search = subprocess.Popen(
                [sys.executable, "-m", "highwater.cli.app", "find", *words],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, own))},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                search.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                search.send_signal(signal.SIGINT)
                search.wait()
    finally:
        cards.give_back(own)


def predict(name: str, flags: str) -> None:
    """What traces say of a search on the cards of this page, beside its study; kept if it is
    there.
    """
    path = HERE / f"{name}.prediction.json"
    if path.is_file():
        return
    model, *words = flags.split()
    starts = [at for at, word in enumerate(words) if word.startswith("--")]
    asked = {
        words[at][2:].replace("-", "_"): _value(words[at + 1 : end])
        for at, end in zip(starts, [*starts[1:], len(words)], strict=True)
    }
    gpus, memory = asked.pop("gpus"), asked.pop("memory", None)
    settings = {"offload": False} | {
        key: value for key, value in asked.items() if key not in ("proof", "timeout")
    }
    started = time.monotonic()
    prediction = highwater.predict(
        model, gpus=f"{gpus}xH200-141GB", gpu_memory=memory, exact=True, **settings
    )
    path.write_bytes(msgspec.json.format(msgspec.json.encode(prediction)) + b"\n")
    cells = ", ".join(f"{cell.cell.label} {cell.capacity_tokens:,}" for cell in prediction.cells)
    print(f"{name}: {cells} ({time.monotonic() - started:.0f} s)", flush=True)


def _value(words: list[str]) -> str | int | bool:
    """Of a flag: a switch is on, a number is one."""
    if not words:
        return True
    return int(words[0]) if words[0].isdecimal() else words[0]


def table(page: str) -> str:
    """One row per search and cell: what trained in full and what by memory alone, what ended it,
    the peak, tokens/s.
    """
    published = _published() if page == "published" else None
    head = [
        "search",
        "GPUs",
        "SP",
        "rung",
        "trained in full",
        "memory-only fit",
        "next, ran out",
        "peak reserved GiB",
        "tokens/s",
        "MFU",
    ]
    if published is not None:
        head.append("published, A100")
    rows = [_row(head), _row(["---"] * len(head))]
    for name in PAGES[page]:
        path = HERE / f"{name}.jsonl"
        if not path.is_file():
            continue
        study = highwater.open_study(path)
        for cell in study.question.cells:
            row = [
                name,
                str(cell.layout.gpus),
                str(cell.layout.ulysses_degree),
                cell.settings.label,
                *_figures(study, cell),
            ]
            if published is not None:
                key = (
                    PUBLISHED_SETTINGS[cell.settings.label],
                    cell.layout.gpus,
                    cell.layout.ulysses_degree,
                    study.question.model.name,
                )
                row.append(format_tokens(published.get(key)))
            rows.append(_row(row))
    return "\n".join(rows)


def _row(fields: list[str]) -> str:
    return f"| {' | '.join(fields)} |"


def _published() -> dict[tuple[str, int, int, str], int]:
    with PUBLISHED.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["max_model_len"]]
    return {
        (r["settings"], int(r["gpus"]), int(r["sp"]), r["model"]): int(r["max_model_len"])
        for r in rows
    }


def _figures(study: Study, cell: Cell) -> list[str]:
    """What the trials of one cell tell, also before its edge is known."""
    full, memory_only = (_results(study, cell, memory_only=kind) for kind in (False, True))
    trained = max((n for n, r in full.items() if r.outcome is Outcome.FIT), default=0)
    proven = max(
        (n for n, r in memory_only.items() if r.outcome is Outcome.MEMORY_ONLY_FIT), default=0
    )
    ran_out = [
        n
        for results in (full, memory_only)
        for n, r in results.items()
        if r.outcome.is_memory and n > max(trained, proven)
    ]
    best = full[trained] if trained > proven else memory_only.get(proven)
    over = " (over its budget)" if best is not None and (best.headroom_bytes or 0) < 0 else ""
    return [
        format_tokens(trained or None),
        format_tokens(proven if proven > trained else None) + over,
        format_tokens(min(ran_out, default=None)),
        "-" if best is None else f"{(best.peak_reserved_bytes or 0) / GIB:.2f}",
        f"{full[trained].tokens_per_s or 0:,.0f}" if trained else "-",
        f"{full[trained].mfu or 0:.1%}" if trained else "-",
    ]


def _results(study: Study, cell: Cell, *, memory_only: bool) -> dict[int, TrialResult]:
    """By length: the last finished trial of this kind."""
    return {
        trial.spec.length_tokens: trial.result
        for trial in study.trials
        if trial.result
        and trial.spec
        == study.question.trial(cell, trial.spec.length_tokens, memory_only=memory_only)
    }


if __name__ == "__main__":
    main()

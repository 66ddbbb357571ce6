"""Tokens/s and MFU of full trials at 32K and 128K, `chunked`, one sequence, on full cards; writes
JSON, prints the table.

``python docs/results/speed/speeds.py --gpus 1`` (GPUs) goes on with ``speeds.json`` beside it;
``--table`` only prints.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import highwater
from highwater.nouns.settings import Recompute
from highwater.nouns.trial import TrialResult
from highwater.units import GIB, format_tokens

FILE = Path(__file__).with_suffix(".json")
LENGTHS = (32_768, 131_072)
KEPT: Recompute = "all-but-attention"
CELLS: tuple[tuple[str, int, bool, Recompute], ...] = (
    *(
        (model, 1, False, how)
        for model in ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B")
        for how in ("layer", KEPT)
    ),
    *(
        ("Qwen3-8B", gpus, offload, how)
        for gpus in (2, 4, 8)
        for offload, how in ((False, "layer"), (False, KEPT), (True, "layer"))
    ),
    *(("Qwen3-30B-A3B", 8, False, how) for how in ("layer", KEPT)),
    *((model, 1, True, "layer") for model in ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B")),
)
"""Model, GPUs, offload, what is recomputed; each sequence is shared by all GPUs of a cell."""
HEADINGS = (
    *("model", "GPUs", "SP", "offload", "recomputed", "length"),
    *("outcome", "tokens/s", "MFU", "peak reserved GiB", "step s", "trial s"),
)


def main() -> None:
    """Try what is not in the file yet, then print what it says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gpus", type=int, nargs="+", default=[1], help="numbers of GPUs whose cells are tried"
    )
    parser.add_argument("--offload", action="store_true", help="only cells with offload")
    parser.add_argument(
        "--part", type=int, nargs=2, default=(0, 1), help="K of N: every Nth trial, from the Kth on"
    )
    parser.add_argument("--output", type=Path, default=FILE, help="the JSON file")
    parser.add_argument("--log-dir", default="logs/speeds", help="directory of logs")
    parser.add_argument("--table", action="store_true", help="print the table, measure nothing")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = (
        json.loads(arguments.output.read_text()) if arguments.output.is_file() else []
    )
    which, of = arguments.part
    cells = [each for each in CELLS if each[1] in arguments.gpus]
    if arguments.offload:
        cells = [each for each in cells if each[2]]
    asked = [(*cell, length) for cell in cells for length in LENGTHS][which::of]
    done = {(*cell_of(row), row["length_tokens"]) for row in rows}
    for model, gpus, offload, recompute, length in () if arguments.table else asked:
        if (model, gpus, offload, recompute, length) in done:
            continue
        result = highwater.run_trial(
            model,
            length,
            gpus=[gpus],
            ulysses=[gpus],
            loss="chunked",
            allocator="expandable",
            offload=offload,
            recompute=recompute,
            timeout="5m",
            log_dir=arguments.log_dir,
        )
        rows.append(row((model, gpus, offload, recompute), length, result))
        arguments.output.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


def row(cell: tuple[str, int, bool, Recompute], length: int, result: TrialResult) -> dict[str, Any]:
    """What is printed, and what it was made with."""
    model, gpus, offload, recompute = cell
    return {
        "model": model,
        "gpus": gpus,
        "ulysses_degree": gpus,
        "offload": offload,
        "recompute": recompute,
        "length_tokens": length,
        "outcome": result.outcome,
        "reason": result.reason,
        "tokens_per_s": result.tokens_per_s,
        "mfu": result.mfu,
        "step_time_s": result.step_time_s,
        "peak_reserved_bytes": [rank.memory.peak_reserved_bytes for rank in result.ranks],
        "wall_s": result.wall_s,
        "device_name": result.ranks[0].device_name if result.ranks else None,
        "versions": result.ranks[0].versions if result.ranks else {},
    }


def cell_of(row: dict[str, Any]) -> tuple[str, int, bool, Recompute]:
    """Of a row of the file."""
    return row["model"], row["gpus"], row["offload"], row["recompute"]


def table(rows: list[dict[str, Any]]) -> str:
    """One line a trial."""
    lines = [f"| {' | '.join(HEADINGS)} |", f"|{'---|' * len(HEADINGS)}"]
    for each in sorted(
        rows, key=lambda one: (one["gpus"], CELLS.index(cell_of(one)), one["length_tokens"])
    ):
        peak = max((n or 0 for n in each["peak_reserved_bytes"]), default=0) / GIB
        speed, mfu, step = each["tokens_per_s"], each["mfu"], each["step_time_s"]
        figures = (
            each["model"],
            str(each["gpus"]),
            str(each["ulysses_degree"]),
            "yes" if each["offload"] else "no",
            "all" if each["recompute"] == "layer" else "all but attention",
            format_tokens(each["length_tokens"]),
            str(each["outcome"]).replace("_", " "),
            "-" if speed is None else f"{speed:,.0f}",
            "-" if mfu is None else f"{mfu:.1%}",
            f"{peak:.2f}",
            "-" if step is None else f"{step:.1f}",
            f"{each['wall_s']:.0f}",
        )
        lines.append(f"| {' | '.join(figures)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""What saving adds to a trial's peak: HF weights, and a sharded checkpoint; writes JSON, prints the
table.

``python docs/results/checkpoints/saves.py --gpus 2`` tries one cell three times (GPUs), and writes
``saves.json`` beside it; ``--table`` only prints.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec

import highwater
from highwater.units import GIB

FILE = Path(__file__).with_suffix(".json")
SAVES: dict[str, dict[str, Any]] = {
    "none": {},
    "HF weights, last": {"save_hf": "last"},
    "sharded checkpoint": {"checkpoint": "sharded"},
}


def main() -> None:
    """Three trials, then the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="Qwen3-1.7B", help="catalog name")
    parser.add_argument("--length", type=int, default=8192, help="tokens of one sequence")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs")
    parser.add_argument("--output", type=Path, default=FILE, help="the JSON file")
    parser.add_argument("--table", action="store_true", help="print the table, measure nothing")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = (
        json.loads(arguments.output.read_text()) if arguments.output.is_file() else []
    )
    for name, fields in {} if arguments.table else SAVES.items():
        result = highwater.run_trial(
            arguments.model,
            arguments.length,
            gpus=[arguments.gpus],
            ulysses=[1],
            loss="chunked",
            allocator="expandable",
            log_dir="logs/saves",
            **fields,
        )
        rows.append(
            {
                "model": arguments.model,
                "gpus": arguments.gpus,
                "length_tokens": arguments.length,
                "saved": name,
                "outcome": result.outcome,
                "reason": result.reason,
                "peak_allocated_bytes": [rank.memory.peak_allocated_bytes for rank in result.ranks],
                "peak_reserved_bytes": [rank.memory.peak_reserved_bytes for rank in result.ranks],
                "device_used_bytes": [rank.memory.device_used_bytes for rank in result.ranks],
                "saves": [
                    [msgspec.to_builtins(save) for save in rank.saves] for rank in result.ranks
                ],
                "wall_s": result.wall_s,
                "device_name": result.ranks[0].device_name if result.ranks else None,
                "versions": result.ranks[0].versions if result.ranks else {},
            }
        )
        arguments.output.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """One line a trial: the fullest rank's peaks, and what was written."""
    head = (
        "cell",
        "saved",
        "outcome",
        "peak allocated GiB",
        "peak reserved GiB",
        "device used GiB",
        "written GiB",
        "seconds",
    )
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        fields = ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes")
        peaks = [f"{max((n or 0 for n in row[field]), default=0) / GIB:.3f}" for field in fields]
        written = sum(save["written_bytes"] for saves in row["saves"] for save in saves) / GIB
        seconds = max(
            (sum(save["time_s"] for save in saves) for saves in row["saves"]), default=0.0
        )
        cell = f"{row['model']}, {row['length_tokens']:,} tokens, {row['gpus']} GPUs"
        shown = (cell, row["saved"], row["outcome"], *peaks, f"{written:.2f}", f"{seconds:.1f}")
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

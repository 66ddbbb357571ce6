"""Peak memory of memory-only trials beside full ones: three lengths on three settings, real trials;
writes JSON, prints the table.

``python docs/results/lab/memory_only.py`` goes on with ``memory_only.json`` beside it, ``--gpus
4`` adds a sharded setting, and ``--table`` only prints. Exit status 1 where a peak is off by more
than 0.2 %.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import highwater
from highwater.nouns.trial import Outcome, TrialResult
from highwater.units import GIB, format_tokens

FILE = Path(__file__).with_suffix(".json")
LENGTHS = (32_768, 65_536, 131_072)
MOST = 0.002
"""RankShare of the full trial's peak by which the memory-only one's may differ."""
SETTINGS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B, chunked, expandable": {
        "model": "Qwen3-0.6B",
        "loss": "chunked",
        "allocator": "expandable",
    },
    "Qwen3-0.6B, full, native": {"model": "Qwen3-0.6B", "loss": "full", "allocator": "native"},
    "Qwen3-1.7B, chunked, native, 2 sequences": {
        "model": "Qwen3-1.7B",
        "loss": "chunked",
        "sequences_per_micro_batch": 2,
    },
}


def main() -> int:
    """Run what is not in the file yet, then print what it says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gpus",
        type=int,
        default=1,
        help="more than 1: a sharded setting, too, Ulysses over all of them",
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=list(LENGTHS), help="tokens of one sequence"
    )
    parser.add_argument("--log-dir", default="logs/memory-only", help="directory of logs")
    parser.add_argument("--output", type=Path, default=FILE, help="the JSON file")
    parser.add_argument("--table", action="store_true", help="print the table, measure nothing")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = (
        json.loads(arguments.output.read_text()) if arguments.output.is_file() else []
    )
    settings = dict(SETTINGS)
    if arguments.gpus > 1:
        name = f"Qwen3-4B, chunked, expandable, {arguments.gpus} GPUs, SP={arguments.gpus}"
        settings[name] = {"model": "Qwen3-4B", "loss": "chunked", "allocator": "expandable"}
        settings[name] |= {"gpus": [arguments.gpus], "ulysses": [arguments.gpus]}
    for name, fields in {} if arguments.table else settings.items():
        for length in arguments.lengths:
            if not any((row["setting"], row["length_tokens"]) == (name, length) for row in rows):
                rows.append(
                    {
                        "setting": name,
                        "length_tokens": length,
                        **pair(fields, length, arguments.log_dir),
                    }
                )
                arguments.output.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    return int(any(abs(row["deviation"]) > MOST for row in rows if row["deviation"] is not None))


def pair(fields: dict[str, Any], length: int, log_dir: str) -> dict[str, Any]:
    """A full trial and a memory-only one."""
    full = highwater.run_trial(length=length, log_dir=log_dir, **fields)
    memory_only = highwater.run_trial(length=length, log_dir=log_dir, attention_depth=1, **fields)
    is_pair = full.outcome is Outcome.FIT and memory_only.outcome is Outcome.MEMORY_ONLY_FIT
    peaks = full.peak_reserved_bytes or 0, memory_only.peak_reserved_bytes or 0
    return {
        "full": figures(full),
        "memory_only": figures(memory_only),
        "deviation": peaks[1] / peaks[0] - 1 if is_pair else None,
        "device_name": full.ranks[0].device_name if full.ranks else None,
        "versions": full.ranks[0].versions if full.ranks else {},
    }


def figures(result: TrialResult) -> dict[str, Any]:
    """What is compared, and what tells why there is nothing to compare."""
    return {
        "outcome": result.outcome,
        "reason": result.reason,
        "peak_reserved_bytes": [rank.memory.peak_reserved_bytes for rank in result.ranks],
        "peak_allocated_bytes": [rank.memory.peak_allocated_bytes for rank in result.ranks],
        "device_used_bytes": [rank.memory.device_used_bytes for rank in result.ranks],
        "wall_s": result.wall_s,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """One line per setting and length: both peaks, by how much they differ, both times."""
    lines = [
        "| setting | length | GiB reserved, full | memory-only | differs by | allocated differs "
        "by | wall s, full | memory-only |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["deviation"] is None:
            lines.append(
                f"| {row['setting']} | {format_tokens(row['length_tokens'])} | "
                f"{row['full']['outcome']} | "
                f"{row['memory_only']['outcome']} | - | - | - | - |"
            )
            continue
        full, ours = row["full"], row["memory_only"]
        allocated = max(ours["peak_allocated_bytes"]) / max(full["peak_allocated_bytes"]) - 1
        lines.append(
            f"| {row['setting']} | {format_tokens(row['length_tokens'])} | "
            f"{max(full['peak_reserved_bytes']) / GIB:.2f} | "
            f"{max(ours['peak_reserved_bytes']) / GIB:.2f} | {row['deviation']:+.3%} | "
            f"{allocated:+.3%} | "
            f"{full['wall_s']:.0f} | {ours['wall_s']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

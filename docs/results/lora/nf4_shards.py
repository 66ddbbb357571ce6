"""Measure steps of LoRA beside a model in NF4 that two ranks shard, beside what was predicted.

Both ranks share one GPU, over NCCL's sockets (``docs/results/context_parallel/one_gpu.py``): what
each allocates is what each of two GPUs allocates, and times mean nothing. No network, random
weights, PyTorch 2.12 or newer.

``python docs/results/lora/nf4_shards.py --predict >> docs/results/lora/nf4_shards.ndjson`` (no GPU)
predicts, a line a case; without ``--predict`` it measures; ``--table`` prints what was recorded.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).with_suffix(".ndjson")
sys.path += [str(HERE.parents[1] / "context_parallel"), str(HERE.parents[3] / "tests")]

import highwater  # noqa: E402

GIB = 1024**3
HOW: dict[str, Any] = {"loss": "chunked", "allocator": "expandable", "lora": 16, "lora_base": "nf4"}
CASES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B, sharded": {"model": "Qwen3-0.6B", "length": 8192},
    "Qwen3-0.6B, Ulysses 2": {"model": "Qwen3-0.6B", "length": 8192, "ulysses": 2},
    "Qwen3-0.6B, ring of 2": {"model": "Qwen3-0.6B", "length": 8192, "ring": 2},
    "Qwen3-0.6B, 2 copies": {"model": "Qwen3-0.6B", "length": 8192, "copies": 2},
    "Llama-3.1-8B, sharded": {"model": "Llama-3.1-8B", "length": 8192},
    "Llama-3.1-8B, Ulysses 2": {"model": "Llama-3.1-8B", "length": 8192, "ulysses": 2},
    "Llama-2-70B, sharded": {"model": "Llama-2-70B", "length": 4096, "activations": "host"},
}


def predicted(case: dict[str, Any]) -> dict[str, Any]:
    """Bytes that each rank is predicted to allocate at its peak, by formula and by trace."""
    asked = {"gpus": "2xH200-141GB", "offload": False, "activations": "gpu", **HOW, **case}
    found: dict[str, Any] = {}
    for name, exact in (("formula", False), ("trace", True)):
        cell = highwater.predict(exact=exact, **asked).explained
        replayed = cell.replayed
        found[name] = (
            cell.footprint.peak.bytes if replayed is None else replayed.peak_allocated_bytes
        )
    return found


def measured(case: dict[str, Any]) -> dict[str, Any]:
    """What two ranks on one GPU allocate, and the losses that both steps had."""
    import one_gpu
    import torch

    from trial_specs import trial_of

    degrees = {"ulysses": "ulysses_degree", "ring": "ring_degree", "copies": "replicate_degree"}
    layout = {degrees[name]: case[name] for name in degrees.keys() & case.keys()}
    fields = {**HOW, "activations": case.get("activations", "gpu"), "length_tokens": case["length"]}
    reports = one_gpu.run(trial_of(case["model"], gpus=2, **layout, **fields), timeout_s=400)
    return {
        "allocated": max(each.memory.peak_allocated_bytes or 0 for each in reports),
        "losses": [each.losses for each in reports],
        "gpu": torch.cuda.get_device_name(),
        "versions": reports[0].versions,
    }


def table(lines_of_json: list[str]) -> str:
    """What was recorded, a row a case."""
    rows: dict[str, dict[str, Any]] = {name: {"case": name} for name in CASES}
    for line in lines_of_json:
        each = json.loads(line)
        rows[each["case"]] |= each
    lines = [
        "| case | tokens | formula, GiB | trace, GiB | allocated, GiB |",
        "|---|---|---|---|---|",
    ]
    for row in rows.values():
        sizes = (row.get(name) for name in ("formula", "trace", "allocated"))
        shown = (f"{each / GIB:.3f}" if each else "-" for each in sizes)
        lines.append(f"| {row['case']} | {CASES[row['case']]['length']:,} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    """Predict, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--predict", action="store_true", help="measure nothing")
    parser.add_argument("--table", action="store_true", help="print the table alone")
    parser.add_argument("--only", default="", help="a word that a case's name has")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(HERE.read_text().splitlines()))
        return
    for name, case in CASES.items():
        if arguments.only not in name:
            continue
        row: dict[str, Any] = {"case": name}
        try:
            row |= predicted(case) if arguments.predict else measured(case)
        except Exception as error:  # noqa: BLE001 -- one case that fails ends no other
            row["failed"] = f"{type(error).__name__}: {error}"[-1500:]
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

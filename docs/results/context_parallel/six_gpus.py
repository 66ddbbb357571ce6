"""Six GPUs: published capacities of Trinity-RFT's trainer, whose heads let two of them share a
sequence, beside what this engine is predicted to hold by Ulysses 2, and by Ulysses 2 x ring 3.

``python docs/results/context_parallel/six_gpus.py`` (no GPU, seconds) predicts by formula, writes
``six_gpus.json`` beside it and prints the table; ``--table`` only prints.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import highwater
from highwater.units import format_tokens

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from table_accuracy import read_capacity_table

HERE = Path(__file__).parent
PUBLISHED = (
    HERE.parents[2] / "tests" / "data" / "published_capacity_a100_80gb.csv",
    HERE.parent / "h20" / "published_capacity_h20_96gb.csv",
)
GPUS = 6
WORKLOAD: dict[str, Any] = {
    "objective": "grpo",
    "entropy": "full",
    "loss": "full",
    "sequences_per_micro_batch": 2,
    "allocator": "expandable",
}
"""What was published: whole logits, of two sequences."""
RINGS = (1, 3)


def main() -> None:
    """Predict, write and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", action="store_true")
    recorded = HERE / "six_gpus.json"
    if not parser.parse_args().table:
        recorded.write_text(json.dumps(rows(), indent=1) + "\n")
    sys.stdout.write(table(json.loads(recorded.read_text())))


def rows() -> list[dict[str, Any]]:
    """One row for each GPU and model: the most of any settings that were published, and what is
    predicted without offload and with it.
    """
    found: list[dict[str, Any]] = []
    for path in PUBLISHED:
        of_six = {
            (gpu, model): max(
                tokens
                for (at, name, cell), tokens in read_capacity_table(path).capacity_tokens.items()
                if (at, name, cell.layout.gpus) == (gpu, model, GPUS)
            )
            for gpu, model, _ in read_capacity_table(path).capacity_tokens
        }
        for (gpu, model), tokens in of_six.items():
            row: dict[str, Any] = {"gpu": gpu, "model": model, "published_tokens": tokens}
            for ring in RINGS:
                prediction = highwater.predict(
                    model, gpus=f"{GPUS}x{gpu}", ulysses=[2], ring=[ring], **WORKLOAD
                )
                for each in prediction.cells:
                    offload = ", offload" if each.cell.settings.offload else ""
                    row[f"ring {ring}{offload}"] = each.capacity_tokens
            found.append(row)
    return found


def table(found: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    names = ("ring 1", "ring 3", "ring 1, offload", "ring 3, offload")
    head = (
        "| GPUs | model | published, SP 2 | predicted, Ulysses 2 | Ulysses 2 x ring 3 "
        "| Ulysses 2, offload | Ulysses 2 x ring 3, offload |\n|---|---|---|---|---|---|---|\n"
    )
    lines = (
        f"| {GPUS} x {row['gpu']} | {row['model']} | {format_tokens(row['published_tokens'])} | "
        + " | ".join(format_tokens(row[name]) for name in names)
        + " |\n"
        for row in found
    )
    return head + "".join(lines)


if __name__ == "__main__":
    main()

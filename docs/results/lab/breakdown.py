"""The formula beside traces where no search has a trial: peaks of allocated bytes, and of reserved
ones where sequences are short.

``python docs/results/lab/breakdown.py`` (no GPU, half a minute a trace) goes on with
``breakdown.json`` beside it; ``--table`` only prints. The file holds what the traces said, the
table asks the formula of today. Traces of what was tried, on one to four H200s, have every peak of
allocated bytes to the byte (``traced.py``); these are the only ones with nothing measured behind
them.
"""

import argparse
import json
import statistics
from importlib.metadata import version
from pathlib import Path
from typing import Any

import highwater
from highwater.memory.formula.constants import Footprint
from highwater.memory.formula.formula import likely_footprint
from highwater.memory.formula.layers import Step
from highwater.model.model import load_model
from highwater.nouns.codec import from_builtins, to_builtins
from highwater.nouns.study import Cell
from highwater.units import GIB, format_tokens

FILE = Path(__file__).with_suffix(".json")
ENV: dict[str, Any] = {"allocator": "expandable", "offload": False, "sequences_per_micro_batch": 1}
SFT: dict[str, Any] = ENV | {"objective": "sft", "loss": "chunked"}
GRPO: dict[str, Any] = ENV | {
    "objective": "grpo",
    "loss": "full",
    "entropy": "full",
    "sequences_per_micro_batch": 2,
}
PPO: dict[str, Any] = GRPO | {"objective": "ppo"}
REWARD: dict[str, Any] = ENV | {"objective": "rw", "loss": "full", "sequences_per_micro_batch": 2}
CASES: tuple[tuple[str, int, int, int, dict[str, Any]], ...] = (
    ("Llama-3.1-8B", 2, 2, 131_072, SFT),
    ("Llama-3.1-8B", 8, 1, 65_536, SFT | {"loss": "full"}),
    ("Qwen3-14B", 4, 4, 262_144, SFT),
    ("Qwen3-14B", 8, 2, 65_536, GRPO),
    ("Qwen3-32B", 8, 8, 524_288, SFT),
    ("Qwen3-32B", 8, 8, 524_288, SFT | {"offload": True}),
    ("Qwen3-30B-A3B", 8, 8, 1_310_720, SFT),
    ("Qwen3-30B-A3B", 8, 1, 32_768, GRPO),
    ("Qwen3-30B-A3B", 4, 4, 262_144, SFT | {"offload": True}),
    ("Qwen3-8B", 8, 8, 2_424_832, SFT),
    ("Qwen3-8B", 8, 8, 262_144, GRPO),
    ("Qwen3-8B", 16, 1, 32_768, SFT | {"loss": "full"}),
    ("Qwen3-4B", 2, 1, 32_768, PPO),
    ("Qwen3-1.7B", 1, 1, 32_768, PPO | {"critic": True}),
    ("Qwen3-1.7B", 1, 1, 65_536, REWARD),
    ("Qwen3-8B", 2, 2, 65_536, REWARD),
    ("Qwen3-0.6B", 1, 1, 32_768, SFT | {"recompute": "none"}),
    ("Qwen3-8B", 2, 1, 16_384, SFT | {"recompute": "none"}),
    ("Qwen3-1.7B", 1, 1, 131_072, SFT | {"recompute": "all-but-attention"}),
    ("Qwen3-8B", 4, 4, 262_144, SFT | {"recompute": "all-but-attention"}),
    ("Qwen3-0.6B", 1, 1, 131_072, SFT | {"mlp_tiles": 1}),
    ("Qwen3-8B", 4, 1, 32_768, SFT | {"strategy": "fsdp", "loss": "full"}),
    ("Qwen3-4B", 1, 1, 65_536, SFT | {"strategy": "fsdp", "offload": True}),
    ("Qwen3-4B", 4, 2, 131_072, GRPO | {"entropy": "chunked"}),
)
"""Model, GPUs, SP, length, settings."""
SHORT: tuple[tuple[str, int, int, int, dict[str, Any]], ...] = (
    *(("Qwen3-8B", 4, 4, length, SFT) for length in (8192, 32_768, 49_152, 65_536)),
    *(("Qwen3-8B", 8, 8, length, SFT) for length in (32_768, 65_536, 131_072)),
    *(("Qwen3-8B", 4, 4, length, SFT | {"loss": "full"}) for length in (8192, 32_768)),
    ("Qwen3-8B", 4, 1, 8192, SFT),
    *(("Qwen3-8B", 4, 4, length, SFT | {"offload": True}) for length in (32_768, 65_536)),
    *(("Qwen3-8B", 4, 4, length, GRPO) for length in (8192, 32_768)),
    ("Qwen3-8B", 8, 8, 32_768, PPO),
    *(("Qwen3-8B", 8, 8, length, REWARD) for length in (8192, 65_536)),
    ("Qwen3-14B", 4, 4, 32_768, SFT),
    ("Qwen3-14B", 8, 8, 131_072, SFT),
    *(("Qwen3-4B", 4, 4, length, SFT) for length in (8192, 32_768)),
    ("Qwen3-1.7B", 8, 1, 4096, SFT),
    *(("Qwen3-30B-A3B", 8, 8, length, SFT) for length in (32_768, 131_072)),
)
"""The same, around the lengths from which on the gradients of embedding and head find room in what
activations left."""
SHORT_HEADINGS = (
    *("model", "GPUs", "SP", "objective", "settings", "length"),
    "reserved, by formula GiB",
    "of it kept",
    "traced",
)
HEADINGS = (
    "model",
    "GPUs",
    "SP",
    "objective",
    "settings",
    "length",
    "peak in",
    "allocated, by formula GiB",
    "traced",
    "off by",
)


def main() -> None:
    """Trace what is not in the file yet, then print what it says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="print the table, trace nothing")
    rows: list[dict[str, Any]] = json.loads(FILE.read_text()) if FILE.is_file() else []
    for case in () if parser.parse_args().table else (*CASES, *SHORT):
        if not any(row["case"] == list(case) for row in rows):
            rows.append({"case": list(case), **traced(*case)})
            FILE.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


def traced(
    model: str, gpus: int, ulysses: int, length: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """The cell, and the peak of its trace."""
    asked = {
        "gpus": f"{gpus}xH200-141GB",
        "gpu_memory": "4TiB",
        "ulysses": [ulysses],
        "length": length,
        "activations": "gpu",
        "exact": True,
    }
    (answer,) = highwater.predict(model, **asked, **settings).cells
    document = to_builtins(answer)
    return {
        "cell": document["cell"],
        **{
            name: document["replayed"][name]
            for name in ("peak_allocated_bytes", "peak_reserved_bytes")
        },
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """A row for each case, then the errors; then those of short sequences."""
    short = [list(case) for case in SHORT]
    errors: list[float] = []
    lines = [f"| {' | '.join(HEADINGS)} |", f"|{'---|' * len(HEADINGS)}"]
    for row in (row for row in rows if row["case"] not in short):
        found = by_formula(row)
        errors.append(found.allocated_bytes / row["peak_allocated_bytes"] - 1)
        figures = (found.allocated_bytes, row["peak_allocated_bytes"])
        peak = max(found.phases, key=lambda phase: phase.bytes).name
        lines.append(
            f"| {' | '.join((*cell(row), peak, *map(gib, figures), f'{errors[-1]:+.2%}'))} |"
        )
    off = sorted(map(abs, errors))
    lines += [
        "",
        f"off by {statistics.median(off):.2%} (median), {off[-1]:.2%} (most) of {len(off)}",
        "",
    ]
    lines += [f"| {' | '.join(SHORT_HEADINGS)} |", f"|{'---|' * len(SHORT_HEADINGS)}"]
    apart: list[int] = []
    for row in (row for row in rows if row["case"] in short):
        found = by_formula(row)
        figures = (found.reserved_bytes, found.cached_bytes, row["peak_reserved_bytes"])
        apart.append(abs(found.reserved_bytes - row["peak_reserved_bytes"]))
        lines.append(f"| {' | '.join((*cell(row), *map(gib, figures)))} |")
    return "\n".join(
        [
            *lines,
            "",
            f"{gib(statistics.median(apart))} GiB apart (median), {gib(max(apart))} (most) of "
            f"{len(apart)}",
        ]
    )


def by_formula(row: dict[str, Any]) -> Footprint:
    """What it says of a row today."""
    (model, _, _, length, _), context = row["case"], from_builtins(row["cell"], Cell)
    return likely_footprint(
        Step(load_model(model).shape, context.settings, context.layout, length_tokens=length)
    )


def cell(row: dict[str, Any]) -> tuple[str, ...]:
    """A row's first columns."""
    (model, gpus, ulysses, length, _), settings = (
        row["case"],
        from_builtins(row["cell"], Cell).settings,
    )
    besides = [
        *(["FSDP1"] if settings.strategy == "fsdp" else []),
        *(["critic"] if settings.critic else []),
    ]
    return (
        model,
        str(gpus),
        str(ulysses),
        settings.objective,
        ", ".join([settings.label, *besides]),
        format_tokens(length),
    )


def gib(number_of_bytes: float) -> str:
    """As in the tables."""
    return f"{number_of_bytes / GIB:.2f}"


if __name__ == "__main__":
    main()

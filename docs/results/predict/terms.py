"""The formula's peak of allocated bytes beside that of a trace, of models, layouts and settings that no search has a trial of.

``python docs/results/predict/terms.py`` (no GPU, half a minute a trace) goes on with ``terms.json`` beside it; ``--table`` only
prints. The file holds what the traces said, the table asks the formula of today. Traces of what was tried, on one to four H200s,
have every peak of allocated bytes to the byte (``traced.py``); these are the only ones with nothing measured behind them.
"""

import argparse
import json
import statistics
from importlib.metadata import version
from pathlib import Path
from typing import Any

import highwater
from highwater.prediction.formula import likely_footprint
from highwater.spec.codec import from_builtins, to_builtins
from highwater.spec.model import load_model
from highwater.spec.study import Cell
from highwater.units import GIB, format_tokens

FILE = Path(__file__).with_suffix(".json")
ENV: dict[str, Any] = {"allocator": "expandable", "offload": False, "sequences_per_micro_batch": 1}
SFT: dict[str, Any] = ENV | {"objective": "sft", "loss": "chunked"}
GRPO: dict[str, Any] = ENV | {"objective": "grpo", "loss": "full", "entropy": "full", "sequences_per_micro_batch": 2}
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
HEADINGS = ("model", "GPUs", "SP", "objective", "settings", "length", "peak in", "allocated, by formula GiB", "traced", "off by")


def main() -> None:
    """Trace what is not in the file yet, then print what it says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the table, trace nothing")
    rows: list[dict[str, Any]] = json.loads(FILE.read_text()) if FILE.is_file() else []
    for case in () if parser.parse_args().table else CASES:
        if not any(row["case"] == list(case) for row in rows):
            rows.append({"case": list(case), **traced(*case)})
            FILE.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


def traced(model: str, gpus: int, ulysses: int, length: int, settings: dict[str, Any]) -> dict[str, Any]:
    """The cell, and the peak of its trace."""
    asked = {"gpus": f"{gpus}xH200-141GB", "gpu_memory": "4TiB", "ulysses": [ulysses], "length": length, "exact": True}
    (cell,) = highwater.predict(model, **asked, **settings).cells
    document = to_builtins(cell)
    return {
        "cell": document["cell"],
        "peak_allocated_bytes": document["replayed"]["peak_allocated_bytes"],
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """A row for each case, then the errors."""
    lines = [f"| {' | '.join(HEADINGS)} |", f"|{'---|' * len(HEADINGS)}"]
    errors: list[float] = []
    for row in rows:
        (model, _, _, length, _), cell = row["case"], from_builtins(row["cell"], Cell)
        found = likely_footprint(load_model(model).shape, cell.settings, cell.layout, length_tokens=length)
        critic = ["critic"] if cell.settings.critic else []
        errors.append(found.allocated_bytes / row["peak_allocated_bytes"] - 1)
        figures = (
            model,
            str(cell.layout.gpus),
            str(cell.layout.ulysses_degree),
            cell.settings.objective,
            ", ".join([cell.settings.label, *(["FSDP1"] if cell.settings.strategy == "fsdp" else []), *critic]),
            format_tokens(length),
            max(found.phases, key=lambda phase: phase.bytes).name,
            f"{found.allocated_bytes / GIB:.2f}",
            f"{row['peak_allocated_bytes'] / GIB:.2f}",
            f"{errors[-1]:+.2%}",
        )
        lines.append(f"| {' | '.join(figures)} |")
    off = sorted(map(abs, errors))
    return "\n".join([*lines, "", f"off by {statistics.median(off):.2%} (median), {off[-1]:.2%} (most) of {len(off)}"])


if __name__ == "__main__":
    main()

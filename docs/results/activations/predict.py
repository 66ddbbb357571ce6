"""The edges that trials are to prove, predicted by formula in a commit before any of them ran:
``python docs/results/activations/predict.py > docs/results/activations/predicted.json``.
"""

import json
import sys
from typing import Any

from highwater.memory.formula.formula import upper_footprint
from highwater.memory.formula.layers import Step
from highwater.model.model import load_model
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings

EDGES: tuple[tuple[str, int, dict[str, Any], dict[str, int]], ...] = (
    ("Llama-3.1-8B", 262_144, {"lora": 32}, {}),
    ("Llama-3.1-8B", 450_560, {"lora": 32}, {}),
    ("Llama-3.1-8B", 550_912, {"lora": 32, "attention_head_groups": 4, "layers_on_gpu": 8}, {}),
    ("Qwen3-0.6B", 1_302_528, {"attention_head_groups": 4}, {}),
    ("Qwen3-4B", 704_512, {"attention_head_groups": 4, "layers_on_gpu": 6}, {}),
    (
        "Qwen3-8B",
        131_072,
        {"recompute": "all-but-attention", "attention_head_groups": 4},
        {"gpus": 2, "ulysses_degree": 2},
    ),
)
"""Models, tokens, settings besides those of all, and layouts."""
ALL = {
    "loss": "chunked",
    "allocator": "expandable",
    "accumulates": False,
    "rope": "yarn",
    "activations": "host",
}


def main() -> None:
    """Print a JSON row for each edge."""
    rows: list[dict[str, object]] = []
    for model, tokens, settings, layout in EDGES:
        step = Step(load_model(model).shape, Settings(**ALL, **settings), Layout(**layout), tokens)
        found = upper_footprint(step)
        rows.append(
            {
                "model": model,
                "length_tokens": tokens,
                **ALL,
                **settings,
                **layout,
                "allocated_bytes": found.allocated_bytes,
                "device_used_bytes": found.device_used_bytes,
                "host_bytes": found.host_bytes,
            }
        )
    json.dump(rows, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()

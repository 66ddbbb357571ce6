"""Trials at predicted edges, with no headroom: for thirteen plans the longest safe length in
24 GiB of a GPU by formula, and the command that tries it; in a commit before any of them ran.
``python docs/results/activations/edges.py > docs/results/activations/edges.json``
"""

import json
import sys

import highwater

MEMORY = "24GiB"
HOST = "100GiB"
USUAL = {"loss": "chunked", "allocator": "expandable", "micro_batches": 1, "rope": "yarn"}
KEPT = {"recompute": "all-but-attention"}
PLANS: tuple[tuple[str, dict[str, object]], ...] = (
    ("Qwen3-0.6B", {}),
    ("Qwen3-0.6B", {**KEPT}),
    ("Qwen3-0.6B", {"attention_head_groups": 4}),
    ("Qwen3-0.6B", {**KEPT, "attention_head_groups": 2}),
    ("Qwen3-0.6B", {"layers_on_gpu": 8}),
    ("Qwen3-0.6B", {"offload": "states"}),
    ("Qwen3-1.7B", {"lora": 32}),
    ("Qwen3-1.7B", {**KEPT, "lora": 32}),
    ("Qwen3-1.7B", {"lora": 32, "attention_head_groups": 4}),
    ("Llama-3.1-8B", {"lora": 32}),
    ("Llama-3.1-8B", {**KEPT, "lora": 32}),
    ("Llama-3.1-8B", {"lora": 32, "lora_base": "nf4", "attention_head_groups": 4}),
    ("Qwen3-4B", {"lora": 32, "attention_head_groups": 4, "layers_on_gpu": 6}),
)
"""Models, and settings besides those of all. NF4 has not run, for want of bitsandbytes; the last
stands in for it."""


def main() -> None:
    """Print a JSON row for each plan."""
    rows: list[dict[str, object]] = []
    for model, settings in PLANS:
        how = {**USUAL, "activations": "host", "offload": False, **settings}
        where = {"gpus": "H200", "gpu_memory": MEMORY, "host_memory": HOST, "headroom": "1KiB"}
        found = highwater.predict(model, ulysses=[1], **where, **how)
        (cell,) = found.cells
        flags = [
            word
            for name, value in how.items()
            if value is not False
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        length = ["--length", str(cell.capacity_tokens), "--memory", MEMORY]
        rows.append(
            {
                "model": model,
                **how,
                "length_tokens": cell.capacity_tokens,
                "device_used_bytes": cell.device_used_bytes,
                "host_bytes": cell.footprint.host_bytes,
                "command": " ".join([model, *flags, *length, "--attention-depth", "1"]),
            }
        )
    json.dump(rows, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()

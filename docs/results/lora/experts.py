"""LoRA on the experts of Qwen3-30B-A3B: what the formula says of two trials, and the commands.
``python docs/results/lora/experts.py > docs/results/lora/experts.json``
"""

import json
import sys

import highwater

TARGETS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
TRIALS = ((1, 8, 32_768), (2, 32, 40_960))
"""GPUs, rank, tokens."""
SETTINGS = {"loss": "chunked", "allocator": "expandable", "micro_batches": 1}


def main() -> None:
    """Print a row for each trial."""
    rows = []
    for gpus, rank, length in TRIALS:
        how = {**SETTINGS, "activations": "host", "lora": rank, "lora_targets": TARGETS}
        where = {"gpus": f"{gpus}xH100-80GB", "host_memory": "120GiB"}
        found = highwater.predict(
            "Qwen3-30B-A3B", length=length, ulysses=[1], offload=False, **where, **how
        )
        (cell,) = found.cells
        words = [
            word
            for name, value in how.items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        asked = ["Qwen3-30B-A3B", "--gpus", str(gpus), "--length", str(length), *words]
        rows.append(
            {
                "command": " ".join(["highwater", "try", *asked]),
                "allocated_bytes": cell.footprint.allocated_bytes,
                "device_used_bytes": cell.device_used_bytes,
                "host_bytes": cell.footprint.host_bytes,
                "step_time_s": cell.step.time_s if cell.step else None,
            }
        )
    json.dump(rows, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()

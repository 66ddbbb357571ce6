"""Print DPO's measured trials beside what the formula predicts of them.

``python docs/results/gpu/dpo.py`` (no GPU). Each entry of ``dpo.json`` is what
``highwater try Qwen3-0.6B --objective dpo --sequences-per-micro-batch 2 --gpus 1 --length LENGTH
--json`` printed on an H200, with the settings that the entry itself names.
"""

import json
from pathlib import Path

import highwater

GIB = 1024**3
TRIALS = Path(__file__).with_name("dpo.json")


def main() -> None:
    """Print one row a trial."""
    print("| length, tokens | settings | predicted, GiB | measured, GiB | losses |")
    print("|---|---|---|---|---|")
    for trial in json.loads(TRIALS.read_text()):
        settings, length = trial["spec"]["settings"], trial["spec"]["length_tokens"]
        said = highwater.predict(
            "Qwen3-0.6B",
            gpus="1xH200-141GB",
            length=length,
            objective="dpo",
            sequences_per_micro_batch=2,
            **{name: settings[name] for name in ("loss", "allocator", "offload")},
        )
        (cell,) = said.cells
        rank = trial["result"]["ranks"][0]
        measured = rank["memory"]["device_used_bytes"] / GIB
        used = cell.interval
        between = f"{used.low_bytes / GIB:.2f} to {used.high_bytes / GIB:.2f}"
        losses = ", ".join(f"{loss:.3f}" for loss in rank["losses"])
        label = cell.cell.settings.label
        print(f"| {length:,} | {label} | {between} | {measured:.2f} | {losses} |")


if __name__ == "__main__":
    main()

"""The capacity of a script that accelerate launches on one GPU, found by ``highwater find``'s own
search: hf_trainer.py beside this file, Hugging Face's Trainer under FSDP2.

    python accelerate_capacity.py OUT
    python accelerate_capacity.py OUT --accelerate /tmp/site/bin/accelerate

What it writes is as trl_capacity.py says. Three or four trials of seconds each.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from trl_capacity import searched, table

MODEL = "Qwen3-0.6B"
SCRIPT = Path(__file__).with_name("hf_trainer.py")
CASES: dict[str, dict[str, Any]] = {
    # states of 9 GiB, and logits of about 2 MiB a token in Hugging Face's own loss
    "one-gpu-fsdp2": {},
    # the script's own recomputation in the place of FSDP's
    "one-gpu-fsdp2-script-recomputes": {"recompute": "none"},
}


def main() -> None:
    """Search the cases that were named, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--case", nargs="+", choices=CASES, default=["one-gpu-fsdp2"])
    parser.add_argument("--accelerate", default="accelerate", help="the program")
    parser.add_argument("--minutes", type=float, default=4.0, help="longest time of one search")
    words = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched: the model is made here
    words.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for case in words.case:
        row = {"case": case, "trainer": "accelerate"}
        rows.append(searched(words.out, row, MODEL, settings_of(words, case)))
        print(json.dumps(rows[-1]), flush=True)
    print(table(rows))


def settings_of(words: argparse.Namespace, case: str) -> dict[str, Any]:
    """What ``find`` is asked."""
    script = f"{SCRIPT} --model {{model}} --max-len {{length}} --steps {{steps}}"
    return {
        "trainer": "accelerate",
        "command": f"{words.accelerate} launch {script} --output {{output}}",
        "gpus": [1],
        "memory": "24GiB",
        "allocator": "expandable",
        "steps": 2,
        "start_length": 2048,
        "resolution": 2048,
        "max_length": 14336,
        "study": str(words.out / f"{case}-accelerate.jsonl"),
        "log_dir": str(words.out / "logs"),
        "budget": f"{words.minutes:.1f}m",
        "no_diagnose": True,
        **CASES[case],
    }


if __name__ == "__main__":
    main()

"""Trains a small model to copy what stands at the beginning of a sequence, by dense attention and
by sparse patterns, and prints the losses beside each other.

``python docs/results/attention/copy_task.py`` (a CPU, some minutes; ``--device cuda`` on a GPU)
trains each with ``highwater try`` on ``copy_batches.py`` and writes ``copy_task.json`` beside this
file; ``--table`` only prints. A loss of 2.77, the logarithm of 16 symbols, is a guess. What keeps
the beginning can learn, what does not cannot.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
FILE = HERE.with_suffix(".json")
LENGTH_TOKENS = 256
SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 18,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SPARSE = "--attention block_sparse --block-size 32 --pattern-type"
CONTENDERS = {
    "dense": "",
    "global_local, 64 tokens and a window of 64": f"{SPARSE} global_local --local-window-size 64",
    "random, half": f"{SPARSE} random --sparsity-ratio 0.5",
    "strided, half": f"{SPARSE} strided --sparsity-ratio 0.5",
    "local_window of 64, which does not reach": f"{SPARSE} local_window --local-window-size 64",
}
TOLD = (1, 20, 40, 60, 80, 100)


def main() -> None:
    """Train, write and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=max(TOLD))
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if not arguments.table:
        found: dict[str, Any] = {"device": arguments.device, **versions(), "losses": {}}
        for name, flags in CONTENDERS.items():
            found["losses"][name] = trained(flags.split(), arguments)
            FILE.write_text(json.dumps(found) + "\n")
            print(name, found["losses"][name][-1], file=sys.stderr)
    print(table(json.loads(FILE.read_text())["losses"]))


def versions() -> dict[str, str]:
    """Of what trained."""
    return {name: version(name) for name in ("highwater", "torch", "transformers")}


def trained(flags: list[str], arguments: argparse.Namespace) -> list[float]:
    """Losses of every step."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        command = [
            *(sys.executable, "-P", "-m", "highwater", "try", folder, *flags),
            *("--device", arguments.device, "--length", str(LENGTH_TOKENS)),
            *("--steps", str(arguments.steps), "--micro-batches", "1"),
            *("--sequences-per-micro-batch", "8", "--learning-rate", "3e-3"),
            *("--data", "copy_batches:batches", "--log-dir", f"{folder}/logs", "--json"),
        ]
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": f"{HERE.parent}:{os.environ.get('PYTHONPATH', '')}"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        (log,) = Path(folder, "logs").rglob("*.statistics.jsonl")
        return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


def table(losses: dict[str, list[float]]) -> str:
    """The losses after some steps, as Markdown."""
    rows = [
        f"| {name} | {' | '.join(f'{of_steps[step - 1]:.3f}' for step in TOLD)} |"
        for name, of_steps in losses.items()
    ]
    head = f"| attention | {' | '.join(f'step {step}' for step in TOLD)} |"
    return "\n".join((head, "|---" * (len(TOLD) + 1) + "|", *rows))


if __name__ == "__main__":
    main()

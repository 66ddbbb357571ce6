"""The same training by other layouts: tokens, loss and perplexity of each step, beside one rank's.

``python docs/results/context_parallel/topology.py`` trains 20 steps of ``tiny`` on the CPU by each
layout, up to eight processes (minutes; 8 GiB of memory), reads the statistics that each trial
wrote, and writes ``topology.json`` beside it; ``--device cuda`` trains ``--model`` on as many GPUs
as there are. ``--table`` only prints.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
LAYOUTS = (
    "--gpus 1",
    "--gpus 2 --ulysses 2",
    "--gpus 2 --ring 2",
    "--gpus 3 --ring 3",
    "--gpus 4 --ulysses 2 --ring 2",
    "--gpus 4 --ring 2 --copies 2 --micro-batches 1",
    "--gpus 6 --ulysses 2 --ring 3",
    "--gpus 8 --ulysses 2 --ring 4",
)
COUNTED = ("n_tokens", "n_valid_tokens", "prompt_tokens", "n_documents")
COMPARED = ("loss", "ppl_avg", "ppl_min", "ppl_max", "gradient_norm")


def main() -> None:
    """Train, write and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--gpus", type=int, default=8, help="the most processes of a layout")
    parser.add_argument("--length", type=int, default=509)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if not arguments.table:
        layouts = [each for each in LAYOUTS if int(each.split()[1]) <= arguments.gpus]
        found = {layout: trained(layout, arguments) for layout in layouts}
        FILE.write_text(
            json.dumps({"question": vars(arguments), "layouts": found}, indent=1) + "\n"
        )
    sys.stdout.write(table(json.loads(FILE.read_text())["layouts"]))


def trained(layout: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The statistics of every step, and what it ran on."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-P", "-m", "highwater", "try", arguments.model, *layout.split()]
        words += ["--device", arguments.device, "--length", str(arguments.length), "--json"]
        words += ["--steps", str(arguments.steps), "--log-dir", folder]
        words += ["--memory", "2GiB"] if arguments.device == "cpu" else []
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        (path,) = Path(folder).rglob("*.statistics.jsonl")
        steps = [json.loads(line) for line in path.read_text().splitlines()]
    rank = json.loads(done.stdout)["result"]["ranks"][0]
    kept = [{name: step[name] for name in ("step", *COUNTED, *COMPARED)} for step in steps]
    return {"steps": kept, "versions": rank["versions"], "device_name": rank["device_name"]}


def table(found: dict[str, Any]) -> str:
    """One row a layout: the largest deviation of any step from one rank's, relative."""
    first = found[LAYOUTS[0]]["steps"]
    head = ("layout", "steps", "tokens", *COMPARED)
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for layout, of in found.items():
        pairs = list(zip(of["steps"], first, strict=True))
        equal = all(mine[name] == theirs[name] for mine, theirs in pairs for name in COUNTED)
        off = [max(abs(a[name] / b[name] - 1) for a, b in pairs) for name in COMPARED]
        cells = (layout, str(len(pairs)), "the same" if equal else "OTHERS")
        lines.append(f"| {' | '.join((*cells, *(f'{each:.1e}' for each in off)))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

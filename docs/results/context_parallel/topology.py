"""The same training by other layouts: tokens, loss and perplexity of each step, beside one rank's.

``python docs/results/context_parallel/topology.py`` trains 20 steps of ``tiny`` on the CPU by each
layout, up to eight processes (minutes; 8 GiB of memory), reads the statistics that each trial
wrote, and writes ``topology.json`` beside it. With ``--device cuda`` ``--model`` is trained in
bfloat16, its ranks on one GPU (``one_gpu.py``): ``topology_cuda.json``. ``--table`` only prints.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
FILES = {"cpu": HERE.with_suffix(".json"), "cuda": HERE.with_name("topology_cuda.json")}
TIMEOUT_S = 500
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
DEGREES = {
    "gpus": "gpus",
    "ulysses_degree": "ulysses",
    "ring_degree": "ring",
    "replicate_degree": "copies",
}
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
    parser.add_argument("--only", nargs="+", help="layouts; what is known of others stays")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    file = FILES[arguments.device]
    if not arguments.table:
        found: dict[str, Any] = {}
        if arguments.only:
            found = json.loads(file.read_text())["layouts"]
        layouts = [each for each in LAYOUTS if int(each.split()[1]) <= arguments.gpus]
        for layout in arguments.only or layouts:
            try:
                found[layout] = trained(layout, arguments)
            except (RuntimeError, subprocess.SubprocessError) as error:  # the others are run
                found[layout] = {"failed": str(error)[-2000:]}
            whole = {"question": vars(arguments), "layouts": found}
            file.write_text(json.dumps(whole, indent=1) + "\n")
    sys.stdout.write(table(json.loads(file.read_text())["layouts"]))


def trained(layout: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The statistics of every step, and what it ran on."""
    run = on_one_gpu if arguments.device == "cuda" else on_the_cpu
    steps, rank = run(layout, arguments)
    kept = [{name: step[name] for name in ("step", *COUNTED, *COMPARED)} for step in steps]
    return {"steps": kept, "versions": rank["versions"], "device_name": rank["device_name"]}


Steps = list[dict[str, Any]]


def on_the_cpu(layout: str, arguments: argparse.Namespace) -> tuple[Steps, Any]:
    """Each step's statistics, and the first rank's report."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-P", "-m", "highwater", "try", arguments.model, *layout.split()]
        words += ["--device", "cpu", "--length", str(arguments.length), "--json"]
        words += ["--steps", str(arguments.steps), "--log-dir", folder, "--memory", "2GiB"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        (path,) = Path(folder).rglob("*.statistics.jsonl")
        return read_steps(path), json.loads(done.stdout)["result"]["ranks"][0]


def on_one_gpu(layout: str, arguments: argparse.Namespace) -> tuple[Steps, Any]:
    """The same, in bfloat16 and over NCCL, of ranks that share a GPU."""
    import one_gpu

    from highwater.model.model import load_model
    from highwater.nouns.layout import Layout
    from highwater.nouns.settings import Settings
    from highwater.nouns.trial import StatisticsFiles, TrialSpec

    flags = dict(zip(*[iter(layout.split())] * 2, strict=True))
    degrees = {name: int(flags.get(f"--{flag}", 1)) for name, flag in DEGREES.items()}
    micro_batches = 2 // Layout(**degrees).data_parallel_degree
    model = load_model(arguments.model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "statistics.jsonl")
        spec = TrialSpec(
            model_name=model.name,
            model_directory=model.directory,
            config_digest=model.config_digest,
            device="cuda",
            layout=Layout(**degrees),
            settings=Settings(loss="chunked", accumulates=micro_batches > 1),
            length_tokens=arguments.length,
            micro_batches=micro_batches,
            steps=arguments.steps,
            statistics=StatisticsFiles(path=str(path)),
        )
        (rank, *_) = one_gpu.run(spec, timeout_s=TIMEOUT_S)
        return read_steps(path), {"versions": rank.versions, "device_name": rank.device_name}


def read_steps(path: Path) -> Steps:
    """The lines of a trial's statistics."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(found: dict[str, Any]) -> str:
    """One row a layout: the largest deviation of any step from one rank's, relative."""
    first = found[LAYOUTS[0]]["steps"]
    head = ("layout", "steps", "tokens", *COMPARED)
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for layout, of in found.items():
        if "failed" in of:
            lines.append(f"| {layout} | failed |")
            continue
        pairs = list(zip(of["steps"], first, strict=True))
        equal = all(mine[name] == theirs[name] for mine, theirs in pairs for name in COUNTED)
        off = [max(abs(a[name] / b[name] - 1) for a, b in pairs) for name in COMPARED]
        on = "" if of["device_name"] == "CPU" else f", {of['device_name']}"
        cells = (layout + on, str(len(pairs)), "the same" if equal else "OTHERS")
        lines.append(f"| {' | '.join((*cells, *(f'{each:.1e}' for each in off)))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

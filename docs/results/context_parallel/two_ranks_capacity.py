"""Capacities of two ranks that share one sequence, Ulysses and a ring, in 79.15 GiB each: predicted
by trace, then tried by memory-only proof.

``python docs/results/context_parallel/two_ranks_capacity.py --predict`` (no GPU) writes what a
trace says into ``two_ranks_capacity.json``; without ``--predict``, on one H200, rank 0 of the two
trains at the predicted capacity and at the next length, its links left out (``two_ranks.py``) and
attention over whole documents in the last layer alone. Its allocator gets what the prediction
leaves it: 79.15 GiB less context and NCCL. A row is written as soon as it is there; ``--table``
only prints.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from two_ranks import EXPANDABLE, Case, leave_links_out, ours, spec_of

FILE = Path(__file__).with_suffix(".json")
GIB = 1024**3
MEMORY_BYTES = round(79.15 * GIB)
MODEL, LAYERS = "Qwen3-8B", 36
TRIAL_S = 150
KINDS = [
    (by, recompute) for recompute in ("layer", "all-but-attention") for by in ("ulysses", "ring")
]


def main() -> None:
    """Predict, try and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--predict", action="store_true", help="predict by trace, try nothing")
    parser.add_argument("--only", default="", help="a word that is in what is tried")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        _train(**json.loads(arguments.run))
        return
    rows: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if FILE.is_file() else {}
    for shared_by, recompute in [] if arguments.table else KINDS:
        if arguments.only not in f"{shared_by}, {recompute}":
            continue
        row = rows.setdefault(f"{shared_by}, {recompute}", {"tried": {}})
        if arguments.predict:
            row["predicted"] = _predicted(shared_by, recompute)
            FILE.write_text(json.dumps(rows, indent=1) + "\n")
            continue
        for length in (row["predicted"]["fits_tokens"], row["predicted"]["does_not_fit_tokens"]):
            row["tried"][str(length)] = tried = _tried(shared_by, recompute, length, row)
            FILE.write_text(json.dumps(rows, indent=1) + "\n")
            print(json.dumps({"case": [shared_by, recompute, length], **tried}), flush=True)
    print(table(rows))


def _predicted(shared_by: str, recompute: str) -> dict[str, Any]:
    import highwater

    (cell,) = highwater.predict(
        MODEL,
        gpus="2xH200-141GB",
        gpu_memory=MEMORY_BYTES,
        **{shared_by: [2]},
        recompute=recompute,
        loss="chunked",
        allocator="expandable",
        micro_batches=1,
        offload=False,
        exact=True,
    ).cells
    likely, step = cell.likely_edge_tokens, 10_240
    return {
        "fits_tokens": likely,
        "does_not_fit_tokens": likely + step,
        "certain_tokens": cell.capacity_tokens,
        "allocator_cap_bytes": MEMORY_BYTES - cell.footprint.outside_bytes,
    }


def _tried(shared_by: str, recompute: str, length: int, row: dict[str, Any]) -> dict[str, Any]:
    """How a trial ends, in a process of its own."""
    question = {
        "case": Case(MODEL, LAYERS, length, shared_by, recompute, "left-out"),
        "cap_bytes": row["predicted"]["allocator_cap_bytes"],
    }
    command = [sys.executable, str(Path(__file__).resolve()), "--run", json.dumps(question)]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    try:
        done = subprocess.run(
            command,
            env=os.environ | EXPANDABLE | ranks,
            timeout=TRIAL_S,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"outcome": f"not done in {TRIAL_S} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"outcome": " ".join(done.stderr.split())[-600:]}


def _train(case: list[Any], cap_bytes: int) -> None:
    """Two steps, by memory alone; how they end, as a line of JSON."""
    sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
    import msgspec
    import torch

    from process_environment import environment

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    leave_links_out()
    with TemporaryDirectory() as folder:
        whole = spec_of(Case(*case), folder)
        step = ours(msgspec.structs.replace(whole, attention_depth=1), device)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(cap_bytes / total, device)
        torch.cuda.reset_peak_memory_stats(device)
        outcome = "fits"
        try:
            for _ in range(2):
                step()
                torch.cuda.synchronize(device)
        except torch.OutOfMemoryError as error:
            outcome = f"ran out: {error}"[:300]
    told = {
        "outcome": outcome,
        "allocated_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
        "environment": environment(),
    }
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    os._exit(0)


def table(rows: dict[str, dict[str, Any]]) -> str:
    """One row a way to share and to recompute."""
    head = (
        "shared by, recomputed",
        "predicted to fit",
        "surely",
        "tried",
        "the next",
        "reserved GiB",
    )
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, row in rows.items():
        predicted = row["predicted"]
        fits, more = (
            row["tried"].get(str(predicted[which]), {})
            for which in ("fits_tokens", "does_not_fit_tokens")
        )
        ends = [each.get("outcome", "-").split(":")[0] for each in (fits, more)]
        reserved = fits.get("reserved_bytes")
        cells = (
            name,
            f"{predicted['fits_tokens']:,}",
            f"{predicted['certain_tokens']:,}",
            *ends,
            f"{reserved / GIB:.2f}" if reserved else "-",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Snapshots of a loop around Trainer: every objective, on one rank and on two, and where memory
really runs out; each case in fresh processes, and each snapshot read by ``highwater profile``.

``python docs/results/profiler/trainer_snapshots.py --out FILE.jsonl`` wants one or two GPUs of 64
GiB or more, no network, and less than five minutes; ``--device cpu`` shows what there is without
one: that it is refused by name, and that the same loop trains. A line of JSON for each case: what
the loop was told, the snapshots it left, and what is wrong, nothing where it is as it has to be.
What cannot be run here is told too, and why. ``--table FILE.jsonl`` prints them as a table. It
exits 1 where something is wrong.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from highwater.nouns.environment import SNAPSHOTS, coordinates, snapshot_name
from highwater.nouns.layout import Layout
from highwater.units import counted, format_bytes

ROOT = Path(__file__).parents[3]
TINY = str(ROOT / "examples" / "tiny")
VARIABLES = os.environ | {"PYTHONPATH": str(ROOT / "src")}
"""Of the processes, which are in a folder of their own."""
PROFILER, STEPS = "0,1", 2
LENGTHS: Mapping[str, int] = {"cuda": 1024, "cpu": 64}
LONG = 32_768
VOCABULARY = 151_936
"""Of the tiny model: its logits are what runs out."""
OBJECTIVES: Mapping[str, dict[str, Any]] = {
    "sft": {},
    "dpo": {"objective": "dpo"},
    "grpo": {"objective": "grpo"},
    "ppo": {"objective": "ppo", "critic": True},
    "rw": {"objective": "rw"},
}
RUNS_OUT, OFF = "out of memory", "off"
SHARED: Mapping[str, dict[str, int]] = {
    "sft": {"ring": 2},
    "dpo": {"ulysses": 2},
    "grpo": {},
    "ppo": {"ring": 2},
    "rw": {"ulysses": 2},
    RUNS_OUT: {},
}
"""How two ranks share sequences; without a degree each has its own, and runs out by itself."""
NAMES = (*OBJECTIVES, RUNS_OUT, OFF)
CASES = (*((name, 1) for name in NAMES), *((name, 2) for name in NAMES if name != OFF))
CASE_S, LEAST_S = 90.0, 15.0
"""Seconds that a case may take, and without which none is begun."""
OF_OTHERS = sorted((ROOT / "tests" / "data" / "snapshots").glob("*.pickle"))
"""Snapshots that are read where none can be recorded."""
Found = dict[str, Any]


def main() -> None:
    """Run the cases and write their lines, print a table of them, or be one rank of a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="the file that gets the lines, written anew")
    parser.add_argument("--table", type=Path, help="print the table of such a file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default=TINY, help="a directory or a catalog name")
    parser.add_argument(
        "--cases", nargs="+", choices=NAMES, metavar="CASE", help=f"of {', '.join(NAMES)}"
    )
    parser.add_argument("--limit-s", type=float, default=285, help="time for all of it")
    parser.add_argument("--rank-of", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_of:
        be_a_rank(asked.rank_of[0], Path(asked.rank_of[1]), asked.device, asked.model)
    elif asked.table:
        print("\n".join(table([json.loads(line) for line in asked.table.open()])))
    elif asked.out:
        sys.exit(record(asked))
    else:
        parser.error("say where the lines go: --out FILE.jsonl")


def record(asked: argparse.Namespace) -> int:
    """Run every case, one after the other, and write a line for each; 1 where one is wrong, or none
    could be run.
    """
    from highwater.trials.probe import probe

    until = time.monotonic() + asked.limit_s
    gpus = len(probe().gpus)
    lines: list[Found] = []
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    with asked.out.open("w") as file:
        for name, ranks in CASES:
            if asked.cases and name not in asked.cases:
                continue
            line: Found = {"case": name, "ranks": ranks, "device": asked.device}
            why = why_not(name, ranks, asked.device, gpus, until - time.monotonic())
            if why is None:
                line |= run_case(name, ranks, asked, min(CASE_S, until - time.monotonic()))
            else:
                line["not_run"] = why
            lines.append(line)
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(table(lines)[-1], flush=True)
    ran = [line["wrong"] for line in lines if "wrong" in line]
    return int(not ran or any(ran))


def why_not(name: str, ranks: int, device: str, gpus: int, left_s: float) -> str | None:
    """Why a case is not run here; None where it is."""
    if device == "cuda" and gpus < ranks:
        return f"it needs {counted(ranks, 'GPU')}, and this machine has {gpus}"
    if device == "cpu" and name == RUNS_OUT:
        return "the CPU has no allocator that runs out, and PyTorch keeps no history of it"
    return "no time was left" if left_s < LEAST_S else None


def run_case(name: str, ranks: int, asked: argparse.Namespace, limit_s: float) -> Found:
    """Run a case in processes of its own, and read what it left."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        own = ["--rank-of", name, folder, "--device", asked.device, "--model", asked.model]
        way = ["-m", "highwater.engine.ranks", "--nproc", str(ranks)] if ranks > 1 else []
        command = [sys.executable, *way, str(Path(__file__).resolve()), *own]
        try:
            ended = subprocess.run(
                command,
                cwd=folder,
                env=VARIABLES,
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
            )
            code, said = ended.returncode, ended.stderr
        except subprocess.TimeoutExpired as error:
            code, said = None, str(error)
        found = Path(folder).glob("rank*.json")
        told = [json.loads(path.read_text()) for path in sorted(found)]
        line: Found = {"exit_code": code, "told": told}
        paths = sorted(Path(folder).rglob("*.pickle"))
        with ThreadPoolExecutor() as readers:
            line["snapshots"] = list(readers.map(lambda path: read(path, Path(folder)), paths))
            if asked.device == "cpu" and name == "sft" and ranks == 1:
                line["read"] = list(readers.map(lambda path: read(path, ROOT), OF_OTHERS))
    line["wrong"] = list(faults(name, ranks, asked.device, line))
    if line["wrong"]:
        line["said"] = said.replace(folder, "FOLDER")[-2000:]
    return {**line, "wall_s": round(time.monotonic() - began, 1)}


def read(path: Path, folder: Path) -> Found:
    """What ``highwater profile`` says of a snapshot."""
    command = [sys.executable, "-m", "highwater", "profile", str(path), "--json"]
    done = subprocess.run(command, env=VARIABLES, capture_output=True, text=True, check=False)
    row: Found = {"file": str(path.relative_to(folder)), "file_bytes": path.stat().st_size}
    if done.returncode:
        return {**row, "error": done.stderr[-500:].replace(str(folder), "FOLDER")}
    (profile,) = json.loads(done.stdout)["profiles"]
    sizes = {each["category"]: each["bytes"] for each in profile["categories"] if each["bytes"]}
    names = ("rank", "coordinates", "moment", "phase", "events", "allocated_bytes")
    return {
        **row,
        **{each: profile[each] for each in (*names, "requested_bytes")},
        "by_category_bytes": sizes,
        "unattributed_share": sizes.get("unattributed", 0) / max(1, profile["allocated_bytes"]),
    }


def faults(name: str, ranks: int, device: str, line: Found) -> Iterator[str]:
    """What is not as it has to be."""
    told, snapshots = line["told"], line["snapshots"]
    if line["exit_code"] != 0 or len(told) != ranks:
        yield f"it ended with {line['exit_code']}, and {len(told)} of {ranks} ranks told something"
    for one in told:
        if device == "cpu" and name != OFF and "history of a GPU's memory" not in one["refused"]:
            yield f"rank {one['rank']}: memory_profiler is not refused by name"
        if (name == RUNS_OUT) != bool(one["ran_out"]):
            yield f"rank {one['rank']}: {one['ran_out'] or 'memory did not run out'}"
        if name != RUNS_OUT and not all(math.isfinite(loss) for loss in one["losses"]):
            yield f"rank {one['rank']}: losses {one['losses']}"
    records = device == "cuda" and name != OFF
    wanted = set(snapshots_of(name, ranks)) if records else set[str]()
    names = {row["file"] for row in snapshots}
    for file in sorted(wanted ^ names):
        yield f"{file}: {'missing' if file in wanted else 'nobody asked for it'}"
    for row in (*snapshots, *line.get("read", ())):
        if "error" in row:
            yield f"{row['file']}: {row['error']}"
    for row in snapshots:
        if name == RUNS_OUT and (row.get("moment"), bool(row.get("requested_bytes"))) != (
            RUNS_OUT,
            True,
        ):
            yield f"{row['file']}: it does not say that memory ran out"


def snapshots_of(name: str, ranks: int) -> Iterator[str]:
    """The files that a case has to leave: one of each step and rank, named by the rank's place."""
    degrees = degrees_of(name, ranks)
    layout = Layout(
        gpus=ranks,
        ring_degree=degrees.get("ring", 1),
        ulysses_degree=degrees.get("ulysses", 1),
    )
    for step in range(1 if name == RUNS_OUT else STEPS):
        for rank in range(ranks):
            file = snapshot_name(rank, coordinates(layout, rank))
            yield f"logs/{SNAPSHOTS}/step_{step}/{file}"


def degrees_of(name: str, ranks: int) -> Mapping[str, int]:
    """How ranks share sequences."""
    return SHARED.get(name, {"ring": 2}) if ranks > 1 else {}


def be_a_rank(name: str, folder: Path, device: str, model: str) -> None:
    """Run the loop of a case as one of its ranks, and leave what it was told."""
    import torch

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    told: Found = {"rank": rank, "refused": None, "ran_out": None, "losses": []}
    try:
        loop(name, ranks, device, model, told)
    except torch.OutOfMemoryError as error:
        told["ran_out"] = str(error).partition(". ")[0]
    except Exception:
        traceback.print_exc()
        raise
    if rank == 0:
        told["environment"] = environment(device)
    (folder / f"rank{rank}.json").write_text(json.dumps(told))
    sys.stdout.flush()
    sys.stderr.flush()
    if told["ran_out"]:
        os._exit(0)  # of two ranks, neither waits for what the other began


def loop(name: str, ranks: int, device: str, model: str, told: Found) -> None:
    """Two steps of two micro-batches, recorded; of the case that runs out one, as long as it takes
    for the logits to be larger than the GPU.
    """
    from highwater.engine import Trainer
    from highwater.errors import UsageError

    settings: Found = {**OBJECTIVES.get(name, {}), **degrees_of(name, ranks), "device": device}
    length, sequences = (LONG, too_many(ranks)) if name == RUNS_OUT else (LENGTHS[device], 2)
    settings |= {"length": length, "sequences_per_micro_batch": sequences}
    recorded: Found = {} if name == OFF else {"memory_profiler": PROFILER, "log_dir": "logs"}
    if device == "cpu" and recorded:
        try:
            Trainer(model, **settings, **recorded)
        except UsageError as error:
            told["refused"] = f"{error.problem} ({error.hint})"
        recorded = {}
    with Trainer(model, **settings, **recorded) as trainer:
        for step in range(STEPS):
            own = STEPS * trainer.data_rank + step
            rows = [micro_batch(2 * own + turn, length, sequences) for turn in range(2)]
            told["losses"].append(trainer.step(rows[:1] if name == RUNS_OUT else rows).loss)


def micro_batch(number: int, length: int, sequences: int) -> list[Found]:
    """Documents of ``length`` tokens: prompts, and rewarded answers to them in pairs."""
    drawn = random.Random(number)
    prompt = drawn.choices(range(1000), k=length // 4)
    documents: list[Found] = []
    for index in range(sequences):
        answer = drawn.choices(range(1000), k=length - len(prompt))
        documents.append(
            {
                "input_ids": prompt + answer,
                "labels": [-100] * len(prompt) + answer,
                "reward": float(index % 2),
                "group": number,
            }
        )
    return documents


def too_many(ranks: int) -> int:
    """Sequences whose logits, in bfloat16, are a fifth more than the ranks' GPUs together hold;
    three quarters of the tokens are trained on.
    """
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    return math.ceil(1.2 * total * ranks / (2 * VOCABULARY * LONG * 0.75))


def environment(device: str) -> Found:
    """Versions, and the GPU where there is one."""
    sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
    from process_environment import environment as of_process

    found = dict(of_process())
    command = ["python", "docs/results/profiler/trainer_snapshots.py", "--out", "FILE.jsonl"]
    return found | {"command": [*command, *(["--device", "cpu"] if device == "cpu" else [])]}


def table(lines: Sequence[Found]) -> list[str]:
    """The lines as a table in Markdown."""
    rows = ["| case | ranks | ended | snapshots | most allocated | largest part | s |"]
    rows.append("|---|---|---|---|---|---|---|")
    for line in lines:
        start = f"| {line['case']} | {line['ranks']} |"
        if "not_run" in line:
            rows.append(f"{start} not run: {line['not_run']} | | | | |")
            continue
        rows.append(f"{start} {ending(line)} | {shown(line['snapshots'])} | {line['wall_s']:.0f} |")
    return rows


def ending(line: Found) -> str:
    """How a case ended."""
    if line["wrong"]:
        return f"wrong: {'; '.join(line['wrong'])}"
    first = line["told"][0]
    if first["ran_out"]:
        return str(first["ran_out"])
    losses = ", ".join(f"{loss:.4f}" for loss in first["losses"])
    return f"loss {losses}" + ("; memory_profiler refused by name" if first["refused"] else "")


def shown(snapshots: Sequence[Found]) -> str:
    """How many snapshots there are, and what the largest one says."""
    if not snapshots:
        return "none | |"
    places = sorted({"".join(row["coordinates"]) for row in snapshots})
    largest = max(snapshots, key=lambda row: row["allocated_bytes"])
    sizes: Mapping[str, int] = largest["by_category_bytes"]
    part = max(sizes, key=lambda name: sizes[name])
    return (
        f"{len(snapshots)}, of {', '.join(places)} | {format_bytes(largest['allocated_bytes'])} | "
        f"{part.replace('_', ' ')} {format_bytes(sizes[part])}"
    )


if __name__ == "__main__":
    main()

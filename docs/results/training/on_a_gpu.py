"""`highwater train` on one GPU, with so much memory that 64K tokens are the predicted capacity: 50
steps over a histogram of lengths, speed beside that of a step alone, 200 steps of LoRA.

    python docs/results/training/on_a_gpu.py CASE... --out FOLDER >> RECORD
    python docs/results/training/on_a_gpu.py --table

``RECORD`` is ``docs/results/training/on_a_gpu.ndjson``. Each case prints a line of JSON, and one
that fails a line that says why. ``same-rows``, ``export`` and ``stopped`` come after ``histogram``,
in the same folder. On the CPU ``--small`` tries the script itself, with a small model and short
documents.
"""

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import highwater
from highwater.nouns.environment import ALLOCATOR_VARIABLES
from highwater.units import GIB, MIB

RECORD = Path(__file__).with_suffix(".ndjson")
BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks/step.py"
CHUNKED = ("--loss", "chunked", "--recompute", "all-but-attention")
WARM = 2
"""Steps that are not timed: kernels are chosen in the first, and optimizer states made."""


class Place(NamedTuple):
    """What is trained, and how."""

    model: str
    length: int
    lora_length: int
    steps: int
    lora_steps: int
    device: str
    how: tuple[str, ...]
    folder: Path

    @property
    def keywords(self) -> dict[str, Any]:
        """``how`` from Python."""
        flags = iter(self.how)
        return {flag[2:].replace("-", "_"): value for flag, value in zip(flags, flags, strict=True)}


def of_a_gpu(folder: Path) -> Place:
    """The shape of Qwen3-0.6B: chunked loss, what attention returns kept."""
    how = (*CHUNKED, "--allocator", "expandable")
    return Place("Qwen3-0.6B", 65_536, 16_384, 50, 200, "cuda", how, folder)


def of_the_cpu(folder: Path) -> Place:
    """The same, small."""
    return Place("tiny", 512, 256, 6, 8, "cpu", CHUNKED, folder)


def memory_bytes(place: Place) -> int:
    """The smallest memory, in steps of 64 MiB, in which the length is predicted to fit."""
    if place.device == "cpu":
        return 2 * GIB
    low, high = 1, 80 * GIB // (64 * MIB)
    while high - low > 1:
        middle = (low + high) // 2
        fits = _capacity(place, middle * 64 * MIB) >= place.length
        low, high = (low, middle) if fits else (middle, high)
    return high * 64 * MIB


def _capacity(place: Place, budget_bytes: int) -> int:
    found = highwater.predict(
        place.model,
        gpus="1",
        gpu_memory=budget_bytes,
        micro_batches=1,
        resolution=1024,
        max_length=2 * place.length,
        offload=False,
        **place.keywords,
    )
    (cell,) = found.cells
    return cell.capacity_tokens or 0


def write_documents(path: Path, lengths: list[int]) -> None:
    """Documents of so many tokens, of which the last ends each: random words, a byte a token."""
    draw = random.Random(len(lengths))
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(500)]
    with path.open("w", encoding="utf-8") as file:
        for length in lengths:
            text = " ".join(draw.choices(words, k=length // 2))[: length - 1]
            file.write(json.dumps({"text": text}) + "\n")


def histogram(longest: int, tokens: int) -> list[int]:
    """Lengths as conversations with a long tail have them: log-normal, cut at the longest, of which
    some are whole; so many tokens together.
    """
    draw, found = random.Random(0), [longest] * 4
    while sum(found) < tokens:
        length = int(draw.lognormvariate(math.log(longest / 16), 1.3))
        found.append(max(16, min(longest, length)))
    draw.shuffle(found)
    return found


def train(place: Place, output: Path, data: Path, *words: str) -> list[str]:
    """What is typed."""
    return [
        *(sys.executable, "-P", "-m", "highwater", "train", place.model),
        *("--data", str(data), "--output", str(output), "--device", place.device),
        *("--memory", str(memory_bytes(place)), "--rows", "1", *words),
    ]


def ran(words: list[str]) -> dict[str, Any]:
    """Run it, and say how it ended."""
    began = time.monotonic()
    done = subprocess.run([*words, "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    said = json.loads(done.stdout)
    return {
        "status": said["status"],
        "peak_bytes": said["peak_bytes"],
        "first_loss": said["losses"][0],
        "last_loss": said["losses"][-1],
        "wall_s": time.monotonic() - began,
    }


def steps_of(output: Path) -> list[dict[str, Any]]:
    """The line of each step."""
    lines = (output / "statistics.jsonl").read_text().splitlines()
    return [each for each in map(json.loads, lines) if "step_time_s" in each]


def speed(steps: list[dict[str, Any]]) -> float:
    """Tokens per second of the steps after those that warm up."""
    timed = steps[WARM:]
    return sum(each["n_tokens"] for each in timed) / sum(each["step_time_s"] for each in timed)


def case_histogram(place: Place) -> dict[str, Any]:
    """50 steps over a histogram of lengths, in the memory that was predicted for the longest."""
    lengths = histogram(place.length, 30 * place.length)
    write_documents(place.folder / "histogram.jsonl", lengths)
    output = place.folder / "histogram"
    words = ("--length", str(place.length), "--steps", str(place.steps), *place.how)
    found = ran(train(place, output, place.folder / "histogram.jsonl", *words))
    budget = memory_bytes(place)
    longer = None if place.device == "cpu" else _capacity(place, budget)
    return found | {
        "memory_bytes": budget,
        "predicted_capacity_tokens": longer,
        "documents": len(lengths),
        "median_document_tokens": statistics.median(lengths),
        "longest_document_tokens": max(lengths),
        "steps": len(steps_of(output)),
        "tokens_per_s": speed(steps_of(output)),
    }


def case_same_rows(place: Place) -> dict[str, Any]:
    """The first rows of that run again in a loop with nothing around the step."""
    from highwater.engine import Trainer
    from highwater.engine.data.step_plan import StepPlan
    from highwater.engine.data.store import open_corpus

    decided = json.loads((place.folder / "histogram" / "training.json").read_text())
    corpus = open_corpus(decided["corpus"]["directory"])
    plan = StepPlan(corpus.lengths, corpus.units, row_tokens=place.length, micro_batches=1, seed=0)
    count = min(place.steps, 16)
    rows = [
        [corpus.document(number).ids_L.tolist() for number in plan.step(step)[0]]
        for step in range(1, count + 1)
    ]
    times: list[float] = []
    with Trainer(
        place.model,
        length=place.length,
        device=place.device,
        memory=memory_bytes(place),
        micro_batches=1,
        **place.keywords,
    ) as trainer:
        losses: list[float] = []
        for row in rows:
            began = time.perf_counter()
            losses.append(trainer.step([row]).loss)  # waits for the device
            times.append(time.perf_counter() - began)
    ours = steps_of(place.folder / "histogram")[:count]
    tokens = [sum(map(len, row)) for row in rows]
    alone = sum(tokens[WARM:]) / sum(times[WARM:])
    return {
        "steps": count,
        "same_tokens": tokens == [each["n_tokens"] for each in ours],
        "off_loss": max(abs(a - b["loss"]) / abs(a) for a, b in zip(losses, ours, strict=True)),
        "tokens_per_s_of_the_step": alone,
        "tokens_per_s_of_training": speed(ours),
        "ratio": speed(ours) / alone,
    }


def case_whole(place: Place) -> dict[str, Any]:
    """Rows of one document of the whole length, beside ``benchmarks/step.py``."""
    write_documents(place.folder / "whole.jsonl", [place.length] * 10)
    output, count = place.folder / "whole", 10
    words = ("--length", str(place.length), "--steps", str(count), *place.how)
    found = ran(train(place, output, place.folder / "whole.jsonl", *words))
    if place.device == "cpu":
        return found
    bench = [sys.executable, str(BENCHMARK), place.model]
    options = ["--alone", str(place.length), "--micro-batches", "1"]
    told = place.folder / "bench.json"
    kept = ["--contenders", "attention-kept"]
    subprocess.run([*bench, *options, *kept, "--out", str(told)], check=True, stderr=sys.stderr)
    (row,) = json.loads(told.read_text())["rows"]
    alone = row["tokens_per_s"]["attention-kept"]
    median = statistics.median(each["step_time_s"] for each in steps_of(output)[WARM:])
    return found | {
        "tokens_per_s": place.length / median,
        "tokens_per_s_of_bench_step": alone,
        "ratio": place.length / median / alone,
        "bench_step": row,
    }


def case_export(place: Place) -> dict[str, Any]:
    """The exported model in transformers: its loss on a document beside the engine's."""
    import torch
    from transformers import AutoModelForCausalLM

    from highwater.engine import Trainer

    directory = str(place.folder / "histogram" / "model")
    ids = list(b"the quick brown fox jumps over the lazy dog " * 5)
    with Trainer(directory, length=place.lora_length, device=place.device) as trainer:
        ours = trainer.evaluate([[ids]]).loss
    kind = torch.bfloat16 if place.device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=kind).to(place.device)
    tensor = torch.tensor([ids], device=place.device)
    with torch.no_grad():
        theirs = float(model(input_ids=tensor, labels=tensor, use_cache=False).loss)
    return {"loss": ours, "loss_of_transformers": theirs, "off": abs(ours - theirs) / theirs}


def case_stopped(place: Place) -> dict[str, Any]:
    """The histogram again, stopped by SIGTERM on the way, and gone on with."""
    output, at = place.folder / "stopped", min(6, place.steps // 2)
    steps = min(place.steps, 12)
    words = ("--length", str(place.length), "--steps", str(steps), *place.how)
    command = train(place, output, place.folder / "histogram.jsonl", *words)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (
        (output / "statistics.jsonl").exists() and len(steps_of(output)) >= at
    ):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    status = process.wait()
    stopped = len(steps_of(output))
    found = ran(command)
    before = [each["loss"] for each in steps_of(place.folder / "histogram")[:steps]]
    after = [each["loss"] for each in steps_of(output)]
    return found | {
        "exit_of_the_stopped": status,
        "stopped_after": stopped,
        "off_loss": max(abs(a - b) / abs(b) for a, b in zip(after, before, strict=True)),
    }


def case_lora(place: Place) -> dict[str, Any]:
    """200 steps of LoRA with recommended settings; the adapters in peft."""
    lengths = histogram(place.lora_length, 40 * place.lora_length)
    write_documents(place.folder / "lora.jsonl", lengths)
    output = place.folder / "lora"
    words = ("--length", str(place.lora_length), "--steps", str(place.lora_steps))
    more = ("--lora", "16", "--settings", "recommended", "--learning-rate", "2e-4")
    found = ran(train(place, output, place.folder / "lora.jsonl", *words, *more))
    decided = json.loads((output / "training.json").read_text())
    from peft import PeftConfig

    rank = getattr(PeftConfig.from_pretrained(str(output / "model")), "r", None)
    return found | {
        "settings": decided["trial"]["settings"],
        "steps": len(steps_of(output)),
        "tokens_per_s": speed(steps_of(output)),
        "rank_in_peft": rank,
    }


CASES: dict[str, Callable[[Place], dict[str, Any]]] = {
    "histogram": case_histogram,
    "same-rows": case_same_rows,
    "whole": case_whole,
    "export": case_export,
    "stopped": case_stopped,
    "lora": case_lora,
}


def main() -> int:
    """Run cases, or print what is recorded."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], metavar="CASE")
    parser.add_argument("--out", type=Path, help="a folder for data and runs")
    parser.add_argument("--small", action="store_true", help="on the CPU, to try this script")
    parser.add_argument("--table", action="store_true", help="print the table of what is recorded")
    arguments = parser.parse_args()
    if arguments.table and not RECORD.exists():
        parser.error(f"nothing is recorded yet: there is no {RECORD.name}")
    if arguments.table:
        print(table([json.loads(line) for line in RECORD.read_text().splitlines()]))
        return 0
    if arguments.out is None:
        parser.error("name a folder for data and runs: --out FOLDER")
    folder = arguments.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    place = of_the_cpu(folder) if arguments.small else of_a_gpu(folder)
    if not arguments.small:  # read as the allocator is first used, in same-rows
        expandable = dict.fromkeys(ALLOCATOR_VARIABLES, "expandable_segments:True")
        os.environ.update(expandable)
    names = arguments.cases or list(CASES)
    if len(names) == 1:
        print(json.dumps(tried(names[0], place) | environment(place)), flush=True)
        return 0
    options = ["--out", str(folder), *(["--small"] if arguments.small else [])]
    for name in names:  # in a process each: none finds what another left on the GPU
        subprocess.run([sys.executable, "-P", __file__, name, *options], check=True)
    return 0


def tried(name: str, place: Place) -> dict[str, Any]:
    """A case's line; of one that fails why."""
    try:
        return {"case": name, **CASES[name](place)}
    except Exception:  # noqa: BLE001 - the others are still worth their time
        return {"case": name, "failed": traceback.format_exc()[-3000:]}


def environment(place: Place) -> dict[str, Any]:
    """What it ran on."""
    import torch

    card = torch.cuda.get_device_name() if place.device == "cuda" else "CPU"
    names = ("torch", "transformers", "highwater")
    return {"device": card, "versions": {name: version(name) for name in names}}


def table(lines: list[dict[str, Any]]) -> str:
    """What was recorded, a row for each figure."""
    shown = ["| case | figure | measured |", "|---|---|---|"]
    for line in lines:
        for name, value in line.items():
            if name not in ("case", "device", "versions", "settings", "bench_step"):
                shown.append(f"| {line['case']} | {name} | {value} |")
    return "\n".join(shown)


if __name__ == "__main__":
    sys.exit(main())

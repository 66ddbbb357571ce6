"""Random questions put to ``highwater predict`` and to ``highwater find --dry-run``: every number
that both print is the same, and the longest is; and others to ``predict`` and ``recommend``.

    python docs/results/questions/agreement.py          # asks 200, and writes agreement.json
    python docs/results/questions/agreement.py --table  # prints what is recorded
    python docs/results/questions/agreement.py --count 5 --seed 1  # asks others; writes nothing

What is compared with a search is the text: the rows of both tables (settings, GPUs, Ulysses: the
length with its marks and what it leaves of a GPU), and of the first lines the longest length and
the longest of the simplest settings, what they leave, and what they take of host memory. With a
recommendation: how far each cell trains, the longest of all, what each leaves at one length, and of
the first lines these, vLLM's share, the longest response, and how far a user's own file trains.
Needs no GPU and no Hub.
"""

import argparse
import json
import os
import random
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).parent
SEED, COUNT, RECOMMENDED = 49, 200, 40
MODELS = (
    *("Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Qwen3-30B-A3B"),
    *("Qwen2.5-7B-Instruct", "Llama-3.1-8B", "Llama-3.1-70B", "Llama-3.2-1B", "gemma-2-9b"),
    *("gemma-3-12b", "Mistral-7B-v0.3", "Phi-4-mini-instruct", "gpt-oss-20b"),
)
MEMORIES = ("16GiB", "24GiB", "32GiB", "47.4GiB", "79.15GiB", "80GiB", "139.8GiB", "180GiB")
COUNTS = (1, 2, 3, 4, 6, 8)
LORAS = (None, None, 8, 64)
OBJECTIVES = ("sft", "grpo", "dpo", "ppo", "rw")
KINDS = ("RTX-4090", "2xA100-80GB", "4xA100-80GB", "8xA100-80GB", "8xH100-80GB", "2xH200-141GB")
ROLLOUT = ("--objective", "grpo", "--rollout", "vllm")
TRAINED = (
    *((), ROLLOUT, (*ROLLOUT, "--prompt-tokens", "2048"), ("--lora", "16"), ("--ulysses", "1")),
    *(("--trainer", "trl"), ("--trainer", "trl", *ROLLOUT), ("--trainer", "trinity")),
    *(("--trainer", "trinity", *ROLLOUT), ("--trainer", "verl", *ROLLOUT)),
    *(("--trainer", "verl", *ROLLOUT, "--prompt-tokens", "2048"), ("--trainer", "axolotl")),
    *(("--trainer", "verl", *ROLLOUT, "--offload"), ("--trainer", "llamafactory")),
)
"""Trainers, rollouts and settings that a recommendation is asked for."""
FILES = {
    "axolotl": (
        "base_model: Qwen/Qwen3-8B\nsequence_len: 16384\nmicro_batch_size: {}\noptimizer: "
        "adamw_torch\nbf16: true\nflash_attention: true\ngradient_checkpointing: true\n"
        "fsdp_version: 2\nfsdp_config:\n  offload_params: false\n"
    ),
    "llamafactory": (
        "model_name_or_path: Qwen/Qwen3-8B\ncutoff_len: 16384\nper_device_train_batch_size: {}\n"
        "stage: sft\nfinetuning_type: full\nbf16: true\nflash_attn: fa2\n"
        "enable_liger_kernel: true\ndeepspeed: ds_z3_config.json\n"
    ),
}
"""Users' own files of trainers, without the sequences of a micro-batch."""
LENGTHS = ("8k", "16k", "32k", "64k", "128k", "192k")

Answer = dict[str, Any]
_LENGTH = r"≥?[\d,]+"
_SIZE = r"[\d.]+ [KMG]iB"


def main() -> int:
    """Put the questions, and say of how many the answers are equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="print what is recorded; ask nothing")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=COUNT)
    arguments = parser.parse_args()
    recorded = HERE / "agreement.json"
    if arguments.table:
        print(summary(json.loads(recorded.read_text())))
        return 0
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "COLUMNS": "240"}
    answers: list[Answer] = []
    for words in questions(arguments.seed, arguments.count):
        answers.append(put(words))
        print(f"\r{len(answers)} of {arguments.count}", end="", file=sys.stderr, flush=True)
        for each in answers[-1]["differing"]:
            print(f"\n{' '.join(words)}: {each}", file=sys.stderr)
    many = RECOMMENDED * arguments.count // COUNT
    with TemporaryDirectory() as folder:
        asked = recommended(arguments.seed, many)
        beside = [put_recommended(words, Path(folder)) for words in asked]
    document = {"seed": arguments.seed, "answers": answers, "recommended": beside}
    if (arguments.seed, arguments.count) == (SEED, COUNT):
        lines, more = (
            ",\n".join(json.dumps(each, ensure_ascii=False) for each in kept)
            for kept in (answers, beside)
        )
        text = f'{{"seed": {SEED}, "answers": [\n{lines}\n], "recommended": [\n{more}\n]}}\n'
        recorded.write_text(text)
    print(summary(document))
    return any(each["differing"] for each in (*answers, *beside))


def questions(seed: int, count: int) -> Iterator[tuple[str, ...]]:
    """The words of each question: model, number of GPUs, memory of each, LoRA, objective."""
    chance = random.Random(seed)
    for _ in range(count):
        lora = chance.choice(LORAS)
        yield (
            *(chance.choice(MODELS), str(chance.choice(COUNTS)), chance.choice(MEMORIES)),
            *(() if lora is None else ("--lora", str(lora))),
            *("--objective", chance.choice(OBJECTIVES)),
        )


def put(words: Sequence[str]) -> Answer:
    """What both commands say of a question, and where they differ."""
    model, gpus, memory, *named = words
    about = (model, "--gpus", gpus, *named)
    predicted = said("predict", *about, "--gpu-memory", memory, "--all")
    found = said("find", *about, "--device", "cuda", "--memory", memory, "--dry-run")
    answer: Answer = {"asked": " ".join(words), "exit_code": found[0]}
    differing = [] if predicted[0] == found[0] else [f"exit codes {predicted[0]} and {found[0]}"]
    if any(text.startswith("error: ") for _, text in (predicted, found)):
        answer["refused"] = found[1].splitlines()[0]
        differing += [] if predicted[1] == found[1] else [f"{predicted[1]!r} and {found[1]!r}"]
        return {**answer, "differing": differing}
    rows, few = rows_of(predicted[1]), rows_of(found[1])
    differing += [f"{name} is tried alone" for name in few.keys() - rows.keys()]
    for name in few.keys() & rows.keys():
        both = [pair for pair in zip(rows[name], few[name], strict=True) if pair[1] != "-"]
        if any(one != other for one, other in both):
            differing.append(f"{name}: {rows[name]} predicted, {few[name]} found")
    first, other = (sentence(text.partition("\n\n")[0]) for _, text in (predicted, found))
    for name in first.keys() & other.keys():
        if first[name] != other[name]:
            differing.append(f"{name}: {first[name]} predicted, {other[name]} found")
    return {**answer, "rows": few, "first_line": other, "differing": differing}


def recommended(seed: int, count: int) -> Iterator[tuple[str, ...]]:
    """The words of each question to ``recommend``: model, GPUs, length, and its flags."""
    chance = random.Random(seed)
    for _ in range(count):
        words = (chance.choice(MODELS), chance.choice(KINDS), chance.choice(LENGTHS))
        own = chance.choice([(), (), ("axolotl", "1"), ("axolotl", "4"), ("llamafactory", "2")])
        yield (*words, *(own or chance.choice(TRAINED)))


def put_recommended(words: Sequence[str], folder: Path) -> Answer:
    """What ``predict`` and ``recommend`` say of a question, and where they differ. After a length
    without flags stand a trainer and the rows of its own file, which is written to ``folder``.
    """
    model, gpus, length, *named = words
    about, far = (model, "--gpus", gpus, *named), ()
    if is_file := bool(named) and named[0] in FILES:
        file = folder / "own.yaml"
        file.write_text(FILES[named[0]].format(named[1]))
        about = (model, "--gpus", gpus, "--trainer", named[0], "--trainer-config", str(file))
        far = ("--max-length", "1m")
    answer: Answer = {"asked": " ".join(words)}
    predicted = said("predict", *about, "--length", length)
    found = said("recommend", *about, "--length", length)
    if any(text.startswith("error: ") for _, text in (predicted, found)):
        same = predicted[1] == found[1]
        refused = {"refused": found[1].splitlines()[0]}
        return {**answer, **refused, "differing": [] if same else [predicted[1], found[1]]}
    longest = of_cells("predict", *about, *far)
    there, rows = (of_cells(each, *about, "--length", length) for each in ("predict", "recommend"))
    differing = []
    for name in rows.keys() & longest.keys():
        if rows[name]["capacity_tokens"] != longest[name]["capacity_tokens"]:
            differing.append(f"{name}: how far it trains")
    for name in rows.keys() & there.keys():
        if rows[name]["headroom_bytes"] != there[name]["headroom_bytes"]:
            differing.append(f"{name}: what it leaves")
    most = [max(e["capacity_tokens"] for e in each.values()) for each in (longest, rows)]
    first, other = (sentence(text.partition("\n\n")[0]) for _, text in (predicted, found))
    if is_file:
        both = rows.keys() & longest.keys()
        own = max((rows[name]["capacity_tokens"] for name in both), default=0)
        differing += [f"as written {most[0]}, {own} recommended"] * (most[0] != own)
        far_off = re.search(rf"with changes ({_LENGTH})", predicted[1])
        most = [int(far_off[1].replace(",", "")) if far_off else most[1], most[1]]
    elif predicted[0] != found[0] or rows.keys() != there.keys():
        differing.append(f"exit codes {predicted[0]} and {found[0]}, or other cells")
    differing += [f"longest {most[0]} predicted, {most[1]} recommended"] * (most[0] != most[1])
    names = first.keys() & other.keys() - ({"longest", "left", "host memory"} if is_file else set())
    for name in names:
        if first[name] != other[name]:
            differing.append(f"{name}: {first[name]} predicted, {other[name]} recommended")
    return {**answer, "rows": len(rows), "longest": most[1], "differing": differing}


def of_cells(*words: str) -> dict[str, Answer]:
    """What a command says of each cell, by the cell."""
    document = json.loads(said(*words, "--json")[1])
    rows = document["candidates"] if "candidates" in document else document["cells"]
    return {json.dumps(each["cell"]): each for each in rows}


def said(*words: str) -> tuple[int, str]:
    """The exit code of a command, and what it prints: its answer, or why it refuses."""
    from highwater.cli.app import main as highwater

    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = highwater(words)
    _, problem, hint = err.getvalue().rpartition("error: ")  # notes stand before it
    return code, out.getvalue() or problem + hint


def rows_of(text: str) -> dict[str, list[str]]:
    """Of each row of a table its length and headroom, by its settings and its Ulysses degree."""
    table = [re.split(r" {2,}", line) for line in text.split("\n\n")[2].splitlines()]
    head, rows = table[0], {}
    length = "capacity" if "capacity" in head else "trains up to"
    for row in table[1:]:
        of = dict(zip(head, row, strict=True))
        rows[f"{of['settings']}, Ulysses {of['Ulysses']}"] = [of[length], of.get("headroom", "-")]
    return rows


def sentence(line: str) -> dict[str, str]:
    """Of an answer the longest length, what it leaves of a GPU, and takes of host memory."""
    longest = line[max(0, line.find("The longest is ")) :]
    patterns = {
        "longest": rf"({_LENGTH}) tokens",
        "left": rf"({_SIZE})(?: of each GPU)?(?: is)? left",
        "host memory": rf"({_SIZE}) of (?:host memory|it\))",
        "share": r"\((up to [\d.]+|no more) fits\)",
        "response": rf"response: ({_LENGTH})",
    }
    found = {name: re.search(pattern, longest) for name, pattern in patterns.items()}
    return {name: each[1].removeprefix("≥") for name, each in found.items() if each}


def summary(document: dict[str, Any]) -> str:
    """Say how many answers are equal."""
    answers, beside = document["answers"], document["recommended"]
    equal, more = (sum(not each["differing"] for each in kept) for kept in (answers, beside))
    refused = sum("refused" in each for each in answers)
    rows = sum(len(each.get("rows", ())) for each in answers)
    cells = sum(each.get("rows", 0) for each in beside)
    return (
        f"{equal} of {len(answers)} equal (seed {document['seed']}): {rows} rows of both tables, "
        f"{refused} refused in the same words; of {len(beside)} to `predict` and `recommend` "
        f"{more} equal: {cells} cells"
    )


if __name__ == "__main__":
    sys.exit(main())

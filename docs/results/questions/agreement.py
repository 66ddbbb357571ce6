"""Random questions put to ``highwater predict`` and to ``highwater find --dry-run``: every number
that both print is the same, and the longest is.

    python docs/results/questions/agreement.py          # asks 200, and writes agreement.json
    python docs/results/questions/agreement.py --table  # prints what is recorded
    python docs/results/questions/agreement.py --count 5 --seed 1  # asks others; writes nothing

What is compared is the text: the rows of both tables (settings, GPUs, Ulysses: the length with its
marks and what it leaves of a GPU), and of the first lines the longest length and the longest of the
simplest settings, what they leave, and what they take of host memory. Needs no GPU and no Hub.
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
from typing import Any

HERE = Path(__file__).parent
SEED, COUNT = 49, 200
MODELS = (
    *("Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Qwen3-30B-A3B"),
    *("Qwen2.5-7B-Instruct", "Llama-3.1-8B", "Llama-3.1-70B", "Llama-3.2-1B", "gemma-2-9b"),
    *("gemma-3-12b", "Mistral-7B-v0.3", "Phi-4-mini-instruct", "gpt-oss-20b"),
)
MEMORIES = ("16GiB", "24GiB", "32GiB", "47.4GiB", "79.15GiB", "80GiB", "139.8GiB", "180GiB")
COUNTS = (1, 2, 3, 4, 6, 8)
LORAS = (None, None, 8, 64)
OBJECTIVES = ("sft", "grpo", "dpo", "ppo", "rw")

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
    document = {"seed": arguments.seed, "answers": answers}
    if (arguments.seed, arguments.count) == (SEED, COUNT):
        lines = ",\n".join(json.dumps(each, ensure_ascii=False) for each in answers)
        recorded.write_text(f'{{"seed": {SEED}, "answers": [\n{lines}\n]}}\n')
    print(summary(document))
    return any(each["differing"] for each in answers)


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
    }
    found = {name: re.search(pattern, longest) for name, pattern in patterns.items()}
    return {name: each[1].removeprefix("≥") for name, each in found.items() if each}


def summary(document: dict[str, Any]) -> str:
    """Say how many answers are equal."""
    answers = document["answers"]
    equal = sum(not each["differing"] for each in answers)
    refused = sum("refused" in each for each in answers)
    rows = sum(len(each.get("rows", ())) for each in answers)
    return (
        f"{equal} of {len(answers)} equal (seed {document['seed']}): {rows} rows of both tables, "
        f"{refused} refused in the same words"
    )


if __name__ == "__main__":
    sys.exit(main())

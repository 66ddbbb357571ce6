"""Two hundred questions, answered by the highwater that this Python imports: the same before a
change as after it.

``python tests/same_answers.py ANSWERS.json`` writes every document; ``--against OTHER.json`` prints
the questions that are answered otherwise, and ends with 1 where there are any. Run it from the
repository's root: recorded studies and tables are among what is asked about.
"""

import argparse
import io
import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import highwater
from highwater.cli.app import main

MODELS = ("Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B", "Qwen3-30B-A3B", "Llama-3.1-8B", "Qwen3-32B")
CLUSTERS = ("1xH200-141GB", "4xA100-80GB", "8xH100-80GB", "2xRTX-4090", "16xH20-96GB")
TRAINERS = ("trinity", "verl", "areal", "trl", "torchtitan", "accelerate")
STUDIES = sorted(str(path) for path in Path("docs/results/find").glob("*.jsonl"))
TABLES = sorted(str(path) for path in Path("tests/data").glob("published_capacity_*.csv"))
VARIANTS = (
    (),
    ("--length", "65536"),
    ("--objective", "ppo", "--critic"),
    ("--objective", "rw", "--sequences-per-micro-batch", "2"),
    ("--recompute", "all-but-attention", "--offload"),
    ("--objective", "grpo", "--loss", "full", "--entropy", "full"),
)


def questions() -> Iterator[tuple[str, ...]]:
    """Yield what is typed after ``highwater``."""
    pairs = list(itertools.product(MODELS, CLUSTERS))
    for number, (model, gpus) in enumerate(pairs):
        yield ("predict", model, "--gpus", gpus, "--json")
        yield ("recommend", model, "--gpus", gpus, "--length", "100k", "--json")
        variant = VARIANTS[number % len(VARIANTS)]
        yield ("predict", model, "--gpus", gpus, *variant, "--json")
        trainer = TRAINERS[number % len(TRAINERS)]
        rollout = ("--rollout-gpus", "1") if trainer == "areal" else ()
        yield ("emit", model, "--gpus", gpus, "--for", trainer, "--length", "16k", *rollout)
        memory = ("--memory", "70GiB", "--device", "cpu", "--ulysses", "1")
        if number % 3 == 0:
            yield ("find", model, "--dry-run", "--json", *memory, *variant)
    for model in ("Qwen3-0.6B", "Qwen3-8B", "Llama-3.1-8B"):
        yield ("predict", model, "--gpus", "4xA100-80GB", "--trainer", "trinity", "--json")
        yield ("guide", "--predict", model, "--gpus", "1xH100-80GB", "8xH100-80GB", "--json")
        yield (
            "recommend",
            model,
            "--gpus",
            "8xH100-80GB",
            "--length",
            "1M",
            "--rope",
            "yarn",
            "--list",
            "--json",
        )
    for study in STUDIES:
        yield ("show", study)
        yield ("report", study, "--json")
    for table in TABLES:
        yield ("predict", "--trainer", "trinity", "--against", table, "--json")
        yield ("predict", "--trainer", "trinity", "--against", table)
        yield ("guide", table, "--json")
        yield ("guide", table)
    yield ("guide", *STUDIES, "--json")
    yield ("guide", *STUDIES, *TABLES)


def answer(words: tuple[str, ...]) -> dict[str, object]:
    """What one question prints, and how it ends."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(list(words))
        except SystemExit as stop:
            code = stop.code
    return {"code": code, "stdout": out.getvalue(), "stderr": err.getvalue()}


def run() -> int:
    """Answer all questions; compare where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--against", type=Path)
    named = parser.parse_args()
    here = str(Path(highwater.__file__).parent)
    found = {
        " ".join(words): {name: str(said).replace(here, "") for name, said in answer(words).items()}
        for words in questions()
    }
    named.answers.write_text(json.dumps(found, indent=1) + "\n")
    codes = [each["code"] for each in found.values()]
    counts = {code: codes.count(code) for code in sorted(set(codes))}
    sys.stdout.write(f"{len(found)} questions, by exit code: {counts}\n")
    if named.against is None:
        return 0
    before = json.loads(named.against.read_text())
    other = [words for words in found | before if found.get(words) != before.get(words)]
    for words in other:
        sys.stdout.write(f"otherwise: highwater {words}\n")
    sys.stdout.write(f"{len(other)} of {len(found | before)} answered otherwise\n")
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(run())

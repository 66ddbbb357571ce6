"""Some hundreds of questions, answered by the highwater that this Python imports: the same before a
change as after it.

``python tests/same_answers ANSWERS.json`` writes every answer; ``--against OTHER.json`` prints the
questions that are answered otherwise, each with the first line that differs, and ends with 1 where
there are any. Run it from the root of a checkout whose package is imported: recorded studies and
tables are among what is asked about. Of another checkout, whose tests are older::

    cd OTHER && PYTHONPATH=src python THIS/tests/same_answers before.json --runs RUNS

``--runs`` keeps what was trained, and what lies there is opened instead of trained: so the one
checkout goes on after checkpoints of the other. ``--only WORDS`` asks only what has these words.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from difflib import unified_diff
from itertools import chain
from pathlib import Path
from typing import Any

import plain
import processes
import typed

PROCESSES = 2
"""Questions in processes of their own that are answered at a time."""


def run() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--runs", type=Path, help="folder of what is trained, kept")
    parser.add_argument("--only", default="", help="ask only what has these words")
    named = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="same-answers-") as name:
        folder, runs = Path(name), (named.runs or Path(name, "runs")).absolute()
        plain.PLACES.update({runs: "RUNS", folder: "ALL"})
        settle(folder / "home")
        found = dict(sorted(answers(folder, runs, named.only)))
    named.answers.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
    sys.stdout.write(f"{len(found)} questions\n")
    if named.against is None:
        return 0
    before = json.loads(named.against.read_text("utf-8"))
    if named.only:
        before = {question: said for question, said in before.items() if named.only in question}
    return compare(before, json.loads(named.answers.read_text("utf-8")))


def settle(home: Path) -> None:
    """What an answer could depend on of the machine and of whoever asks: empty caches, one thread,
    no Hub, no colours, a terminal of one width.
    """
    home.mkdir()
    os.environ |= {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        "COLUMNS": "100",
        "PYTHONHASHSEED": "0",
        "PYTHONWARNINGS": "ignore",
    }
    for name in ("TRINITY_CHECKPOINT_ROOT_DIR", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        os.environ.pop(name, None)


def answers(folder: Path, runs: Path, only: str) -> Iterator[tuple[str, Any]]:
    """Each question with its answer: typed ones in this process, others in their own meanwhile."""
    with ThreadPoolExecutor(PROCESSES) as pool:
        waiting = [
            pool.submit(ask)
            for question, ask in processes.questions(folder, runs)
            if only in question
        ]
        yield from typed.answers(folder, only)
        yield from chain.from_iterable(done.result() for done in waiting)


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    other = sorted(name for name in before | after if before.get(name) != after.get(name))
    for question in other:
        if question not in after or question not in before:
            where = "before" if question in before else "after"
            sys.stdout.write(f"only {where}: {question}\n")
            continue
        lines = unified_diff(
            *(pretty(each[question]) for each in (before, after)), n=0, lineterm=""
        )
        first = [line[:300] for line in lines if line[:3] not in ("---", "+++", "@@ ")][:2]
        sys.stdout.write("\n    ".join((f"otherwise: {question}", *first)) + "\n")
    sys.stdout.write(f"{len(other)} of {len(before | after)} answered otherwise\n")
    return 1 if other else 0


def pretty(answer: Any) -> list[str]:
    """An answer in lines: texts as they were printed, with the path to them before each."""
    if isinstance(answer, dict):
        return [f"{name}: {line}" for name, each in answer.items() for line in pretty(each)]
    if isinstance(answer, list):
        return [line for each in answer for line in pretty(each)]
    return str(answer).splitlines()


if __name__ == "__main__":
    sys.exit(run())

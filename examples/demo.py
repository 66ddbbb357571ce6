"""The demo: how long a context does a tiny model train with in 1 GiB? On the CPU, by real training
steps, in about a minute.

The operating system holds each process of a trial to 1 GiB: what does not fit really runs out of
memory. The model is tried on one process, then sharded over two. Everything is written into a new
folder, demo/1, demo/2, and so on; nothing is ever deleted. At the end the answers are checked
against the study's record: each must be a pair of real trials, one step apart.
"""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import highwater
from highwater.spec.study import Study
from highwater.spec.trial import Outcome

STEP = 256
"""Tokens between two lengths that are tried."""
TINY = (
    f"examples/tiny --device cpu --gpus 1 2 --memory 1GiB --loss full --start-length {STEP} "
    f"--resolution {STEP} --timeout 2m"
)
"""A vocabulary of 151,936 makes its logits large: half a GiB for a thousand tokens, the whole loss
at once."""


def main() -> int:
    os.chdir(Path(__file__).resolve().parent.parent)
    # Ctrl-C is for the command that runs: it ends in order, and says how to go on.
    signal.signal(signal.SIGINT, lambda *_: None)
    folder = new_folder(Path("demo"))
    study = folder / "study.jsonl"
    for words in (
        f"find {TINY} --log-dir {folder} --study {study}",
        f"show {study} --as published",
        f"show {study} --as lines",
    ):
        if status := type_command("highwater", *shlex.split(words)):
            return status
    doubts = doubts_about(highwater.open_study(study))
    for doubt in doubts:
        print(f"not proven: {doubt}")
    if not doubts:
        print(
            f"checked: every answer is a pair of real trials in {study}: one fit, {STEP} tokens "
            f"more ran out of memory"
        )
    return 1 if doubts else 0


def new_folder(parent: Path) -> Path:
    """The first numbered folder that is not there yet, made."""
    number = 1
    while (folder := parent / str(number)).exists():
        number += 1
    folder.mkdir(parents=True)
    return folder


def type_command(program: str, *words: str) -> int:
    """Show a command as one would type it, and run it; its exit status."""
    path = Path(os.path.relpath(Path(sys.executable).parent / program))
    print(f"$ {shlex.join([str(path), *words])}", flush=True)
    status = subprocess.Popen([path, *words]).wait()
    print(flush=True)
    return status


def doubts_about(study: Study) -> list[str]:
    """Every cell whose answer is not a pair of real trials, in words."""
    outcomes = {
        (trial.spec.layout, trial.spec.settings, trial.spec.length_tokens): trial.result.outcome
        for trial in study.trials
        if trial.result is not None and not trial.result.simulated
    }
    capacities = {answer.cell: answer.capacity_tokens for answer in study.answers}
    doubts: list[str] = []
    for cell in study.question.cells:
        longest = capacities.get(cell)
        if not longest:
            doubts.append(f"{cell.label_on(study.question.device)} has no answer")
            continue
        pair = [
            outcomes.get((cell.layout, cell.settings, length))
            for length in (longest, longest + STEP)
        ]
        if pair != [Outcome.FIT, Outcome.OUT_OF_MEMORY]:
            doubts.append(
                f"{cell.label_on(study.question.device)}: {longest} tokens ended in {pair[0]}, "
                f"{longest + STEP} in {pair[1]}"
            )
    return doubts


if __name__ == "__main__":
    sys.exit(main())

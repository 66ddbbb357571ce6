"""The demo: how long a context does a tiny model train with in 864 MiB? On the CPU, by real
training steps; then a training of that length, with the settings that were found. About a minute,
most of it for importing torch in each process.

The operating system holds the process of a trial to 864 MiB: what does not fit really runs out of
memory. Everything is written into a new folder, demo/1, demo/2, and so on; nothing is ever deleted.
At the end the answer is checked against the study's record: it must be a pair of real trials, one
step apart. Then that length is trained for two steps, in the same memory and with the study's
settings, on texts of Python's own help, to a model that transformers loads.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import msgspec

import highwater
from highwater.model.model import load_model
from highwater.nouns.codec import from_json
from highwater.nouns.study import Cell, Study
from highwater.nouns.training import TrainingSpec
from highwater.nouns.trial import Outcome
from highwater.units import counted

STEP = 256
"""Tokens between two lengths that are tried."""
MEMORY = "864MiB"
"""Python with torch and the model's states take 630 MiB of it, and the logits the rest."""
TINY = (
    f"examples/tiny --device cpu --gpus 1 --memory {MEMORY} --loss full --start-length {STEP} "
    f"--resolution {STEP} --timeout 2m"
)
"""A vocabulary of 151,936 makes its logits large: half a GiB for a thousand tokens, the whole loss
at once."""
STEPS = 2
"""Optimizer steps of the training."""


def main() -> int:
    os.chdir(Path(__file__).resolve().parent.parent)
    # Two cores on every machine: the stack of each thread counts in a trial's memory.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
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
    if doubts:
        return 1
    print(
        f"checked: every answer is a pair of real trials in {study}: one fit, {STEP} tokens "
        f"more ran out of memory\n",
        flush=True,
    )
    return train(folder, study)


def train(folder: Path, study: Path) -> int:
    """Train the longest length that the study has, with its settings, and check what came of it;
    the exit status.
    """
    answers = highwater.open_study(study).answers
    longest = max(answers, key=lambda answer: answer.capacity_tokens or 0)
    cell, data, run = longest.cell, folder / "data.jsonl", folder / "run"
    records = (
        {"prompt": topics[name][:300], "completion": topics[name][300:500]}
        for name in sorted(topics)
    )
    data.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    words = (
        f"train examples/tiny --device cpu --memory {MEMORY} --settings {study} --data {data} "
        f"--length {longest.capacity_tokens} --rows {cell.layout.gpus} --steps {STEPS} "
        f"--output {run}"
    )
    if status := type_command("highwater", *shlex.split(words)):
        return status
    if doubt := doubt_about_training(run, cell):
        print(f"not proven: {doubt}")
        return 1
    print(
        f"checked: {run} was trained on {counted(cell.layout.gpus, 'process')} as the study's "
        f"answer was, and its model is whole"
    )
    return 0


def doubt_about_training(run: Path, cell: Cell) -> str | None:
    """What of a run is not as the study's cell, or of its model not as the model that was named."""
    spec = from_json((run / "training.json").read_bytes(), TrainingSpec)
    # One row a step and process leaves nothing to accumulate, which trials do.
    settings = msgspec.structs.replace(spec.trial.settings, accumulates=cell.settings.accumulates)
    if (spec.trial.layout, settings) != (cell.layout, cell.settings):
        return f"{run} was not trained with the study's settings"
    weights = run / "model" / "model.safetensors"
    shape = load_model("examples/tiny").shape
    if load_model(str(run / "model")).shape != shape:
        return f"{run}/model is of another shape"
    # 8 bytes say how long the header is, which says where each tensor lies: the last ends the file.
    with weights.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        tensors = json.loads(file.read(header_bytes))
    ends = [each["data_offsets"][1] for name, each in tensors.items() if name != "__metadata__"]
    if weights.stat().st_size != 8 + header_bytes + max(ends):
        return f"{weights} is not whole"
    return None


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

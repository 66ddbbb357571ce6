"""300 steps of sft on real text on the CPU: the curve beside transformers' Trainer, a run that is
killed three times and goes on, and one that goes on with two processes.

    python docs/results/training/sft.py --out FOLDER > docs/results/training/sft.json
    python docs/results/training/sft.py --table

The text is the documentation of Python's standard library, as its own modules carry it: the
docstrings of ``pydoc``'s topics and of modules, a document each, a byte a token.
"""

import argparse
import hashlib
import json
import pydoc_data.topics
import random
import signal
import subprocess
import sys
import time
from ast import get_docstring, parse
from importlib.metadata import version
from pathlib import Path
from typing import Any

STEPS, ROWS, LENGTH, WARMUP_STEPS, RATE = 300, 2, 512, 20, 1e-3
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 260,
    "max_position_embeddings": 1024,
}
KILLS = 3
SAVE_EVERY = 40


def main() -> int:
    """Run everything, or print a recorded result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="a new folder for models, data and runs")
    parser.add_argument("--table", action="store_true", help="print the table of what is recorded")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(Path(__file__).with_name("sft.json").read_text())))
        return 0
    folder = arguments.out.absolute()
    folder.mkdir(parents=True)
    write_model(folder / "model")
    write_text(folder / "data.jsonl")
    print(json.dumps(measured(folder), indent=1))
    return 0


def measured(folder: Path) -> dict[str, Any]:
    """Everything, in a new folder."""
    plain = folder / "plain"
    train(folder, plain)
    theirs, their_weights = hugging_face(folder, plain)
    ours = losses_of(plain)
    killed = folder / "killed"
    kills = train_with_kills(folder, killed)
    moved = folder / "moved"
    stopped_at = train_until(folder, moved, STEPS // 2)
    train(folder, moved, "--gpus", "2")
    return {
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
        "model": SIZES,
        "steps": STEPS,
        "rows_per_step": ROWS,
        "length_tokens": LENGTH,
        "documents": corpus_of(plain)["documents"],
        "corpus_tokens": corpus_of(plain)["tokens"],
        "first_loss": ours[0],
        "last_loss": ours[-1],
        "off_from_transformers": off(ours, theirs),
        "weights_off_from_transformers": their_weights,
        "killed_at_steps": kills,
        "same_weights_after_kills": digest(killed) == digest(plain),
        "same_losses_after_kills": losses_of(killed) == ours,
        "stopped_and_gone_on_with_two_processes_at_step": stopped_at,
        "off_on_two_processes": off(losses_of(moved), ours),
        "losses": ours,
        "transformers_losses": theirs,
    }


def write_model(directory: Path) -> None:
    """A small Qwen3 with random weights."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)


def write_text(path: Path) -> None:
    """Documentation of the standard library, a document a line."""
    texts = list(pydoc_data.topics.topics.values())
    for name in sorted(sys.stdlib_module_names):
        try:
            source = _source(name)
            found = None if source is None else get_docstring(parse(source))
        except (SyntaxError, ValueError):
            continue
        if found:
            texts.append(found)
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text.strip()}) + "\n")


def _source(name: str) -> str | None:
    for path in (
        Path(json.__file__).parents[1] / f"{name}.py",
        Path(json.__file__).parents[1] / name / "__init__.py",
    ):
        if path.is_file():
            return path.read_text(encoding="utf-8", errors="replace")
    return None


def command(folder: Path, output: Path, *words: str) -> list[str]:
    """What is typed."""
    return [
        str(Path(sys.executable).parent / "highwater"), "train", str(folder / "model"),
        *("--data", str(folder / "data.jsonl"), "--length", str(LENGTH), "--steps", str(STEPS)),
        *("--rows", str(ROWS), "--schedule", "linear", "--warmup-steps", str(WARMUP_STEPS)),
        *("--learning-rate", str(RATE), "--save-every", str(SAVE_EVERY)),
        *("--long-documents", "split", "--device", "cpu", "--memory", "2GiB"),
        *("--output", str(output), *words),
    ]  # fmt: skip


def train(folder: Path, output: Path, *words: str) -> None:
    """Run the command to its end."""
    log = output.with_suffix(".said")
    with log.open("ab") as said:
        subprocess.run(command(folder, output, *words), stdout=said, stderr=said, check=True)


def train_until(folder: Path, output: Path, step: int) -> int:
    """Stop a run by SIGTERM once it is past a step; the step that it stopped after."""
    with output.with_suffix(".said").open("ab") as said:
        process = subprocess.Popen(command(folder, output), stdout=said, stderr=said)
        while process.poll() is None and steps_done(output) < step:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.wait()
    return max(state["step"] for state in states(output))


def train_with_kills(folder: Path, output: Path) -> list[int]:
    """Kill the command with -9 three times, at random steps, and let it go on; the steps at which
    it was killed.
    """
    draw = random.Random(0)
    killed: list[int] = []
    for _ in range(KILLS):
        at = (killed[-1] if killed else 0) + draw.randint(20, STEPS // (KILLS + 1))
        with output.with_suffix(".said").open("ab") as said:
            process = subprocess.Popen(command(folder, output), stdout=said, stderr=said)
            while process.poll() is None and steps_done(output) < at:
                time.sleep(0.02)
            process.kill()
            process.wait()
        killed.append(steps_done(output))
        while subprocess.run(["pgrep", "-f", str(output)], capture_output=True).stdout:
            time.sleep(0.1)
    train(folder, output)
    return killed


def steps_done(output: Path) -> int:
    """Steps that a run has written down."""
    try:
        lines = (output / "statistics.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        return 0
    try:
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except ValueError:
        return 0


def states(output: Path) -> list[dict[str, Any]]:
    """The states in a run's checkpoints."""
    return [
        json.loads(path.read_text()) for path in (output / "checkpoints").glob("step-*/state.json")
    ]


def losses_of(output: Path) -> list[float]:
    """The loss of each step, as the last checkpoint has them."""
    return max(states(output), key=lambda state: state["step"])["losses"]


def corpus_of(output: Path) -> dict[str, Any]:
    """What a run trains on."""
    return json.loads((output / "training.json").read_text())["corpus"]


def digest(output: Path) -> str:
    """Digest of the trained weights."""
    return hashlib.sha256((output / "model" / "model.safetensors").read_bytes()).hexdigest()


def off(found: list[float], expected: list[float]) -> float:
    """The largest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def hugging_face(folder: Path, output: Path) -> tuple[list[float], float]:
    """Losses of transformers' Trainer on the same rows, each document padded to a row of its own;
    and how far its weights are from ours, by the largest difference relative to a tensor's norm.
    """
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from highwater.engine.data.step_plan import StepPlan
    from highwater.engine.data.store import open_corpus

    corpus = open_corpus(corpus_of(output)["directory"])
    plan = StepPlan(corpus.lengths, corpus.units, row_tokens=LENGTH, micro_batches=ROWS, seed=0)
    rows = [
        [corpus.document(number).ids_L.tolist() for number in row]
        for step in range(1, STEPS + 1)
        for row in plan.step(step)
    ]

    def padded(examples: list[list[list[int]]]) -> dict[str, torch.Tensor]:
        (documents,) = examples
        shape = (len(documents), max(map(len, documents)))
        batch = {
            name: torch.zeros(shape, dtype=torch.long) for name in ("input_ids", "attention_mask")
        }
        batch["labels"] = torch.full(shape, -100)
        for number, ids in enumerate(documents):
            batch["input_ids"][number, : len(ids)] = torch.tensor(ids)
            batch["attention_mask"][number, : len(ids)] = 1
            batch["labels"][number, 1 : len(ids)] = torch.tensor(ids[1:], dtype=torch.long)
        return batch

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(folder / "transformers"),
            use_cpu=True,
            max_steps=STEPS,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=ROWS,
            train_sampling_strategy="sequential",
            learning_rate=RATE,
            weight_decay=0.01,
            lr_scheduler_type="linear",
            warmup_steps=WARMUP_STEPS,
            max_grad_norm=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        data_collator=padded,
        train_dataset=rows,
    )
    talk = sys.stdout
    sys.stdout = sys.stderr
    try:
        trainer.train()
    finally:
        sys.stdout = talk
    losses = [log["loss"] for log in trainer.state.log_history if "grad_norm" in log]
    ours = load_file(output / "model" / "model.safetensors")
    theirs = dict(model.named_parameters())
    apart = max(
        float((ours[name].float() - weight.detach()).norm() / weight.detach().norm())
        for name, weight in theirs.items()
        if name in ours
    )
    return losses, apart


def table(found: dict[str, Any]) -> str:
    """A result, as the page shows it."""
    rows = {
        "loss, first and last step": f"{found['first_loss']:.4f}, {found['last_loss']:.4f}",
        "curve, furthest from transformers' Trainer": f"{found['off_from_transformers']:.1e}",
        "weights, furthest from its weights": f"{found['weights_off_from_transformers']:.1e}",
        "killed with -9 after steps": ", ".join(map(str, found["killed_at_steps"])),
        "same losses and same weights, bit for bit": str(
            found["same_losses_after_kills"] and found["same_weights_after_kills"]
        ),
        "gone on with two processes after step": str(
            found["stopped_and_gone_on_with_two_processes_at_step"]
        ),
        "curve, furthest from that on one": f"{found['off_on_two_processes']:.1e}",
    }
    lines = ["| measured on the CPU, float32 | |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows.items())])


if __name__ == "__main__":
    sys.exit(main())

"""A loop around Trainer has the losses and ends with the weights of ``transformers.Trainer``."""

import pydoc_data.topics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, TrainingArguments
from transformers import Trainer as HuggingFaceTrainer

from curve import our_curve, save_model
from engine_models import save_random
from highwater.engine import Trainer
from highwater.engine.parallel.mesh import alone
from highwater.nouns.settings import Settings
from highwater.nouns.training import Schedule
from tables import deep
from tiny_models import SIZES

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

STEPS, MICRO_BATCHES, WARMUP_STEPS = 36, 2, 6
LENGTHS = (64, 33, 95)
"""Tokens of the documents of a micro-batch."""
RATE, DECAY = 5e-4, 0.1
TEXT = "\n".join(pydoc_data.topics.topics.values()).encode()
"""Python's own documentation, a byte a token."""
OF_BYTES = SIZES | {
    "vocab_size": 256,
    "intermediate_size": 64,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "qwen3": Qwen3Config(**OF_BYTES, tie_word_embeddings=True),
    "llama": LlamaConfig(**OF_BYTES, tie_word_embeddings=False),
}
CURVE = 1e-6
"""Norm-relative, in float32: sums are taken in another order."""
WEIGHTS = 1e-5
"""Of how far a weight went: a norm's are near 1, and went a hundredth."""
SCHEDULE = Schedule(name="linear", warmup_steps=WARMUP_STEPS, steps=STEPS)


def documents() -> Iterator[list[int]]:
    start = 0
    while True:
        for length in LENGTHS:
            yield list(TEXT[start : start + length])
            start += length


def rows(count: int) -> list[list[list[int]]]:
    source = documents()
    return [[next(source) for _ in LENGTHS] for _ in range(count)]


def ours(directory: Path, saved: Path) -> tuple[Tensor, Tensor, float]:
    every = rows(STEPS * MICRO_BATCHES)
    found = []
    with Trainer(
        str(directory),
        length=max(LENGTHS),
        sequences_per_micro_batch=3,
        loss="chunked",
        weight_decay=DECAY,
        device="cpu",
    ) as trainer:
        for step in range(1, STEPS + 1):
            trainer.learning_rate = RATE * SCHEDULE.factor(step)
            done = trainer.step(every[slice((step - 1) * MICRO_BATCHES, step * MICRO_BATCHES)])
            assert done.tokens == MICRO_BATCHES * sum(LENGTHS)
            found.append((done.loss, done.gradient_norm))
        evaluation = trainer.evaluate(every[:MICRO_BATCHES])
        assert evaluation.counted == MICRO_BATCHES * sum(length - 1 for length in LENGTHS)
        trainer.save(saved)
    losses, norms = torch.tensor(found, dtype=torch.float64).T
    assert evaluation.loss is not None
    return losses, norms, evaluation.loss


def padded(examples: list[list[int]]) -> dict[str, Tensor]:
    """Documents as rows of one length; nothing precedes a first token, which is not counted."""
    shape = (len(examples), max(map(len, examples)))
    batch = {
        "input_ids": torch.zeros(shape, dtype=torch.long),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
        "labels": torch.full(shape, -100),
    }
    for row, ids in enumerate(examples):
        batch["input_ids"][row, : len(ids)] = torch.tensor(ids)
        batch["attention_mask"][row, : len(ids)] = 1
        batch["labels"][row, 1 : len(ids)] = torch.tensor(ids[1:])
    return batch


def theirs(directory: Path, output: Path) -> tuple[Tensor, Tensor, float, Any]:
    every = [document for row in rows(STEPS * MICRO_BATCHES) for document in row]
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa"
    )
    of_a_step = MICRO_BATCHES * len(LENGTHS)
    trainer = HuggingFaceTrainer(
        model,
        TrainingArguments(
            output_dir=str(output),
            use_cpu=True,
            max_steps=STEPS,
            per_device_train_batch_size=len(LENGTHS),
            per_device_eval_batch_size=of_a_step,
            gradient_accumulation_steps=MICRO_BATCHES,
            train_sampling_strategy="sequential",
            learning_rate=RATE,
            weight_decay=DECAY,
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
        train_dataset=every,
        eval_dataset=every[:of_a_step],
    )
    try:
        trainer.train()
        evaluation = trainer.evaluate()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    logged = [log for log in trainer.state.log_history if "grad_norm" in log]
    losses, norms = torch.tensor(
        [(log["loss"], log["grad_norm"]) for log in logged], dtype=torch.float64
    ).T
    return losses, norms, evaluation["eval_loss"], model


@pytest.mark.timeout(240)
@pytest.mark.parametrize("family", CONFIGS)
def test_a_loop_of_steps_has_the_curve_and_the_weights_of_transformers_trainer(family, tmp_path):
    start = save_random(CONFIGS[family], tmp_path / "model")
    losses, norms, evaluated = ours(tmp_path / "model", tmp_path / "ours")
    their_losses, their_norms, their_evaluated, model = theirs(
        tmp_path / "model", tmp_path / "theirs"
    )
    assert len(losses) == len(their_losses) == STEPS
    assert losses[-1] < 0.95 * losses[0], "it learns"
    assert norms.max() > 1.0, "gradients are clipped"
    assert off(losses, their_losses) < CURVE
    assert off(norms, their_norms) < 10 * CURVE
    assert abs(evaluated - their_evaluated) < 10 * CURVE * their_evaluated
    end = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).state_dict()
    weights = model.state_dict()
    assert set(end) == set(weights) == set(start)
    for name, weight in weights.items():
        moved = (weight - start[name]).norm()
        assert moved > 0, name
        assert (end[name] - weight).norm() < WEIGHTS * moved, name


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


LOSSY = [
    Settings(optimizer="adamw-8bit"),
    Settings(optimizer="adamw-bf16", parameters="bf16", accumulates=False),
    *deep(
        Settings(optimizer="adamw-bf16"),
        Settings(optimizer="adamw-8bit", parameters="bf16", accumulates=False),
    ),
]
CURVE_STEPS = 60 if not deep(200) else 200
NEAR = 0.014
"""Norm-relative, of curves that are lossy: four times the furthest that was recorded
(docs/results/optimizers)."""


@pytest.mark.timeout(240)
def test_steps_with_few_bits_stay_near_the_curve_of_adamw(tmp_path):
    pytest.importorskip("torchao", reason="moments of few bits need the low-bit extra")
    cpu = torch.device("cpu")
    directory = save_model(tmp_path / "model")
    with alone(cpu):
        exact, *lossy = (
            our_curve(directory, cpu, torch.float32, settings, steps=CURVE_STEPS)
            for settings in (Settings(), *LOSSY)
        )
    for settings, losses in zip(LOSSY, lossy, strict=True):
        off = float((losses - exact).norm() / exact.norm())
        assert 0 < off < NEAR, f"{settings.label}: {off}"

"""Steps of Trainer are those of TRL's own DPOTrainer and GRPOTrainer on the same recorded data: the
loss of each step, and every gradient that its update is given, in float32 on the CPU.

GRPO's mean is over the tokens of the whole step: TRL's ``loss_type="dapo"``. What else would
differ, and is set here: the estimator of the divergence is k3 (ours is k2 unless it is named), and
it is not multiplied by the ratio (TRL's is unless ``use_bias_correction_kl`` is false); no dual
clip (TRL has none unless ``delta`` is named). TRL divides rewards by their deviation plus 1e-4, we
plus 1e-6, as verl: rewards are hundreds here.
"""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the data plane needs the train extra")

from environments import program_of
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config

from engine_models import save_random
from highwater.engine import Trainer
from highwater.engine.models.weights import name_in_files
from highwater.engine.parallel.fsdp2 import local_shard
from tiny_models import SIZES

pytestmark = [pytest.mark.emit, pytest.mark.timeout(600)]

READER = Path(__file__).parent / "readers" / "trl_steps.py"
END = 1
STEPS, MICRO_BATCHES, RATE, MOST_NORM = 2, 2, 2e-3, 0.25
LOSS = 1e-6
GRADIENT = {1: 1e-5, 2: 1e-4}
"""Norm-relative, by step: the second is taken where AdamW's first update led, which divides a
gradient by its own size, and with it its rounding."""
PROMPTS = ("What is peak memory? ", "How long a context fits here? ")
COMPLETIONS = (
    (
        "A high-water mark.",
        "The most that was ever allocated at once.",
        "No.",
        "It depends, mostly.",
    ),
    ("Try it.", "As long as memory holds it, and no longer.", "All of it.", "32k"),
)
REWARDS = ((300.0, 700.0, -400.0, 100.0), (50.0, 900.0, -250.0, 330.0))
PAIRS = [
    {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    for prompt, (first, chosen, rejected, last) in zip(PROMPTS, COMPLETIONS, strict=True)
    for chosen, rejected in ((chosen, rejected), (first, last))
]
COMMON = {
    "max_steps": STEPS,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "learning_rate": RATE,
    "weight_decay": 0.01,
    "max_grad_norm": MOST_NORM,
}
OURS = {"length": 128, "learning_rate": RATE, "max_grad_norm": MOST_NORM, "device": "cpu"}


@pytest.fixture
def model(tmp_path: Path) -> str:
    sizes = SIZES | {"vocab_size": 128, "intermediate_size": 64, "head_dim": 16}
    sizes |= {"max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": END}
    save_random(Qwen3Config(**sizes, tie_word_embeddings=False), tmp_path / "model")
    return str(tmp_path / "model")


def test_steps_of_dpo_are_those_of_trl(model, tmp_path):
    fields = {**COMMON, "per_device_train_batch_size": 2, "beta": 0.3, "max_length": 128}
    theirs = by_trl(tmp_path, model, "dpo", PAIRS, {**fields, "loss_type": ["sigmoid"]})
    documents = [
        document(pair["prompt"], pair[which]) for pair in PAIRS for which in ("chosen", "rejected")
    ]
    rows = [documents[:4], documents[4:]]
    settings = {**OURS, "objective": "dpo", "dpo_beta": 0.3, "sequences_per_micro_batch": 4}
    with Trainer(model, **settings) as trainer:
        for step in range(1, STEPS + 1):
            compare(step, theirs, *stepped(trainer, rows))
    assert theirs["2:rewards/margins"] > 0.01, "the policy has left the reference"


def test_steps_of_grpo_are_those_of_trl_with_its_token_mean(model, tmp_path):
    data = [
        {"prompt": prompt, "completions": list(zip(texts, rewards, strict=True))}
        for prompt, texts, rewards in zip(PROMPTS, COMPLETIONS, REWARDS, strict=True)
    ]
    fields = {
        **COMMON,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "steps_per_generation": MICRO_BATCHES,
        "num_iterations": STEPS,  # the second step is off its policy: ratios are none of 1
        "loss_type": "dapo",
        "scale_rewards": "group",
        "epsilon": 0.03,
        "epsilon_high": 0.05,
        "beta": 0.2,
        "use_bias_correction_kl": False,
        "temperature": 1.0,
        "max_completion_length": 64,
        "mask_truncated_completions": False,
    }
    theirs = by_trl(tmp_path, model, "grpo", data, fields)
    sampled_by = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows = [
        [
            {**document(prompt, text), "reward": reward, "group": group}
            for text, reward in zip(texts, rewards, strict=True)
        ]
        for group, (prompt, texts, rewards) in enumerate(
            zip(PROMPTS, COMPLETIONS, REWARDS, strict=True)
        )
    ]
    for of_row in rows:
        for each in of_row:
            each["logprobs"] = logprobs(sampled_by, each["input_ids"])
    settings = {
        **OURS,
        "objective": "grpo",
        "sequences_per_micro_batch": 4,
        "clip_ratio_low": 0.03,
        "clip_ratio_high": 0.05,
        "dual_clip": 0.0,
        "kl_estimator": "k3",
        "kl_coefficient": 0.2,
    }
    with Trainer(model, **settings) as trainer:
        for step in range(1, STEPS + 1):
            compare(step, theirs, *stepped(trainer, rows))
    assert theirs["2:clip_ratio/region_mean"] > 0, "some ratios are clipped"
    assert theirs["2:kl"] > 1e-4, "the policy has left the reference"


def by_trl(
    folder: Path, model: str, objective: str, data: Sequence[Any], fields: dict[str, Any]
) -> dict[str, Tensor]:
    order, result = folder / "order.json", folder / "steps.safetensors"
    asked = {"model": model, "objective": objective, "data": list(data), "fields": fields}
    order.write_text(json.dumps(asked | {"result": str(result)}))
    words = [program_of("trl"), READER, order]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return load_file(result)


def document(prompt: str, completion: str) -> dict[str, Any]:
    """A character a token; the completion alone is trained on, and its end."""
    ids = [*prompt.encode(), *completion.encode(), END]
    return {"input_ids": ids, "labels": [-100] * len(prompt) + ids[len(prompt) :]}


@torch.no_grad()
def logprobs(model: Any, ids: Sequence[int]) -> list[float]:
    row = torch.tensor([ids])
    of_all = model(row).logits[0, :-1].log_softmax(-1)
    return [0.0, *of_all.gather(1, row[0, 1:, None])[:, 0].tolist()]


def stepped(trainer: Trainer, rows: Sequence[Any]) -> tuple[float, dict[str, Tensor]]:
    model: nn.Module = trainer.training.policy
    gradients: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        for name, parameter in model.named_parameters():
            gradients[name_in_files(name)] = local_shard(parameter.grad).clone()

    hook = trainer.training.optimizer.register_step_pre_hook(keep)
    done = trainer.step(rows)
    hook.remove()
    assert done.gradient_norm > MOST_NORM, "gradients are clipped"
    return done.loss, gradients


def compare(
    step: int, theirs: dict[str, Tensor], loss: float, gradients: dict[str, Tensor]
) -> None:
    assert abs(loss - float(theirs[f"{step}:loss"])) < LOSS, step
    expected = {
        name.partition("/")[2]: value
        for name, value in theirs.items()
        if name.startswith(f"{step}/")
    }
    assert set(gradients) == set(expected)
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        assert (gradients[name] - gradient).norm() < GRADIENT[step] * gradient.norm(), (step, name)

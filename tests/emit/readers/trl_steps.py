"""Train by TRL and write the loss and every gradient of each step: ``trl_steps.py ORDER``.

``ORDER`` is a JSON file: the model's directory, ``dpo`` or ``grpo``, what is trained on in
characters, the fields of TRL's configuration, and the safetensors file to write.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

PAD, END = 0, 1


def tokenizer() -> PreTrainedTokenizerFast:
    """A character a token, its number that of ASCII."""
    vocabulary = {chr(number): number for number in range(32, 127)} | {"<pad>": PAD, "<end>": END}
    plain = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    plain.pre_tokenizer = Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<end>", unk_token="?"
    )


def load(directory: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa"
    )


class Steps(TrainerCallback):
    """Keeps the gradients that each step's update is given, clipped, and what is logged of it."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        step = state.global_step + 1
        for name, parameter in given["model"].named_parameters():
            self.found[f"{step}/{name}"] = parameter.grad.clone()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        for name in ("loss", "clip_ratio/region_mean", "rewards/margins", "kl"):
            if name in logs and "train_loss" not in logs:
                value = torch.tensor(float(logs[name]), dtype=torch.float64)
                self.found[f"{state.global_step}:{name}"] = value


def trainer_of(order: dict[str, Any]) -> Any:
    words = tokenizer()
    common = {
        **order["fields"],
        "output_dir": str(Path(order["result"]).parent / "trl"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    model = load(order["model"])
    if order["objective"] == "dpo":
        return DPOTrainer(
            model,
            load(order["model"]),
            args=DPOConfig(**common, train_sampling_strategy="sequential"),
            train_dataset=Dataset.from_list(order["data"]),
            processing_class=words,
        )
    recorded = order["data"]

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """What was sampled once, in the place of sampling: a prompt comes once a completion."""
        left = {each["prompt"]: list(each["completions"]) for each in recorded}
        chosen = [left[prompt].pop(0) for prompt in prompts]
        return {
            "prompt_ids": [words(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": [[*words(text)["input_ids"], END] for text, _ in chosen],
            "logprobs": [[0.0] * (len(text) + 1) for text, _ in chosen],
            "recorded_reward": [reward for _, reward in chosen],
        }

    def reward(completions: Any, recorded_reward: list[float], **given: Any) -> list[float]:
        return recorded_reward

    return GRPOTrainer(
        model,
        reward,
        args=GRPOConfig(**common),
        train_dataset=Dataset.from_list([{"prompt": each["prompt"]} for each in recorded]),
        processing_class=words,
        rollout_func=rollout,
    )


def main() -> None:
    order = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    trainer = trainer_of(order)
    steps = Steps()
    trainer.add_callback(steps)
    trainer.train()
    save_file(steps.found, order["result"])


if __name__ == "__main__":
    main()

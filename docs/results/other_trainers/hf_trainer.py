"""A training script as somebody may have it: Hugging Face's Trainer, a causal language model, and
sequences of exactly so many tokens, here of random ids.

    accelerate launch hf_trainer.py --model Qwen/Qwen3-0.6B --max-len 8192 --steps 2
"""

import argparse
import os

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


class RandomDocuments(Dataset[dict[str, Tensor]]):
    """So many documents of as many tokens each, the same every time."""

    def __init__(self, *, documents: int, tokens: int, vocab_size: int) -> None:
        self._documents, self._shape, self._vocab_size = documents, (tokens,), vocab_size

    def __len__(self) -> int:
        return self._documents

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        source = torch.Generator().manual_seed(index)
        ids = torch.randint(self._vocab_size, self._shape, generator=source)
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    """Train for so many steps."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-len", type=int, required=True)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=1, help="of each step")
    parser.add_argument("--output", default="output")
    words = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=words.output,
        max_steps=words.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=words.micro_batches,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        # accelerate's file may have FSDP recompute each layer: then the model does not
        gradient_checkpointing=os.environ.get("FSDP_ACTIVATION_CHECKPOINTING", "false") != "true",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    model = AutoModelForCausalLM.from_pretrained(words.model, dtype=torch.float32)
    model.config.use_cache = False
    documents = RandomDocuments(
        documents=words.steps * words.micro_batches * arguments.world_size,
        tokens=words.max_len,
        vocab_size=model.config.get_text_config().vocab_size,
    )
    Trainer(model=model, args=arguments, train_dataset=documents).train()


if __name__ == "__main__":
    main()

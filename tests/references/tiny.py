"""Tiny Hugging Face models in float64, dense and with experts, language models and score heads."""

from typing import Any

import torch
import transformers
from torch import nn

from references.documents import Document
from references.wide import float32_casts_lifted

VOCABULARY = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


def dense() -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**SIZES)


def with_experts() -> transformers.Qwen3MoeConfig:
    return transformers.Qwen3MoeConfig(
        **SIZES, head_dim=8, moe_intermediate_size=12, num_experts=6, num_experts_per_tok=2
    )


def language_model(config: Any, *, seed: int = 0) -> nn.Module:
    return _built(transformers.AutoModelForCausalLM, config, seed)


def scoring_model(config: Any, *, seed: int = 0) -> nn.Module:
    config.num_labels = 1
    return _built(transformers.AutoModelForSequenceClassification, config, seed)


def _built(of: Any, config: Any, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    with float32_casts_lifted():
        return of.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        ).double()


def documents(
    lengths: list[int], *, prompt: int = 3, seed: int = 0, **known: Any
) -> list[Document]:
    """Random documents whose first tokens are a prompt, and not trained; ``known`` has one value a
    document for each name.
    """
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index, length in enumerate(lengths):
        ids = torch.randint(VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[:prompt] = -100
        made.append(
            Document(
                ids=ids, labels=labels, **{name: values[index] for name, values in known.items()}
            )
        )
    return made

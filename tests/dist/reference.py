"""The unsharded reference: plain Hugging Face in float64, one document at a time, textbook loss."""

from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn

from highwater.engine.attention.plain_block import reference_attention
from highwater.nouns.hyperparameters import Hyperparameters
from tiny_models import SIZES

Documents = list[tuple[Tensor, Tensor]]

SHAPE = {**SIZES, "vocab_size": 97, "initializer_range": 0.2, "tie_word_embeddings": False}
EXPERTS = {
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.1,
}


def save_models(folder: Path) -> None:
    """Tiny models with random float64 weights, as safetensors."""
    torch.manual_seed(0)
    models = {
        "dense": transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE)),
        "tied": transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(**SHAPE | {"tie_word_embeddings": True})
        ),
        "moe": transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(**SHAPE, **EXPERTS, output_router_logits=True)
        ),
        "diffllama": transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**SHAPE)),
    }
    for name, model in models.items():
        model.double().save_pretrained(folder / name)


def reference_gradients(
    directory: Path, dtype: torch.dtype, micro_batches: list[Documents]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Mean loss over the trained tokens of all documents, norm before clipping."""
    model = load_textbook(directory, dtype)
    loss, norm = _backward(model, dtype, micro_batches)
    return loss, norm, {name: p.grad for name, p in model.named_parameters()}


def reference_training(
    directory: Path, dtype: torch.dtype, micro_batches: list[Documents], *, steps: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss and norm of the last of ``steps`` AdamW steps on the same documents."""
    model = load_textbook(directory, dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(_groups(model), lr=Hyperparameters().learning_rate, foreach=False)
    for _ in range(steps):
        optimizer.zero_grad()
        loss, norm = _backward(model, dtype, micro_batches)
        optimizer.step()
    return loss, norm, {name: p.detach() - before[name] for name, p in model.named_parameters()}


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """As transformers' Trainer has them: nothing of a norm or a bias decays. The default rate of
    the others is PyTorch's.
    """
    decays = transformers.Trainer.get_decay_parameter_names(cast(transformers.Trainer, None), model)
    named = dict(model.named_parameters())
    return [
        {"params": [p for name, p in named.items() if name in decays]},
        {"params": [p for name, p in named.items() if name not in decays], "weight_decay": 0.0},
    ]


def load_textbook(directory: Path, dtype: torch.dtype) -> nn.Module:
    """A causal LM whose every operation is the textbook's."""
    return unsharded(transformers.AutoModelForCausalLM, directory, dtype)


def unsharded(kind: Any, directory: Path, dtype: torch.dtype) -> nn.Module:
    """A model of an Auto class whose every operation is the textbook's."""
    transformers.AttentionInterface.register("textbook", _textbook_attention)
    model = kind.from_pretrained(
        directory,
        dtype=dtype,
        attn_implementation="textbook",
        experts_implementation="eager",
        local_files_only=True,
    )
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if type(norm).__name__.endswith("RMSNorm") and hasattr(norm, "variance_epsilon"):
                setattr(parent, name, _TextbookNorm(norm.weight, norm.variance_epsilon))
    return model


class _TextbookNorm(nn.Module):
    """Hugging Face's own norms compute in float32, whatever the model's dtype."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


def _backward(
    model: nn.Module, dtype: torch.dtype, micro_batches: list[Documents]
) -> tuple[Tensor, Tensor]:
    documents = [document for batch in micro_batches for document in batch]
    trained = sum(int((labels[1:] != -100).sum()) for _, labels in documents)
    tokens = sum(len(ids) for ids, _ in documents)
    loss = torch.zeros((), dtype=dtype)
    for ids, labels in documents:
        out = model(input_ids=ids[None], use_cache=False)
        if (labels[1:] != -100).any():
            logits = out.logits[0, :-1]
            loss = (
                loss
                + nn.functional.cross_entropy(
                    logits, labels[1:], ignore_index=-100, reduction="sum"
                )
                / trained
            )
        if getattr(model.config, "output_router_logits", False):
            loss = loss + len(ids) / tokens * router_loss(out.router_logits, model.config)
    loss.backward()
    return loss.detach(), nn.utils.clip_grad_norm_(
        model.parameters(), Hyperparameters().max_grad_norm
    )


def router_loss(router_logits: tuple[Tensor, ...], config: transformers.Qwen3MoeConfig) -> Tensor:
    """Switch Transformer's loss over all tokens and layers of a document: experts x sum of load x
    probability.
    """
    probabilities = torch.cat(router_logits).softmax(dim=-1)
    chosen = nn.functional.one_hot(
        probabilities.topk(config.num_experts_per_tok).indices, config.num_experts
    ).sum(dim=1)
    load = chosen.to(probabilities.dtype).mean(dim=0)
    return (
        config.router_aux_loss_coef * config.num_experts * (load * probabilities.mean(dim=0)).sum()
    )


def _textbook_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Hugging Face's own eager attention takes its softmax in float32, whatever the model's
    dtype.
    """
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    return reference_attention(q, k, v, document_lengths=[len(q)], scaling=scaling).to(query.dtype)[
        None
    ], None

"""Each objective as its paper has it: unsharded, float64, one document after another, nothing fused and nothing vectorised."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from reference import SHAPE, load_textbook, router_loss, unsharded
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from highwater.engine import objective as coefficients
from highwater.engine.data import Document

Ranks = list[list[list[Document]]]
"""Documents by data-parallel rank and micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Plain:
    """What a whole step comes to."""

    loss: Tensor
    policy: dict[str, Tensor]
    critic: dict[str, Tensor]


def save_judges(folder: Path) -> None:
    """What the policy is held to, and what judges it: other random weights than the policy's."""
    torch.manual_seed(1)
    config = Qwen3Config(**SHAPE, intermediate_size=48, tie_word_embeddings=False)
    Qwen3ForCausalLM(config).double().save_pretrained(folder / "reference")
    scalar = Qwen3Config(**SHAPE, intermediate_size=48, tie_word_embeddings=False, num_labels=1, pad_token_id=0)
    Qwen3ForSequenceClassification(scalar).double().save_pretrained(folder / "scalar")


def plain(objective: str, folder: Path, model: str, ranks: Ranks, *, critic: bool, entropy: bool) -> Plain:
    """Loss and gradients of a step on these documents."""
    micro_batches = [documents for of_rank in ranks for documents in of_rank]
    if objective == "rw":
        rewards = _scalar_model(folder)
        loss = _pairwise(rewards, micro_batches)
        loss.backward()
        return Plain(loss=loss.detach(), policy=_gradients(rewards), critic={})
    policy = load_textbook(folder / model, torch.float64)
    trained = sum(int((d.labels_L[1:] != -100).sum()) for documents in micro_batches for d in documents)
    judge = _scalar_model(folder) if critic else None
    if objective == "ppo":
        advantages, values, returns = _token_advantages(judge, [d for documents in micro_batches for d in documents])
    else:
        advantages = [a for of_rank in ranks for a in _group_advantages([d for documents in of_rank for d in documents])]
    reference = load_textbook(folder / "reference", torch.float64) if objective == "grpo" else None
    loss, index = torch.zeros((), dtype=torch.float64), 0
    for documents in micro_batches:
        routed = []
        for document in documents:
            logits, router_logits = _forward(policy, document)
            routed.append(router_logits)
            log_p = torch.log_softmax(logits, -1)
            for t, position in enumerate(_trained(document)):
                now = log_p[position - 1, document.ids_L[position]]
                advantage = advantages[index] if objective == "grpo" else advantages[index][t]
                ratio = (now - document.old_logprobs_L[position].double()).exp()
                clipped = ratio.clamp(1 - coefficients.CLIP_RATIO, 1 + coefficients.CLIP_RATIO)
                loss = loss - torch.min(ratio * advantage, clipped * advantage) / trained
                if entropy:
                    p = log_p[position - 1]
                    loss = loss + coefficients.ENTROPY_COEFFICIENT * (p.exp() * p).sum() / trained
                if reference is not None:
                    with torch.no_grad():
                        then = torch.log_softmax(_forward(reference, document)[0], -1)
                    difference = now - then[position - 1, document.ids_L[position]]
                    loss = loss + coefficients.KL_COEFFICIENT * difference**2 / 2 / trained
            index += 1
        if None not in routed:
            loss = loss + router_loss(routed, policy.config) / len(micro_batches)
    loss.backward()
    if judge is not None:
        _value_loss(judge, [d for documents in micro_batches for d in documents], values, returns, trained).backward()
    return Plain(loss=loss.detach(), policy=_gradients(policy), critic=_gradients(judge) if judge is not None else {})


def _forward(model: nn.Module, document: Document) -> tuple[Tensor, tuple[Tensor, ...] | None]:
    """Logits, and those of the routers of a mixture of experts."""
    experts = {"output_router_logits": True} if hasattr(model.config, "router_aux_loss_coef") else {}
    out = model(input_ids=document.ids_L[None], use_cache=False, **experts)
    return out.logits[0], out.router_logits if experts else None


def _trained(document: Document) -> list[int]:
    return [p for p in range(1, len(document.ids_L)) if document.labels_L[p] != -100]


def _scalar_model(folder: Path) -> nn.Module:
    return unsharded(AutoModelForSequenceClassification, folder / "scalar", torch.float64)


def _scalars(model: nn.Module, document: Document) -> Tensor:
    return model.score(model.model(input_ids=document.ids_L[None], use_cache=False).last_hidden_state)[0, :, 0]


def _pairwise(model: nn.Module, micro_batches: list[list[Document]]) -> Tensor:
    losses = []
    for documents in micro_batches:
        last = [_scalars(model, document)[-1] for document in documents]
        losses += [-torch.log(1 / (1 + torch.exp(last[i + 1] - last[i]))) for i in range(0, len(last), 2)]
    return torch.stack(losses).mean()


def _group_advantages(documents: list[Document]) -> list[float]:
    advantages = []
    for document in documents:
        peers = [other.reward for other in documents if other.group == document.group]
        mean = sum(peers) / len(peers)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in peers) / (len(peers) - 1))
        advantages.append((document.reward - mean) / (deviation + 1e-6))
    return advantages


@torch.no_grad()
def _token_advantages(
    critic: nn.Module | None, documents: list[Document]
) -> tuple[list[list[float]], list[list[float]], list[list[float]]]:
    """GAE by its recursion, backwards over each document's trained tokens; whitened over all of them."""
    raw, values = [], []
    for document in documents:
        positions = _trained(document)
        own = [float(_scalars(critic, document)[p - 1]) if critic is not None else 0.0 for p in positions]
        following, advantage, of_document = 0.0, 0.0, []
        for t in reversed(range(len(positions))):
            reward = document.reward if t == len(positions) - 1 else 0.0
            delta = reward + coefficients.DISCOUNT * following - own[t]
            advantage = delta + coefficients.DISCOUNT * coefficients.GAE_LAMBDA * advantage
            following = own[t]
            of_document.insert(0, advantage)
        raw.append(of_document)
        values.append(own)
    every = torch.tensor([a for of_document in raw for a in of_document], dtype=torch.float64)
    white = [[float((a - every.mean()) / (every.var() + 1e-8).sqrt()) for a in of_document] for of_document in raw]
    returns = [[a + v for a, v in zip(advantages, own, strict=True)] for advantages, own in zip(raw, values, strict=True)]
    return white, values, returns


def _value_loss(
    critic: nn.Module, documents: list[Document], values: list[list[float]], returns: list[list[float]], trained: int
) -> Tensor:
    loss = torch.zeros((), dtype=torch.float64)
    for document, before, wanted in zip(documents, values, returns, strict=True):
        now = _scalars(critic, document)
        for t, position in enumerate(_trained(document)):
            value = now[position - 1]
            kept = before[t] + (value - before[t]).clamp(-coefficients.VALUE_CLIP, coefficients.VALUE_CLIP)
            error = torch.max((value - wanted[t]) ** 2, (kept - wanted[t]) ** 2)
            loss = loss + coefficients.VALUE_COEFFICIENT * error / trained
    return loss


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

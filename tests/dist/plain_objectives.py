"""Each objective as its paper has it: unsharded, float64, one document after another, nothing fused
and nothing vectorised.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from reference import SHAPE, asks_for_router_loss, load_textbook, router_loss, unsharded
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from highwater.engine.data.batches import Document
from highwater.nouns.hyperparameters import Hyperparameters

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
    scalar = Qwen3Config(
        **SHAPE, intermediate_size=48, tie_word_embeddings=False, num_labels=1, pad_token_id=0
    )
    Qwen3ForSequenceClassification(scalar).double().save_pretrained(folder / "scalar")


def plain(
    objective: str,
    folder: Path,
    model: str,
    ranks: Ranks,
    *,
    critic: bool,
    entropy: bool,
    numbers: Hyperparameters,
) -> Plain:
    """Loss and gradients of a step on these documents."""
    micro_batches = [documents for of_rank in ranks for documents in of_rank]
    documents = [document for micro_batch in micro_batches for document in micro_batch]
    if objective == "rw":
        rewards = _scalar_model(folder)
        loss = _pairwise(rewards, micro_batches)
        loss.backward()
        return Plain(loss=loss.detach(), policy=_gradients(rewards), critic={})
    policy = load_textbook(folder / model, torch.float64)
    if objective == "dpo":
        loss = _preference(policy, folder, documents, numbers.dpo_beta)
        loss.backward()
        return Plain(loss=loss.detach(), policy=_gradients(policy), critic={})
    trained = sum(len(_trained(document)) for document in documents)
    tokens = sum(len(document.ids_L) for document in documents)
    judge = _scalar_model(folder) if critic else None
    if objective == "ppo":
        advantages, values, returns = _token_advantages(judge, documents, numbers)
    else:
        advantages = [
            [a] * len(_trained(d))
            for a, d in zip(_group_advantages(documents), documents, strict=True)
        ]
    reference = load_textbook(folder / "reference", torch.float64) if objective == "grpo" else None
    loss = torch.zeros((), dtype=torch.float64)
    for document, of_document in zip(documents, advantages, strict=True):
        out = policy(input_ids=document.ids_L[None], use_cache=False)
        log_p = torch.log_softmax(out.logits[0], -1)
        with torch.no_grad():
            then = (
                None
                if reference is None
                else torch.log_softmax(
                    reference(document.ids_L[None], use_cache=False).logits[0], -1
                )
            )
        for position, advantage in zip(_trained(document), of_document, strict=True):
            token = document.ids_L[position]
            now = log_p[position - 1, token]
            old = (
                now.detach()
                if document.old_logprobs_L is None
                else document.old_logprobs_L[position].double()
            )
            loss = loss + _clipped(now - old, advantage, numbers) / trained
            if entropy:
                p = log_p[position - 1]
                loss = loss + numbers.entropy_coefficient * (p.exp() * p).sum() / trained
            if then is not None:
                loss = (
                    loss
                    + numbers.kl_coefficient
                    * _divergence(now - then[position - 1, token], numbers.kl_estimator)
                    / trained
                )
        if asks_for_router_loss(policy):
            loss = loss + len(document.ids_L) / tokens * router_loss(
                out.router_logits, policy.config
            )
    loss.backward()
    if judge is not None:
        _value_loss(judge, documents, values, returns, trained, numbers).backward()
    return Plain(
        loss=loss.detach(),
        policy=_gradients(policy),
        critic=_gradients(judge) if judge is not None else {},
    )


def _clipped(log_ratio: Tensor, advantage: float, numbers: Hyperparameters) -> Tensor:
    """The better of two losses is not believed; the worse of them is no worse than the dual
    clip's.
    """
    ratio = log_ratio.clamp(-20, 20).exp()
    loss = -min(
        ratio * advantage,
        ratio.clamp(1 - numbers.clip_ratio_low, 1 + numbers.clip_ratio_high) * advantage,
    )
    if advantage < 0 and numbers.dual_clip:
        return min(loss, torch.tensor(-numbers.dual_clip * advantage, dtype=loss.dtype))
    return loss


def _divergence(log_ratio: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio**2 / 2
    back = (-log_ratio).clamp(-20, 20)
    return (back.exp() - back - 1).clamp(-10, 10)


def _trained(document: Document) -> list[int]:
    return [p for p in range(1, len(document.ids_L)) if document.labels_L[p] != -100]


def _scalar_model(folder: Path) -> nn.Module:
    return unsharded(AutoModelForSequenceClassification, folder / "scalar", torch.float64)


def _scalars(model: nn.Module, document: Document) -> Tensor:
    return model.score(
        model.model(input_ids=document.ids_L[None], use_cache=False).last_hidden_state
    )[0, :, 0]


def _pairwise(model: nn.Module, micro_batches: list[list[Document]]) -> Tensor:
    losses = []
    for documents in micro_batches:
        last = [_scalars(model, document)[-1] for document in documents]
        losses += [
            -torch.log(1 / (1 + torch.exp(last[i + 1] - last[i]))) for i in range(0, len(last), 2)
        ]
    return torch.stack(losses).mean()


def _preference(policy: nn.Module, folder: Path, documents: list[Document], beta: float) -> Tensor:
    """DPO, token by token; every micro-batch has whole pairs."""
    reference = load_textbook(folder / "reference", torch.float64)
    tokens, pairs = sum(len(document.ids_L) for document in documents), len(documents) // 2
    margins, loss = [torch.zeros((), dtype=torch.float64)] * pairs, torch.zeros(())
    for index, document in enumerate(documents):
        out = policy(input_ids=document.ids_L[None], use_cache=False)
        now = torch.log_softmax(out.logits[0], -1)
        with torch.no_grad():
            then = torch.log_softmax(reference(document.ids_L[None], use_cache=False).logits[0], -1)
        for position in _trained(document):
            token = document.ids_L[position]
            log_ratio = now[position - 1, token] - then[position - 1, token]
            margins[index // 2] = margins[index // 2] + (
                log_ratio if index % 2 == 0 else -log_ratio
            )
        if asks_for_router_loss(policy):
            loss = loss + len(document.ids_L) / tokens * router_loss(
                out.router_logits, policy.config
            )
    for margin in margins:
        loss = loss + torch.log(1 + torch.exp(-beta * margin)) / pairs
    return loss


def _group_advantages(documents: list[Document]) -> list[float]:
    """Of all documents of the step, whichever ranks and micro-batches they are in."""
    advantages = []
    for document in documents:
        peers = [other.reward for other in documents if other.group == document.group]
        mean, deviation = 0.0, 1.0
        if len(peers) > 1:
            mean = sum(peers) / len(peers)
            deviation = math.sqrt(sum((r - mean) ** 2 for r in peers) / (len(peers) - 1))
        advantages.append((document.reward - mean) / (deviation + 1e-6))
    return advantages


@torch.no_grad()
def _token_advantages(
    critic: nn.Module | None, documents: list[Document], numbers: Hyperparameters
) -> tuple[list[list[float]], list[list[float]], list[list[float]]]:
    """GAE by its recursion, backwards over each document's trained tokens; whitened over all of
    them.
    """
    raw, values = [], []
    for document in documents:
        positions = _trained(document)
        own = [
            float(_scalars(critic, document)[p - 1]) if critic is not None else 0.0
            for p in positions
        ]
        following, advantage, of_document = 0.0, 0.0, []
        for t in reversed(range(len(positions))):
            reward = document.reward if t == len(positions) - 1 else 0.0
            delta = reward + numbers.discount * following - own[t]
            advantage = delta + numbers.discount * numbers.gae_lambda * advantage
            following = own[t]
            of_document.insert(0, advantage)
        raw.append(of_document)
        values.append(own)
    every = torch.tensor([a for of_document in raw for a in of_document], dtype=torch.float64)
    white = [
        [float((a - every.mean()) / (every.var() + 1e-8).sqrt()) for a in of_document]
        for of_document in raw
    ]
    returns = [
        [a + v for a, v in zip(advantages, own, strict=True)]
        for advantages, own in zip(raw, values, strict=True)
    ]
    return white, values, returns


def _value_loss(
    critic: nn.Module,
    documents: list[Document],
    values: list[list[float]],
    returns: list[list[float]],
    trained: int,
    numbers: Hyperparameters,
) -> Tensor:
    loss = torch.zeros((), dtype=torch.float64)
    for document, before, wanted in zip(documents, values, returns, strict=True):
        now = _scalars(critic, document)
        for t, position in enumerate(_trained(document)):
            value = now[position - 1]
            kept = before[t] + (value - before[t]).clamp(-numbers.value_clip, numbers.value_clip)
            error = torch.max((value - wanted[t]) ** 2, (kept - wanted[t]) ** 2)
            loss = loss + numbers.value_coefficient * error / trained
    return loss


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

"""One document of a step, and what a plain model says about it when it runs alone."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from references.wide import float32_casts_lifted

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Document:
    """Tokens, which of them are trained, and what is known about them."""

    ids: Tensor
    """Token ids, shape (tokens,)."""
    labels: Tensor
    """Hugging Face's labels, shape (tokens,): the token itself where it is trained, -100
    elsewhere."""
    reward: float = 0.0
    """The outcome's score."""
    group: int = 0
    """Documents that answer the same prompt share a group."""
    old_logprobs: Tensor | None = None
    """Log-probability of each trained token when it was sampled, shape (trained tokens,); None:
    that of the current policy."""

    @property
    def trained(self) -> Tensor:
        """Positions of trained tokens; the first token of a document is predicted by nothing, so it
        is never one.
        """
        return torch.arange(1, len(self.ids))[self.labels[1:] != IGNORED]


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What a language model predicts of the trained tokens of one document."""

    logprobs: Tensor
    """Of each trained token, shape (trained tokens,)."""
    entropies: Tensor
    """Of the distribution from which each trained token is drawn, shape (trained tokens,)."""
    router_logits: tuple[Tensor, ...]
    """Of each layer with experts, shape (tokens, experts): of all tokens, trained or not. Empty for
    a dense model."""


def predictions(model: nn.Module, document: Document, *, router: bool = False) -> Predicted:
    """Run one document alone through a causal language model."""
    asked = {"output_router_logits": True} if router else {}
    with float32_casts_lifted():
        out = model(input_ids=document.ids[None], use_cache=False, **asked)
    trained = document.trained
    log_distribution = torch.log_softmax(out.logits[0, trained - 1], dim=-1)
    logprobs = log_distribution[torch.arange(len(trained)), document.labels[trained]]
    entropies = -(log_distribution.exp() * log_distribution).sum(-1)
    return Predicted(
        logprobs=logprobs,
        entropies=entropies,
        router_logits=tuple(out.router_logits) if router else (),
    )


def scores(model: nn.Module, document: Document) -> Tensor:
    """Score of every token of a document by a backbone with a head of one output, (tokens,)."""
    with float32_casts_lifted():
        hidden = model.model(input_ids=document.ids[None], use_cache=False).last_hidden_state
        return model.score(hidden)[0, :, 0]


def trained_tokens(documents: list[Document]) -> int:
    """Trained tokens of a whole step: what every mean over tokens divides by."""
    return sum(len(document.trained) for document in documents)

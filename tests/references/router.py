"""The routers' auxiliary loss."""

import torch
from torch import Tensor


def imbalance(router_logits: tuple[Tensor, ...], *, top_k: int) -> Tensor:
    """Experts times the sum over experts of the share of tokens sent there by its mean probability;
    layers are further tokens.

    ``top_k`` where the load is even. Only the probability has a gradient.
    """
    probabilities = torch.cat([logits.double().softmax(-1) for logits in router_logits])
    experts = probabilities.shape[-1]
    sent = torch.zeros_like(probabilities).scatter(1, probabilities.topk(top_k).indices, 1.0)
    return experts * (sent.mean(0) * probabilities.mean(0)).sum()


def step_imbalance(
    of_documents: list[tuple[Tensor, ...]], *, top_k: int, weights: list[float]
) -> Tensor:
    """Mean of the documents' imbalances, weighted: the same for every split of the step into
    micro-batches and ranks.
    """
    losses = torch.stack([imbalance(logits, top_k=top_k) for logits in of_documents])
    weight = torch.tensor(weights, dtype=torch.float64)
    return (losses * weight).sum() / weight.sum()

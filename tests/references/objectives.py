"""The loss of a whole step for each objective, as one differentiable number: documents run alone, sums over all of them."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from references.advantages import generalised, standardised_in_groups, whitened
from references.documents import Document, Predicted, predictions, scores, trained_tokens
from references.policy import clipped, clipped_value, divergence
from references.router import step_imbalance


@dataclass(frozen=True, kw_only=True)
class Router:
    """How the routers' auxiliary loss enters the loss of a step."""

    coefficient: float
    """The config's ``router_aux_loss_coef``."""
    top_k: int
    """The config's ``num_experts_per_tok``."""
    weighting: Literal["documents", "tokens"]
    """What a document's imbalance counts in the step's mean: the same for all, or its number of tokens."""

    def loss(self, documents: list[Document], predicted: list[Predicted]) -> Tensor:
        """The term to add, over all tokens of the documents."""
        weights = [1.0 if self.weighting == "documents" else float(len(document.ids)) for document in documents]
        return self.coefficient * step_imbalance([one.router_logits for one in predicted], top_k=self.top_k, weights=weights)


def supervised(model: nn.Module, documents: list[Document], *, router: Router | None = None) -> Tensor:
    """Negative log-likelihood, the mean over all trained tokens of the step."""
    predicted = [predictions(model, document, router=router is not None) for document in documents]
    loss = -_joined([one.logprobs for one in predicted]).sum() / trained_tokens(documents)
    return loss if router is None else loss + router.loss(documents, predicted)


def group_relative(
    policy: nn.Module,
    reference: nn.Module,
    documents: list[Document],
    *,
    estimator: str = "k3",
    divergence_coefficient: float = 0.001,
    entropy_coefficient: float = 0.0,
    router: Router | None = None,
) -> Tensor:
    """GRPO: rewards standardised in whole groups, the clipped loss, and a divergence from the reference; means over all tokens."""
    standardised = standardised_in_groups([one.reward for one in documents], [one.group for one in documents])
    advantages = [one.expand(len(document.trained)) for one, document in zip(standardised, documents, strict=True)]
    predicted = [predictions(policy, document, router=router is not None) for document in documents]
    loss = _policy_loss(documents, predicted, _joined(advantages), entropy_coefficient=entropy_coefficient)
    with torch.no_grad():
        referred = _joined([predictions(reference, document).logprobs for document in documents])
    estimates = divergence(_joined([one.logprobs for one in predicted]), referred, estimator=estimator)
    loss = loss + divergence_coefficient * estimates.mean()
    return loss if router is None else loss + router.loss(documents, predicted)


def proximal(
    policy: nn.Module,
    critic: nn.Module | None,
    documents: list[Document],
    *,
    entropy_coefficient: float = 0.0,
    router: Router | None = None,
) -> tuple[Tensor, Tensor | None]:
    """PPO: the policy's loss, and the critic's. Without a critic every value is 0 and nothing is trained to predict it.

    A token's value is the critic's score one token earlier, where the token is chosen; before the update it is the baseline.
    """
    values = [_values(critic, document) for document in documents]
    estimated = [generalised(one.detach(), document.reward) for one, document in zip(values, documents, strict=True)]
    advantages = whitened(_joined(estimated))
    predicted = [predictions(policy, document, router=router is not None) for document in documents]
    loss = _policy_loss(documents, predicted, advantages, entropy_coefficient=entropy_coefficient)
    if router is not None:
        loss = loss + router.loss(documents, predicted)
    if critic is None:
        return loss, None
    current = _joined(values)
    returns = _joined(estimated) + current.detach()
    return loss, clipped_value(current, current.detach(), returns).mean()


def pairwise(model: nn.Module, pairs: list[tuple[Document, Document]]) -> Tensor:
    """The mean over pairs (chosen, rejected) of the negative log-probability that the chosen one wins.

    A document's score is its last token's.
    """
    margins = [scores(model, chosen)[-1] - scores(model, rejected)[-1] for chosen, rejected in pairs]
    return -torch.nn.functional.logsigmoid(torch.stack(margins)).mean()


def _policy_loss(
    documents: list[Document], predicted: list[Predicted], advantages: Tensor, *, entropy_coefficient: float
) -> Tensor:
    logprobs = _joined([one.logprobs for one in predicted])
    old = _joined(
        [
            one.logprobs.detach() if document.old_logprobs is None else document.old_logprobs
            for one, document in zip(predicted, documents, strict=True)
        ]
    )
    entropy = _joined([one.entropies for one in predicted]).mean()
    return clipped(logprobs, old, advantages).mean() - entropy_coefficient * entropy


def _values(critic: nn.Module | None, document: Document) -> Tensor:
    trained = document.trained
    return torch.zeros(len(trained), dtype=torch.float64) if critic is None else scores(critic, document)[trained - 1]


def _joined(of_documents: list[Tensor]) -> Tensor:
    return torch.cat(of_documents)

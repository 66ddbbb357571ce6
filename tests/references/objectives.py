"""The loss of a whole step for each objective, as one differentiable number."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from references.advantages import generalised, standardised_in_groups, whitened
from references.documents import Document, Predicted, predictions, scores, trained_tokens
from references.policy import clipped, clipped_value, divergence
from references.router import step_imbalance


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What the definitions leave open, at verl's defaults; the decay is that of the paper and of
    TRL.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    divergence: float = 0.001
    """Weight of the divergence from the reference model: GRPO."""
    entropy: float = 0.0
    """Weight of the entropy, which lowers the loss."""
    value: float = 0.5
    """Weight of the critic's squared error, which verl and TRL halve."""
    value_clip: float = 0.5
    discount: float = 1.0
    decay: float = 0.95
    """The lambda of generalised advantage estimation."""
    preference: float = 0.1
    """DPO's beta, at TRL's default."""


USUAL = Numbers()


@dataclass(frozen=True, kw_only=True)
class Router:
    """How the routers' auxiliary loss enters the loss of a step."""

    coefficient: float
    """The config's ``router_aux_loss_coef``."""
    top_k: int
    """The config's ``num_experts_per_tok``."""

    def loss(self, documents: list[Document], predicted: list[Predicted]) -> Tensor:
        """The term to add: the mean of transformers' loss of each document alone, a document as
        often as it has tokens.

        transformers has one value for each way to batch a step; which one a step has is
        docs/decisions/008.
        """
        weights = [float(len(document.ids)) for document in documents]
        return self.coefficient * step_imbalance(
            [one.router_logits for one in predicted], top_k=self.top_k, weights=weights
        )


def supervised(
    model: nn.Module, documents: list[Document], *, router: Router | None = None
) -> Tensor:
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
    numbers: Numbers = USUAL,
    router: Router | None = None,
) -> Tensor:
    """GRPO: rewards standardised in whole groups, the clipped loss, and a divergence from the
    reference; means over all tokens.
    """
    standardised = standardised_in_groups(
        [one.reward for one in documents], [one.group for one in documents]
    )
    advantages = [
        one.expand(len(document.trained))
        for one, document in zip(standardised, documents, strict=True)
    ]
    predicted = [predictions(policy, document, router=router is not None) for document in documents]
    loss = _policy_loss(documents, predicted, _joined(advantages), numbers)
    with torch.no_grad():
        referred = _joined([predictions(reference, document).logprobs for document in documents])
    estimates = divergence(
        _joined([one.logprobs for one in predicted]), referred, estimator=estimator
    )
    loss = loss + numbers.divergence * estimates.mean()
    return loss if router is None else loss + router.loss(documents, predicted)


def proximal(
    policy: nn.Module,
    critic: nn.Module | None,
    documents: list[Document],
    *,
    numbers: Numbers = USUAL,
    router: Router | None = None,
) -> tuple[Tensor, Tensor | None]:
    """PPO: the policy's loss, and the critic's. Without a critic every value is 0 and nothing is
    trained to predict it.

    A token's value is the critic's score one token earlier, where the token is chosen; before the
    update it is the baseline.
    """
    values = [_values(critic, document) for document in documents]
    estimated = [
        generalised(one.detach(), document.reward, discount=numbers.discount, decay=numbers.decay)
        for one, document in zip(values, documents, strict=True)
    ]
    advantages = whitened(_joined(estimated))
    predicted = [predictions(policy, document, router=router is not None) for document in documents]
    loss = _policy_loss(documents, predicted, advantages, numbers)
    if router is not None:
        loss = loss + router.loss(documents, predicted)
    if critic is None:
        return loss, None
    current = _joined(values)
    returns = _joined(estimated) + current.detach()
    errors = clipped_value(current, current.detach(), returns, clip=numbers.value_clip)
    return loss, numbers.value * errors.mean()


def pairwise(model: nn.Module, pairs: list[tuple[Document, Document]]) -> Tensor:
    """The mean over pairs (chosen, rejected) of the negative log-probability that the chosen one
    wins.

    A document's score is its last token's.
    """
    margins = [
        scores(model, chosen)[-1] - scores(model, rejected)[-1] for chosen, rejected in pairs
    ]
    return -torch.nn.functional.logsigmoid(torch.stack(margins)).mean()


def preference(
    policy: nn.Module,
    reference: nn.Module,
    pairs: list[tuple[Document, Document]],
    *,
    numbers: Numbers = USUAL,
    router: Router | None = None,
) -> Tensor:
    """DPO: the mean over pairs (chosen, rejected) of the negative log-probability that the chosen
    one wins, where a document's score is beta times the logarithm of how much likelier its
    completion is under the policy than under the reference.

    A completion's log-probability is the sum over its tokens, not their mean: equation 7 of the
    paper (Rafailov et al., https://arxiv.org/abs/2305.18290), TRL's ``loss_type="sigmoid"``.

    Compared with TRL's own code on the models of ``references.tiny``, dense and with experts, four
    pairs of odd lengths, beta 0.1 and 0.7: ``concatenated_forward`` and ``dpo_loss`` of trl 0.15.2
    in float64 give this loss and every gradient to 4e-15, ``DPOTrainer._compute_loss`` of trl
    1.16.0, whose head is float32, the loss to 3e-7 and the gradients to 2e-6. The routers' loss,
    which TRL has once for a padded batch, was off in both.
    """
    documents = [document for pair in pairs for document in pair]
    predicted = [predictions(policy, document, router=router is not None) for document in documents]
    with torch.no_grad():
        referred = [predictions(reference, document).logprobs.sum() for document in documents]
    likelier = [one.logprobs.sum() - other for one, other in zip(predicted, referred, strict=True)]
    losses = [
        -torch.nn.functional.logsigmoid(numbers.preference * (chosen - rejected))
        for chosen, rejected in zip(likelier[::2], likelier[1::2], strict=True)
    ]
    loss = torch.stack(losses).mean()
    return loss if router is None else loss + router.loss(documents, predicted)


def _policy_loss(
    documents: list[Document], predicted: list[Predicted], advantages: Tensor, numbers: Numbers
) -> Tensor:
    logprobs = _joined([one.logprobs for one in predicted])
    old = _joined(
        [
            one.logprobs.detach() if document.old_logprobs is None else document.old_logprobs
            for one, document in zip(predicted, documents, strict=True)
        ]
    )
    entropy = _joined([one.entropies for one in predicted]).mean()
    losses = clipped(
        logprobs,
        old,
        advantages,
        low=numbers.clip_low,
        high=numbers.clip_high,
        dual=numbers.dual_clip,
    )
    return losses.mean() - numbers.entropy * entropy


def _values(critic: nn.Module | None, document: Document) -> Tensor:
    trained = document.trained
    return (
        torch.zeros(len(trained), dtype=torch.float64)
        if critic is None
        else scores(critic, document)[trained - 1]
    )


def _joined(of_documents: list[Tensor]) -> Tensor:
    return torch.cat(of_documents)

"""Objectives: functions of per-token values; each returns its share of a mean over a step.

The mean is over all trained tokens of all micro-batches and ranks, with equal weights:
"token-mean" over the whole batch in verl's words, ``loss_type="dapo"`` in TRL's. For pairs it is
over all pairs, with equal weights. Shares add up to that mean, and so do their gradients, however
the step is split. A rank without a trained token returns 0 with a graph. The losses are verl's
(verl/trainer/ppo/core_algos.py); their settings and defaults are in nouns/hyperparameters.py.

Shapes:  N trained tokens of one micro-batch, document after document  D documents
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from highwater.nouns.hyperparameters import KlEstimator

_MOST_LOG_RATIO = 20.0
"""Largest log-ratio, as in verl: float32 cannot hold e^89. Past it there is no gradient."""
_MOST_K3 = 10.0
"""Largest value of the estimator k3; larger ones are clamped, as in verl."""
_SMALL = 1e-6
"""Added to a group's deviation, so that equal rewards do not divide by zero, as in verl."""


def sft(logprobs_N: Tensor, *, trained_tokens: int) -> Tensor:
    """A micro-batch's share of the mean loss over the ``trained_tokens`` tokens of a whole step."""
    return -logprobs_N.sum() / max(1, trained_tokens)


def sft_logprob_gradient(*, trained_tokens: int) -> float:
    """Derivative of ``sft`` by each log-probability: a constant, known before the forward pass."""
    return -1 / max(1, trained_tokens)


def clip_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    low: float,
    high: float,
    dual: float,
    trained_tokens: int,
) -> Tensor:
    """PPO's clipped policy loss, verl's ``vanilla``: with a dual clip unless ``dual`` is 0.

    Sources: Schulman et al., https://arxiv.org/abs/1707.06347, equation 7; Ye et al.,
    https://arxiv.org/abs/1912.09729, equation 5.
    """
    ratio_N = _log_ratio(logprobs_N, old_logprobs_N).exp()
    losses_N = torch.maximum(
        -advantages_N * ratio_N, -advantages_N * ratio_N.clamp(1 - low, 1 + high)
    )
    if dual:
        losses_N = torch.where(
            advantages_N < 0, torch.minimum(losses_N, -advantages_N * dual), losses_N
        )
    return losses_N.sum() / max(1, trained_tokens)


def old_logprobs(sampled_N: Tensor | None, before_N: Tensor) -> Tensor:
    """Log-probabilities when sampled; where NaN (unknown), those of the policy before the step."""
    if sampled_N is None:
        return before_N
    sampled_N = sampled_N.to(before_N.dtype)
    return torch.where(sampled_N.isnan(), before_N, sampled_N)


def clipped_tokens(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    low: float,
    high: float,
    dual: float,
) -> tuple[Tensor, Tensor]:
    """Return which tokens' ratio ``clip_loss`` clips, and which tokens its dual clip bounds;
    boolean, each of shape N. verl's ``pg_clipfrac`` and ``pg_clipfrac_lower`` are their means.
    """
    ratio_N = _log_ratio(logprobs_N, old_logprobs_N).exp()
    plain_N = -advantages_N * ratio_N
    clipped_N = -advantages_N * ratio_N.clamp(1 - low, 1 + high)
    held_N = torch.maximum(plain_N, clipped_N) > -advantages_N * dual
    return clipped_N > plain_N, held_N & (advantages_N < 0) & bool(dual)


def divergence(
    logprobs_N: Tensor,
    reference_logprobs_N: Tensor,
    *,
    estimator: KlEstimator,
    coefficient: float,
    trained_tokens: int,
) -> Tensor:
    """Weighted divergence of the policy from the reference, estimated from the sampled tokens.

    k1 is the log-ratio itself, k2 half its square, k3 (verl's ``low_var_kl``) the inverse ratio
    minus its logarithm minus 1. Source: http://joschu.net/blog/kl-approx.html.
    """
    match estimator:
        case "k1":
            estimates_N = logprobs_N - reference_logprobs_N
        case "k2":
            estimates_N = 0.5 * (logprobs_N - reference_logprobs_N).square()
        case "k3":
            log_ratio_N = _log_ratio(reference_logprobs_N, logprobs_N)
            estimates_N = (log_ratio_N.exp() - log_ratio_N - 1).clamp(-_MOST_K3, _MOST_K3)
    return coefficient * estimates_N.sum() / max(1, trained_tokens)


def value_loss(
    values_N: Tensor,
    old_values_N: Tensor,
    returns_N: Tensor,
    *,
    clip: float,
    coefficient: float,
    trained_tokens: int,
) -> Tensor:
    """Clipped squared error of the critic. Source: Schulman et al., openai/baselines, ppo2."""
    clipped_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
    errors_N = torch.maximum((values_N - returns_N).square(), (clipped_N - returns_N).square())
    return coefficient * errors_N.sum() / max(1, trained_tokens)


def pairwise(rewards_D: Tensor, *, pairs: int) -> Tensor:
    """Bradley-Terry loss of rewards; documents are ordered as chosen, rejected, chosen, ...

    ``pairs`` counts all micro-batches of all ranks.
    """
    return -F.logsigmoid(rewards_D[0::2] - rewards_D[1::2]).sum() / max(1, pairs)


def document_sums(of_tokens_N: Tensor, documents_N: Tensor, *, documents: int) -> Tensor:
    """Sum each document's trained tokens, shape D, in float64.

    In float32 the error over a million tokens would exceed a typical margin between two documents,
    and on a GPU it would differ each time.
    """
    zeros_D = of_tokens_N.new_zeros(documents, dtype=torch.float64)
    return zeros_D.index_add(0, documents_N, of_tokens_N.double())


def preference(log_ratios_D: Tensor, *, beta: float, pairs: int) -> Tensor:
    """DPO's loss: the Bradley-Terry loss with ``beta`` times a document's log-ratio (its completion
    under the policy against the reference) as its reward.

    Source: Rafailov et al., https://arxiv.org/abs/2305.18290, equation 7; TRL's default,
    ``loss_type="sigmoid"``.
    """
    return pairwise(beta * log_ratios_D, pairs=pairs)


def group_advantages(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """GRPO's advantage of each sequence: its reward minus the group's mean, in standard deviations;
    in a group of one, reward / (1 + 1e-6).

    Source: Shao et al., https://arxiv.org/abs/2402.03300, section 4.1, as verl computes it.
    """
    members: dict[int, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        members.setdefault(group, []).append(reward)
    scales = {group: _mean_and_deviation(rewards) for group, rewards in members.items()}
    means_and_deviations = (scales[group] for group in groups)
    return [
        (reward - mean) / (deviation + _SMALL)
        for reward, (mean, deviation) in zip(rewards, means_and_deviations, strict=True)
    ]


def generalized_advantages(
    rewards_N: Tensor, values_N: Tensor, documents_N: Tensor, *, discount: float, gae_lambda: float
) -> Tensor:
    """GAE along each document's trained tokens. Without a critic the values are zeros, and with
    ``gae_lambda`` 1 this is the discounted return.

    ``A[t] = sum over k of (discount * gae_lambda)^k * delta[t + k]``, summed by doubling: log2(N)
    passes, no loop over tokens. Source: Schulman et al., https://arxiv.org/abs/1506.02438.
    """
    same_N = documents_N[1:] == documents_N[:-1]
    following_N = (
        F.pad(torch.where(same_N, values_N[1:], 0.0), (0, 1)) if len(values_N) else values_N
    )
    advantages_N = rewards_N + discount * following_N - values_N
    reach, decay = 1, discount * gae_lambda
    while reach < len(advantages_N):
        same_N = documents_N[reach:] == documents_N[:-reach]
        advantages_N = advantages_N + F.pad(
            torch.where(same_N, decay * advantages_N[reach:], 0.0), (0, reach)
        )
        reach, decay = 2 * reach, decay * decay
    return advantages_N


def last_of_each(documents_N: Tensor) -> Tensor:
    """True for the last trained token of each document, which gets the reward; shape N."""
    if not len(documents_N):
        return documents_N.bool()
    return F.pad(documents_N[1:] != documents_N[:-1], (0, 1), value=True)


def _log_ratio(of_N: Tensor, to_N: Tensor) -> Tensor:
    return (of_N - to_N).clamp(-_MOST_LOG_RATIO, _MOST_LOG_RATIO)


def _mean_and_deviation(rewards: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard deviation of a group's rewards; 0 and 1 for a single reward."""
    if len(rewards) == 1:
        return 0.0, 1.0
    mean = sum(rewards) / len(rewards)
    return mean, math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))

"""Objectives: ordinary functions of per-token numbers; each gives this micro-batch's share of a mean over the whole batch.

Shares of all micro-batches and ranks add up to the mean, and so do their gradients. A rank without a trained token gives 0, with
a graph. Coefficients are the reference system's defaults (verl 0.5 to 0.7).

Shapes:  N trained tokens of one micro-batch, document after document  D documents
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

CLIP_RATIO = 0.2
"""How far a token's probability may move from the policy that sampled it before its gradient stops."""
ENTROPY_COEFFICIENT = 0.001
KL_COEFFICIENT = 0.001
VALUE_CLIP = 0.5
"""How far a value may move from the one before the update."""
VALUE_COEFFICIENT = 0.5
DISCOUNT = 1.0
GAE_LAMBDA = 0.95
_SMALL = 1e-6
"""Keeps a group of equal rewards from dividing by zero."""


def sft(logprobs_N: Tensor, *, trained_tokens: int) -> Tensor:
    """Mean negative log-likelihood over the trained tokens of the whole batch."""
    return -logprobs_N.sum() / max(1, trained_tokens)


def sft_slope(*, trained_tokens: int) -> float:
    """What ``sft`` changes by with each log-probability, which no other objective could say before it has them."""
    return -1 / max(1, trained_tokens)


def clip_loss(logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, *, trained_tokens: int) -> Tensor:
    """PPO's clipped policy loss. Source: Schulman et al., https://arxiv.org/abs/1707.06347, equation 7."""
    ratio_N = (logprobs_N - old_logprobs_N).exp()
    clipped_N = ratio_N.clamp(1 - CLIP_RATIO, 1 + CLIP_RATIO)
    return -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N).sum() / max(1, trained_tokens)


def entropy_bonus(entropies_N: Tensor, *, trained_tokens: int) -> Tensor:
    """What is subtracted to keep the policy from collapsing: the mean entropy, weighted."""
    return ENTROPY_COEFFICIENT * entropies_N.sum() / max(1, trained_tokens)


def k2_penalty(logprobs_N: Tensor, reference_logprobs_N: Tensor, *, trained_tokens: int) -> Tensor:
    """Half the squared log-ratio to the reference, weighted: "k2" of http://joschu.net/blog/kl-approx.html."""
    return KL_COEFFICIENT * 0.5 * (logprobs_N - reference_logprobs_N).square().sum() / max(1, trained_tokens)


def value_loss(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, *, trained_tokens: int) -> Tensor:
    """Clipped squared error of the critic. Source: Schulman et al., openai/baselines, ppo2."""
    clipped_N = old_values_N + (values_N - old_values_N).clamp(-VALUE_CLIP, VALUE_CLIP)
    errors_N = torch.maximum((values_N - returns_N).square(), (clipped_N - returns_N).square())
    return VALUE_COEFFICIENT * errors_N.sum() / max(1, trained_tokens)


def pairwise(rewards_D: Tensor, *, pairs: int) -> Tensor:
    """Bradley and Terry's loss of a reward model; documents come as chosen, rejected, chosen, rejected, ...

    ``pairs`` counts all micro-batches of all ranks.
    """
    return -F.logsigmoid(rewards_D[0::2] - rewards_D[1::2]).sum() / max(1, pairs)


def group_advantages(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """GRPO's advantage of each sequence: its reward against those of its group, in standard deviations; alone, its reward.

    Source: Shao et al., DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.
    """
    members: dict[int, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        members.setdefault(group, []).append(reward)
    return [_standardised(reward, members[group]) for reward, group in zip(rewards, groups, strict=True)]


def generalized_advantages(rewards_N: Tensor, values_N: Tensor, documents_N: Tensor) -> Tensor:
    """GAE along each document's trained tokens; without a critic, the values are zeros and this is the discounted return.

    ``A[t] = sum over k of (DISCOUNT * GAE_LAMBDA)^k * delta[t + k]``, summed by doubling: log2(N) passes, no loop over tokens.
    Source: Schulman et al., https://arxiv.org/abs/1506.02438.
    """
    same_N = documents_N[1:] == documents_N[:-1]
    following_N = F.pad(torch.where(same_N, values_N[1:], 0.0), (0, 1)) if len(values_N) else values_N
    advantages_N = rewards_N + DISCOUNT * following_N - values_N
    reach, decay = 1, DISCOUNT * GAE_LAMBDA
    while reach < len(advantages_N):
        same_N = documents_N[reach:] == documents_N[:-reach]
        advantages_N = advantages_N + F.pad(torch.where(same_N, decay * advantages_N[reach:], 0.0), (0, reach))
        reach, decay = 2 * reach, decay * decay
    return advantages_N


def last_of_each(documents_N: Tensor) -> Tensor:
    """Which trained tokens are their document's last: where its reward is given."""
    if not len(documents_N):
        return documents_N.bool()
    return F.pad(documents_N[1:] != documents_N[:-1], (0, 1), value=True)


def _standardised(reward: float, members: list[float]) -> float:
    if len(members) == 1:
        return reward
    mean = sum(members) / len(members)
    variance = sum((other - mean) ** 2 for other in members) / (len(members) - 1)
    return (reward - mean) / (variance**0.5 + _SMALL)

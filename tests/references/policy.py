"""Losses of single tokens: the clipped policy's, the critic's; estimates of the divergence."""

import torch
from torch import Tensor


def clipped(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float = 3.0,
) -> Tensor:
    """PPO's pessimistic surrogate with the dual clip, of each token: verl's "vanilla" policy loss.

    The larger of ``-A r`` and ``-A clip(r, 1 - low, 1 + high)``; a token of negative advantage
    never costs more than ``-A dual``. The log-ratio is held within 20, so that no ratio overflows.
    """
    ratios = (logprobs - old_logprobs).clamp(-20.0, 20.0).exp()
    surrogate = torch.maximum(-advantages * ratios, -advantages * ratios.clamp(1 - low, 1 + high))
    return torch.where(advantages < 0, torch.minimum(surrogate, -advantages * dual), surrogate)


def divergence(logprobs: Tensor, reference_logprobs: Tensor, *, estimator: str) -> Tensor:
    """Estimate of KL(policy, reference) from each sampled token: Schulman's k1, k2, k3 with verl's
    clamps on k3.
    """
    log_ratios = logprobs - reference_logprobs
    if estimator == "k1":
        return log_ratios
    if estimator == "k2":
        return log_ratios**2 / 2
    if estimator == "k3":
        reverse = (-log_ratios).clamp(-20.0, 20.0)
        return (reverse.exp() - 1 - reverse).clamp(-10.0, 10.0)
    raise ValueError(f"no estimator {estimator}")


def clipped_value(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float = 0.5
) -> Tensor:
    """The larger squared error of a value and of the value held within ``clip`` of what it was."""
    held = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    return torch.maximum((values - returns) ** 2, (held - returns) ** 2)

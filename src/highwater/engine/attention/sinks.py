"""Sinks: learned numbers, one for each query head, that take part in the softmax beside the keys
and give nothing.

A sink adds its exponential to the sum of each query's and no value: what is attended is multiplied
by the keys' part of the sum. Going backward a kernel that is given the output and the log-sum-exp
with the sink in it has the true weights, and computes what it always does.

Shapes:  B documents  H query heads  S tokens  D head size
Source: Xiao et al., https://arxiv.org/abs/2309.17453; OpenAI, gpt-oss, whose sink is a score of a
        key without a value
"""

import torch
from torch import Tensor

_PRODUCTS_AT_HAND = 2**22
"""Products of a gradient and an output that are summed at once; one token's at the least."""


def join_sinks_(output_BHSD: Tensor, log_sums_BHS: Tensor, sinks_H: Tensor) -> Tensor:
    """Weigh what is attended to the keys as beside the sinks, in place; return the logarithm of
    each query's sum with its sink in it, BHS.
    """
    joint_BHS = torch.logaddexp(log_sums_BHS, sinks_H.to(log_sums_BHS.dtype)[:, None])
    output_BHSD.mul_((log_sums_BHS - joint_BHS).exp_()[..., None])
    return joint_BHS


def sink_gradient(
    gradient_BHSD: Tensor, output_BHSD: Tensor, log_sums_BHS: Tensor, sinks_H: Tensor
) -> Tensor:
    """The sinks' gradient; H. ``output`` and ``log_sums`` are those with the sinks in them.

    A score's gradient is its weight times how far its value is above the mean. A sink's value is 0,
    and the mean is the output.
    """
    wide = log_sums_BHS.dtype
    batch, heads, _, size = output_BHSD.shape
    at_once = max(1, _PRODUCTS_AT_HAND // (batch * heads * size))
    sum_H = torch.zeros(heads, dtype=wide, device=sinks_H.device)
    rows = (tensor.split(at_once, dim=2) for tensor in (gradient_BHSD, output_BHSD, log_sums_BHS))
    for gradient_BHrD, output_BHrD, log_sums_BHr in zip(*rows, strict=True):
        mean_BHr = (gradient_BHrD.to(wide) * output_BHrD).sum(-1)
        weight_BHr = (sinks_H.to(wide)[:, None] - log_sums_BHr).exp_()
        sum_H -= (weight_BHr * mean_BHr).sum((0, 2))
    return sum_H.to(sinks_H.dtype)

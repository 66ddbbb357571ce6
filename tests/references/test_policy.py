"""Losses of single tokens against numbers worked out by hand, identities of the papers."""

import math

import pytest
import torch
from torch import Tensor

from references.policy import clipped, clipped_value, divergence


def of_log_ratio(log_ratio: float, advantage: float) -> tuple[float, float]:
    """Loss of one token and its gradient by the log-probability."""
    logprob = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    loss = clipped(
        logprob, torch.zeros(1, dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    )
    loss.sum().backward()
    return loss.item(), logprob.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),  # better and further than the clip: no gradient
        (0.5, 2.0, -1.0, -1.0),  # worse: the pessimistic side keeps its gradient
        (0.5, -2.0, 1.6, 0.0),
        (1.5, -2.0, 3.0, 3.0),
        (2.9, -2.0, 5.8, 5.8),
        (3.5, -2.0, 6.0, 0.0),  # the dual clip: 3 * |A|
        (3.5, 2.0, -2.4, 0.0),  # which is for negative advantages alone
        (2.0, 0.0, 0.0, 0.0),
    ],
)
def test_the_clipped_loss_worked_out_by_hand(ratio, advantage, loss, gradient):
    assert of_log_ratio(math.log(ratio), advantage) == pytest.approx((loss, gradient), abs=1e-14)


def test_within_the_dual_clip_it_is_the_minimum_of_the_paper():
    ratios = torch.rand(500, dtype=torch.float64) * 2.9 + 0.01
    advantages = torch.randn(500, dtype=torch.float64)
    paper = -torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages)
    torch.testing.assert_close(
        clipped(ratios.log(), torch.zeros_like(ratios), advantages), paper, rtol=1e-13, atol=1e-14
    )


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("apart", [90.0, -90.0, 800.0])
def test_far_apart_log_probabilities_give_finite_losses_and_no_gradient(apart, advantage):
    loss, gradient = of_log_ratio(apart, advantage)
    assert math.isfinite(loss)
    assert gradient == 0.0


def test_an_asymmetric_clip_has_two_sides():
    ratios, ones = torch.tensor([0.7, 1.5], dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    assert clipped(ratios.log(), 0 * ones, ones, low=0.2, high=0.28).tolist() == pytest.approx(
        [-0.7, -1.28]
    )
    assert clipped(ratios.log(), 0 * ones, -ones, low=0.2, high=0.28).tolist() == pytest.approx(
        [0.8, 1.5]
    )


def distributions() -> tuple[Tensor, Tensor]:
    logits = (
        torch.randn(2, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 2
    )  # k3 below its clamp
    policy, reference = logits.log_softmax(-1)
    return policy, reference


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_divergence(estimator):
    policy, reference = distributions()
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close(
        (policy.exp() * divergence(policy, reference, estimator=estimator)).sum(),
        exact,
        rtol=1e-12,
        atol=1e-14,
    )


def test_the_gradient_of_k2_is_that_of_the_divergence_on_average():
    logits = torch.randn(30, dtype=torch.float64, requires_grad=True)
    _, reference = distributions()
    policy = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad(
        (policy.exp() * (policy - reference)).sum(), logits, retain_graph=True
    )
    (sampled,) = torch.autograd.grad(
        (policy.exp().detach() * divergence(policy, reference, estimator="k2")).sum(), logits
    )
    torch.testing.assert_close(sampled, exact, rtol=1e-11, atol=1e-14)


def test_the_divergence_worked_out_by_hand():
    policy, reference = (
        torch.tensor([0.0, -1.0], dtype=torch.float64),
        torch.tensor([-2.0, 0.0], dtype=torch.float64),
    )
    assert divergence(policy, reference, estimator="k1").tolist() == [2.0, -1.0]
    assert divergence(policy, reference, estimator="k2").tolist() == [2.0, 0.5]
    assert divergence(policy, reference, estimator="k3").tolist() == pytest.approx(
        [math.exp(-2) + 1, math.e - 2], rel=1e-14
    )


def test_k3_is_never_negative_and_held_at_ten():
    policy = torch.linspace(-40, 40, 801, dtype=torch.float64)
    k3 = divergence(policy, torch.zeros_like(policy), estimator="k3")
    assert k3.min() >= 0
    assert k3.max() == 10
    assert k3[-1].item() == 10.0  # exp(-20) + 20 - 1 is above ten too


def test_an_unknown_estimator_is_an_error():
    with pytest.raises(ValueError, match="k4"):
        divergence(torch.zeros(1), torch.zeros(1), estimator="k4")


def test_the_value_loss_worked_out_by_hand():
    values = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64)
    returns = torch.tensor([3.0, 3.0, 0.0], dtype=torch.float64)
    # unchanged: 4; moved by 1, held at 1.5: max(1, 2.25); moved away to 0, held at 0.5: max(0,
    # 0.25)
    loss = clipped_value(values, old, returns)
    assert loss.tolist() == [4.0, 2.25, 0.25]
    loss.sum().backward()
    assert values.grad.tolist() == [-4.0, 0.0, 0.0]

"""The losses of single tokens at their limits, group advantages, and what a batch knows of the
policy that sampled it.
"""

import math
from typing import Any

import pytest
import torch

from highwater.engine.data.batches import Document, pack, shard
from highwater.engine.parallel.sequence_layout import SequenceLayout
from highwater.engine.training import objectives

CLIPPED = {"low": 0.2, "high": 0.2, "dual": 3.0, "trained_tokens": 1}


@pytest.mark.parametrize("log_ratio", [-1000.0, -90.0, -20.5, 20.5, 90.0, 1000.0])
@pytest.mark.parametrize("advantage", [-2.0, 0.0, 2.0])
def test_a_token_that_another_policy_sampled_has_a_finite_loss_and_no_gradient(
    log_ratio, advantage
):
    loss, logprob_gradient = token(
        objectives.clip_loss, log_ratio, torch.tensor([advantage]), **CLIPPED
    )
    assert math.isfinite(loss)
    assert logprob_gradient == 0
    for estimator in ("k1", "k2", "k3"):
        loss, logprob_gradient = token(
            objectives.divergence, log_ratio, estimator=estimator, coefficient=1.0, trained_tokens=1
        )
        assert math.isfinite(loss)
        assert math.isfinite(logprob_gradient)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "loss", "logprob_gradient"),
    [
        *((1.1, 2.0, 3.0, -2.2, -2.2), (1.3, 2.0, 3.0, -2.4, 0.0), (0.5, 2.0, 3.0, -1.0, -1.0)),
        *((1.3, -2.0, 3.0, 2.6, 2.6), (0.5, -2.0, 3.0, 1.6, 0.0), (3.5, -2.0, 3.0, 6.0, 0.0)),
        (3.5, -2.0, 0, 7.0, 7.0),
    ],
)
def test_clipping_from_below_above_and_twice(ratio, advantage, dual, loss, logprob_gradient):
    found = token(
        objectives.clip_loss, math.log(ratio), torch.tensor([advantage]), **CLIPPED | {"dual": dual}
    )
    assert found == pytest.approx((loss, logprob_gradient), rel=1e-6)


@pytest.mark.parametrize(
    ("estimator", "log_ratio", "loss", "logprob_gradient"),
    [
        ("k1", -0.5, -0.5, 1.0),
        ("k2", -0.5, 0.125, -0.5),
        ("k3", -0.5, math.exp(0.5) - 1.5, 1 - math.exp(0.5)),
        ("k3", 30.0, 10.0, 0.0),
        ("k3", -3.0, 10.0, 0.0),
    ],
)
def test_estimators_of_the_divergence_and_what_they_pull_with(
    estimator, log_ratio, loss, logprob_gradient
):
    found = token(
        objectives.divergence, log_ratio, estimator=estimator, coefficient=2.0, trained_tokens=1
    )
    assert found == pytest.approx((2 * loss, 2 * logprob_gradient), rel=1e-6)


def test_a_documents_log_ratio_is_summed_over_its_tokens_however_many_they_are():
    documents = torch.tensor([0, 0, 2, 2, 2])
    ratios = torch.tensor([0.5, -1.5, 1.0, 2.0, 3.0], requires_grad=True)
    sums = objectives.document_sums(ratios, documents, documents=4)
    assert sums.tolist() == [-1.0, 0.0, 6.0, 0.0]
    (sums * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    assert ratios.grad.tolist() == [1.0, 1.0, 3.0, 3.0, 3.0]
    long = torch.full((2**20,), 0.1)
    (whole,) = objectives.document_sums(long, torch.zeros(2**20, dtype=torch.long), documents=1)
    assert whole.item() == pytest.approx(2**20 * float(long[0]), rel=1e-12)


@pytest.mark.parametrize("margin", [-1000.0, -2.0, 0.0, 0.5, 1000.0])
def test_a_preference_costs_the_logistic_loss_of_its_margin(margin):
    ratios = torch.tensor([3.0 + margin, 3.0, 1.0, 1.0], dtype=torch.float64, requires_grad=True)
    loss = objectives.preference(ratios, beta=0.4, pairs=2)
    logistic = max(0.0, -0.4 * margin) + math.log1p(math.exp(-abs(0.4 * margin)))
    assert loss.item() == pytest.approx((logistic + math.log(2)) / 2, rel=1e-12)
    loss.backward()
    wrong = 1 / (1 + math.exp(min(700.0, 0.4 * margin)))
    pulls = [-0.2 * wrong, 0.2 * wrong, -0.1, 0.1]
    assert ratios.grad.tolist() == pytest.approx(pulls, rel=1e-12)


def test_a_reward_is_compared_with_its_group_and_alone_with_nothing():
    found = objectives.group_advantages([1.0, 5.0, 3.0, 7.0], [9, -1, 9, 4])
    assert found == pytest.approx([-math.sqrt(0.5), 5.0, math.sqrt(0.5), 7.0], rel=2e-6)
    assert objectives.group_advantages([2.0, 2.0], [0, 0]) == [0.0, 0.0]
    for reward in (5.0, -2.0, 0.0, 1e4):  # verl's formula, with a mean of 0 and a deviation of 1
        assert objectives.group_advantages([reward], [0]) == [reward / (1 + 1e-6)]


def test_documents_without_logprobs_leave_those_of_their_micro_batch_alone():
    ids = torch.arange(4)
    known = torch.tensor([-0.1, -0.2, -0.3, -0.4])
    sampled, unknown = Document(ids, ids, old_logprobs_L=known), Document(ids[:2], ids[:2])
    found = pack([unknown, sampled, unknown]).old_logprobs_N
    assert found[1:4].tolist() == known[1:].tolist()
    assert found[[0, 4]].isnan().all()
    assert pack([unknown, unknown]).old_logprobs_N is None
    row = pack([unknown, sampled, unknown])
    halves = [
        shard(row, SequenceLayout(row.document_lengths, 2), rank=rank).old_logprobs_N
        for rank in (0, 1)
    ]
    assert torch.equal(torch.cat(halves).nan_to_num(1.0), found.nan_to_num(1.0))


def token(loss: Any, log_ratio: float, *rest: Any, **numbers: Any) -> tuple[float, float]:
    """Loss of one token and its gradient in the token's log-probability, where the other policy's
    is 0.
    """
    logprobs = torch.tensor([log_ratio], requires_grad=True)
    value = loss(logprobs, torch.zeros(1), *rest, **numbers)
    value.backward()
    return value.item(), logprobs.grad.item()

"""The losses of single tokens at their limits, group advantages, and what a batch knows of the policy that sampled it."""

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the data plane needs the train extra")

from highwater.engine import objective  # noqa: E402
from highwater.engine.data import Document, pack, shard  # noqa: E402

CLIPPED = {"low": 0.2, "high": 0.2, "dual": 3.0, "trained_tokens": 1}


@pytest.mark.parametrize("log_ratio", [-1000.0, -90.0, -20.5, 20.5, 90.0, 1000.0])
@pytest.mark.parametrize("advantage", [-2.0, 0.0, 2.0])
def test_a_token_that_another_policy_sampled_has_a_finite_loss_and_no_gradient(log_ratio: float, advantage: float) -> None:
    loss, slope = token(objective.clip_loss, log_ratio, torch.tensor([advantage]), **CLIPPED)
    assert math.isfinite(loss)
    assert slope == 0
    for estimator in ("k1", "k2", "k3"):
        loss, slope = token(objective.divergence, log_ratio, estimator=estimator, coefficient=1.0, trained_tokens=1)
        assert math.isfinite(loss)
        assert math.isfinite(slope)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "loss", "slope"),
    [
        (1.1, 2.0, 3.0, -2.2, -2.2),
        (1.3, 2.0, 3.0, -2.4, 0.0),
        (0.5, 2.0, 3.0, -1.0, -1.0),
        (1.3, -2.0, 3.0, 2.6, 2.6),
        (0.5, -2.0, 3.0, 1.6, 0.0),
        (3.5, -2.0, 3.0, 6.0, 0.0),
        (3.5, -2.0, 0, 7.0, 7.0),
    ],
)
def test_clipping_from_below_above_and_twice(ratio: float, advantage: float, dual: float, loss: float, slope: float) -> None:
    found = token(objective.clip_loss, math.log(ratio), torch.tensor([advantage]), **CLIPPED | {"dual": dual})
    assert found == pytest.approx((loss, slope), rel=1e-6)


@pytest.mark.parametrize(
    ("estimator", "log_ratio", "loss", "slope"),
    [
        ("k1", -0.5, -0.5, 1.0),
        ("k2", -0.5, 0.125, -0.5),
        ("k3", -0.5, math.exp(0.5) - 1.5, 1 - math.exp(0.5)),
        ("k3", 30.0, 10.0, 0.0),
        ("k3", -3.0, 10.0, 0.0),
    ],
)
def test_estimators_of_the_divergence_and_what_they_pull_with(estimator: Any, log_ratio: float, loss: float, slope: float) -> None:
    found = token(objective.divergence, log_ratio, estimator=estimator, coefficient=2.0, trained_tokens=1)
    assert found == pytest.approx((2 * loss, 2 * slope), rel=1e-6)


def test_a_reward_is_compared_with_its_group_and_alone_with_nothing() -> None:
    found = objective.group_advantages([1.0, 5.0, 3.0, 7.0], [9, -1, 9, 4])
    assert found == pytest.approx([-math.sqrt(0.5), 5.0, math.sqrt(0.5), 7.0], rel=2e-6)
    assert objective.group_advantages([2.0, 2.0], [0, 0]) == [0.0, 0.0]


def test_documents_without_logprobs_leave_those_of_their_micro_batch_alone() -> None:
    ids = torch.arange(4)
    known = torch.tensor([-0.1, -0.2, -0.3, -0.4])
    sampled, unknown = Document(ids, ids, old_logprobs_L=known), Document(ids[:2], ids[:2])
    found = pack([unknown, sampled, unknown]).old_logprobs_N
    assert found[1:4].tolist() == known[1:].tolist()
    assert found[[0, 4]].isnan().all()
    assert pack([unknown, unknown]).old_logprobs_N is None
    halves = [shard(pack([unknown, sampled, unknown]), degree=2, rank=rank).old_logprobs_N for rank in (0, 1)]
    assert torch.equal(torch.cat(halves).nan_to_num(1.0), found.nan_to_num(1.0))


def token(loss: Any, log_ratio: float, *rest: Any, **numbers: Any) -> tuple[float, float]:
    """Loss of one token and its slope in the token's log-probability, where the other policy's is 0."""
    logprobs = torch.tensor([log_ratio], requires_grad=True)
    value = loss(logprobs, torch.zeros(1), *rest, **numbers)
    value.backward()
    return value.item(), logprobs.grad.item()

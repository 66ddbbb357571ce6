"""Advantages against numbers worked out by hand and against what the definitions promise."""

import pytest
import torch

from references.advantages import generalised, standardised_in_groups, whitened

EXACT = 1e-14


def test_a_group_is_standardised_by_its_unbiased_deviation_wherever_its_documents_stand():
    advantages = standardised_in_groups([1.0, 10.0, 2.0, 30.0, 3.0], [7, 8, 7, 8, 7])
    of_two = 10 / (200**0.5 + 1e-6)  # mean 20, deviation sqrt(((-10)^2 + 10^2) / 1)
    expected = [-1 / (1 + 1e-6), -of_two, 0.0, of_two, 1 / (1 + 1e-6)]
    torch.testing.assert_close(
        advantages, torch.tensor(expected, dtype=torch.float64), rtol=EXACT, atol=0
    )


def test_a_group_of_one_keeps_its_reward():
    assert standardised_in_groups([3.0, 1.0], [0, 1]).tolist() == [
        3.0 / (1 + 1e-6),
        1.0 / (1 + 1e-6),
    ]


def test_a_group_of_equal_rewards_has_no_advantage():
    assert standardised_in_groups([0.5, 0.5, 0.5], [0, 0, 0]).tolist() == [0.0, 0.0, 0.0]


def test_without_values_the_reward_fades_backwards():
    advantages = generalised(torch.zeros(4, dtype=torch.float64), 2.0, decay=0.5)
    assert advantages.tolist() == [0.25, 0.5, 1.0, 2.0]


def test_advantages_worked_out_by_hand():
    # errors: 0.9*2 - 1 = 0.8, 0.9*4 - 2 = 1.6, 10 - 4 = 6; A2 = 6, A1 = 1.6 + 0.45*6 = 4.3, A0 =
    # 0.8 + 0.45*4.3 = 2.735
    advantages = generalised(
        torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64), 10.0, discount=0.9, decay=0.5
    )
    torch.testing.assert_close(
        advantages, torch.tensor([2.735, 4.3, 6.0], dtype=torch.float64), rtol=EXACT, atol=0
    )


def test_decay_one_is_the_return_less_the_value_and_decay_zero_one_step_ahead():
    values = torch.randn(9, dtype=torch.float64)
    torch.testing.assert_close(
        generalised(values, 1.5, decay=1.0), 1.5 - values, rtol=1e-13, atol=1e-13
    )
    one_step = torch.cat([values[1:] - values[:-1], (1.5 - values[-1:])])
    torch.testing.assert_close(
        generalised(values, 1.5, decay=0.0), one_step, rtol=1e-13, atol=1e-13
    )


def test_advantages_follow_the_backward_recursion():
    values, reward = torch.randn(30, dtype=torch.float64), -0.7
    expected, later, value_after = [], 0.0, 0.0
    for value in reversed(values.tolist()):
        came = reward if not expected else 0.0
        later = came + value_after - value + 0.95 * later
        value_after = value
        expected.append(later)
    torch.testing.assert_close(
        generalised(values, reward),
        torch.tensor(expected[::-1], dtype=torch.float64),
        rtol=1e-12,
        atol=1e-13,
    )


def test_whitened_advantages_have_mean_zero_and_variance_one():
    white = whitened(torch.randn(40, dtype=torch.float64) * 3 + 5)
    assert abs(white.mean().item()) < 1e-14
    assert white.var().item() == pytest.approx(1.0, abs=1e-8)  # the floor under the variance


def test_whitening_worked_out_by_hand():
    white = whitened(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    edge = 1 / (1 + 1e-8) ** 0.5
    torch.testing.assert_close(
        white, torch.tensor([-edge, 0.0, edge], dtype=torch.float64), rtol=EXACT, atol=EXACT
    )


def test_one_token_has_no_variance():
    with pytest.raises(ValueError, match="two tokens"):
        whitened(torch.ones(1, dtype=torch.float64))

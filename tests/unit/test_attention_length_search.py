"""The lengths that a benchmark of attentions tries, on simulated memory: whatever memory holds is
found, to an eighth of the doubling that it is in.
"""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.nouns.attention_bench import LEAST_TOKENS, BenchOrder
from highwater.nouns.trial import Device

LONGEST = 1 << 24
STARTS: dict[Device, int] = {"cpu": 512, "cuda": 4096}


def searched(
    device: Device, most: int, fits: Callable[[int], bool], *, named: tuple[int, ...] = ()
) -> dict[int, bool]:
    """Whether each length fits, in the order in which they were tried."""
    order = BenchOrder(device=device, implementations=("dense",), lengths=named)
    tried: dict[int, bool] = {}
    while (length := order.next_length(tried, most=most)) is not None:
        assert length not in tried, "no length is tried twice"
        tried[length] = fits(length)
    return tried


@given(longest=st.integers(LEAST_TOKENS, LONGEST - 1), device=st.sampled_from(["cpu", "cuda"]))
def test_what_memory_holds_is_found_to_an_eighth_of_its_doubling(longest, device):
    tried = searched(device, LONGEST, lambda length: length <= longest)
    longest_fit = max(length for length, fits in tried.items() if fits)
    shortest_failed = min(length for length, fits in tried.items() if not fits)
    step = (1 << (longest_fit.bit_length() - 1)) // 8
    assert longest_fit <= longest < shortest_failed
    assert shortest_failed - longest_fit == step
    assert all(length % step == 0 for length in (longest_fit, shortest_failed))
    start = STARTS[device]
    doublings = max(0, (longest // start).bit_length()) + max(0, (start // longest).bit_length())
    assert len(tried) <= doublings + 1 + 3, "three cuts of the last doubling"


def test_lengths_double_first_and_are_then_halved_between():
    tried = searched("cpu", 65_536, lambda length: length <= 5000)
    assert list(tried) == [512, 1024, 2048, 4096, 8192, 6144, 5120, 4608]


def test_a_search_without_a_limit_ends_at_the_longest_that_may_be_tried():
    assert list(searched("cpu", 3000, lambda _: True)) == [512, 1024, 2048, 3000]


def test_the_longest_that_may_be_tried_bounds_the_first_too():
    assert list(searched("cpu", 200, lambda _: True)) == [200]


def test_where_nothing_fits_lengths_are_halved_down_to_the_least():
    assert list(searched("cpu", 4096, lambda _: False)) == [512, 256, 128]


def test_a_length_below_the_start_is_found_too():
    tried = searched("cuda", 65_536, lambda length: length <= 700)
    assert (tried[640], tried[704]) == (True, False)


@pytest.mark.parametrize("fits", [True, False])
def test_named_lengths_are_all_tried_once_whatever_becomes_of_them(fits):
    tried = searched("cpu", 512, lambda _: fits, named=(300, 100, 300, 200))
    assert list(tried) == [100, 200, 300]

"""The lengths that a benchmark of attentions tries, on simulated memory: whatever memory holds is
found, to an eighth of the doubling that it is in.
"""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.engine.bench.attention.length_search import LEAST_TOKENS, LengthSearch, NamedLengths

LONGEST = 1 << 24


def searched(search: LengthSearch | NamedLengths, fits: Callable[[int], bool]) -> list[int]:
    """Lengths in the order in which they were tried."""
    tried: list[int] = []
    while (length := search.ask()) is not None:
        assert length not in tried, "no length is tried twice"
        tried.append(length)
        search.tell(length, fits=fits(length))
    return tried


@given(longest=st.integers(LEAST_TOKENS, LONGEST - 1), start=st.sampled_from([512, 4096]))
def test_what_memory_holds_is_found_to_an_eighth_of_its_doubling(longest: int, start: int) -> None:
    search = LengthSearch(start=start, most=LONGEST)
    tried = searched(search, lambda length: length <= longest)
    assert search.fits is not None
    assert search.fails is not None
    step = (1 << (search.fits.bit_length() - 1)) // 8
    assert search.fits <= longest < search.fails
    assert search.fails - search.fits == step
    assert all(length % step == 0 for length in (search.fits, search.fails))
    doublings = max(0, (longest // start).bit_length()) + max(0, (start // longest).bit_length())
    assert len(tried) <= doublings + 1 + 3, "three cuts of the last doubling"


def test_lengths_double_first_and_are_then_halved_between() -> None:
    tried = searched(LengthSearch(start=512, most=65_536), lambda length: length <= 5000)
    assert tried == [512, 1024, 2048, 4096, 8192, 6144, 5120, 4608]


def test_a_search_without_a_limit_ends_at_the_longest_that_may_be_tried() -> None:
    search = LengthSearch(start=512, most=3000)
    assert searched(search, lambda _: True) == [512, 1024, 2048, 3000]
    assert (search.fits, search.fails) == (3000, None)


def test_the_longest_that_may_be_tried_bounds_the_first_too() -> None:
    assert searched(LengthSearch(start=512, most=200), lambda _: True) == [200]


def test_where_nothing_fits_lengths_are_halved_down_to_the_least() -> None:
    search = LengthSearch(start=512, most=4096)
    assert searched(search, lambda _: False) == [512, 256, 128]
    assert (search.fits, search.fails) == (None, 128)


def test_a_length_below_the_start_is_found_too() -> None:
    search = LengthSearch(start=4096, most=65_536)
    searched(search, lambda length: length <= 700)
    assert (search.fits, search.fails) == (640, 704)


@pytest.mark.parametrize("fits", [True, False])
def test_named_lengths_are_all_tried_once_whatever_becomes_of_them(fits: bool) -> None:
    assert searched(NamedLengths([300, 100, 300, 200]), lambda _: fits) == [100, 200, 300]

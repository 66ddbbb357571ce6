"""Memory of an attention by its length: what was made by a formula is found again, and a length
that is predicted is the longest that fits.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.recommendation.attention_summary import memory_fit
from highwater.units import GIB, KIB, MIB

LENGTHS = (4096, 8192, 16_384, 32_768, 49_152)


@given(overhead=st.integers(0, 512 * MIB), token=st.integers(64, 64 * KIB), cut=st.integers(3, 5))
def test_a_linear_memory_is_found_again_with_its_overhead(overhead, token, cut):
    fit = memory_fit([(length, overhead + token * length) for length in LENGTHS[:cut]])
    assert fit is not None
    assert fit.bytes_per_token == pytest.approx(token, rel=1e-3)
    assert fit.overhead_bytes == pytest.approx(overhead, rel=1e-3, abs=KIB)
    assert fit.bytes_per_pair == 0
    assert fit.largest_error < 1e-6
    assert (fit.points, fit.longest_tokens) == (cut, LENGTHS[cut - 1])


def test_a_square_is_only_there_where_a_line_does_not_do():
    square = memory_fit([(length, 8 * length**2 + 1000 * length) for length in LENGTHS])
    assert square is not None
    assert square.bytes_per_pair == pytest.approx(8, rel=1e-3)
    assert square.bytes_per_token == pytest.approx(1000, rel=1e-2)
    nearly = memory_fit([(length, 1000 * length + (length % 3) * 4096) for length in LENGTHS])
    assert nearly is not None
    assert nearly.bytes_per_pair == 0


def test_no_term_is_below_zero_where_peaks_bend_the_other_way():
    fit = memory_fit([(1000, 5000), (2000, 7000), (4000, 9000), (8000, 10_000)])
    assert fit is not None
    assert min(fit.overhead_bytes, fit.bytes_per_token, fit.bytes_per_pair) >= 0
    assert fit.largest_error > 0.05, "it says how far off it is"


def test_one_length_or_two_make_no_formula():
    assert memory_fit([]) is None
    assert memory_fit([(4096, 100), (4096, 101)]) is None
    assert memory_fit([(4096, 100), (8192, 200), (8192, 201)]) is None


@given(free=st.integers(MIB, 200 * GIB))
def test_a_predicted_length_fits_and_an_eighth_of_its_doubling_more_does_not(free):
    fit = memory_fit([(length, 100 * KIB + 768 * length) for length in LENGTHS])
    assert fit is not None
    longest = fit.longest_within(free)
    step = max(1, (1 << (longest.bit_length() - 1)) // 8)
    assert fit.peak_bytes(longest) <= free < fit.peak_bytes(longest + step)
    assert longest % step == 0


def test_memory_that_does_not_hold_the_overhead_holds_nothing():
    fit = memory_fit([(length, 100 * MIB + 768 * length) for length in LENGTHS])
    assert fit is not None
    assert fit.longest_within(50 * MIB) == 0


def test_what_short_sequences_take_at_once_is_no_square_of_the_length():
    """A window's scores, all of them at hand up to some length: from there on memory is linear."""
    peaks = [(length, min(4 * length**2, 2**23) + 768 * length) for length in LENGTHS]
    fit = memory_fit(peaks)
    assert fit is not None
    assert fit.bytes_per_pair == 0
    assert fit.peak_bytes(2**20) == pytest.approx(768 * 2**20 + 2**23, rel=0.05)

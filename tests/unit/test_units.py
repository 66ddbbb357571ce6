"""Bytes, tokens and seconds: what is typed is what is meant, and what is printed can be read
back.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.errors import UsageError
from highwater.units import (
    GIB,
    MOST_TOKENS,
    format_bytes,
    format_seconds,
    format_tokens,
    parse_bytes,
    parse_memory,
    parse_seconds,
    parse_tokens,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GiB", 80 * GIB),
        ("79.15 GiB", 84986665369),
        ("512MiB", 512 * 1024**2),
        ("1_000", 1000),
        ("2tib", 2048 * GIB),
    ],
)
def test_memory_sizes_are_binary(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "hinted", "meant"),
    [
        ("80GB", "74GiB", 80e9),
        ("80g", "74GiB", 80e9),
        ("80 gb", "74GiB", 80e9),
        ("500GB", "465GiB", 500e9),
        ("2TB", "1862GiB", 2e12),
        ("1.5GB", "1430MiB", 1.5e9),
        ("64m", "61MiB", 64e6),
        ("300k", "292KiB", 300e3),
    ],
)
def test_a_decimal_memory_size_is_refused_with_a_binary_one_that_is_no_more(text, hinted, meant):
    with pytest.raises(UsageError) as refusal:
        parse_bytes(text)
    assert refusal.value.hint.endswith(f"`{hinted}`")
    assert 0.98 * meant < parse_bytes(hinted) <= meant


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e9", "80 parsecs", "--"])
def test_what_is_no_memory_size_is_refused(text):
    with pytest.raises(UsageError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "meant"),
    [("79.15", "79.15GiB"), ("80", "80GiB"), ("1024", "1024GiB"), ("81559", "81559MiB")],
)
def test_a_memory_without_its_unit_is_refused_with_the_unit_that_is_meant(text, meant):
    with pytest.raises(UsageError) as refusal:
        parse_memory(text)
    assert refusal.value.hint == f"give the unit: `{meant}`"


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("512KiB", 512 * 1024), ("84986665369", 84986665369), ("80GiB", 80 * GIB)],
)
def test_a_memory_is_a_size_with_its_unit_or_a_count_of_bytes(text, count):
    assert parse_memory(text) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [("32768", 32768), ("128k", 131072), ("1m", 1048576), ("1.5k", 1536), ("4,096", 4096)],
)
def test_lengths_count_in_binary_thousands(text, count):
    assert parse_tokens(text) == count


@pytest.mark.parametrize("text", ["0", "0.3", "1.0001k", "12 miles", "-5"])
def test_a_length_is_a_whole_positive_number_of_tokens(text):
    with pytest.raises(UsageError):
        parse_tokens(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2400", 2400.0), ("40m", 2400.0), ("1h30m", 5400.0), ("90s", 90.0), ("1.5h", 5400.0)],
)
def test_times_take_hours_minutes_and_seconds(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["0", "0s", "soon", "-40m", "40 minutes"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(UsageError):
        parse_seconds(text)


@given(st.integers(min_value=0, max_value=2**50))
def test_a_printed_size_is_within_half_of_its_last_digit(count):
    assert abs(parse_bytes(format_bytes(count)) - count) <= 0.0051 * GIB


@given(st.integers(min_value=1, max_value=MOST_TOKENS))
def test_a_printed_length_reads_back_as_itself(count):
    assert parse_tokens(format_tokens(count)) == count


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.314, "2.31 s"), (41.2, "41 s"), (245, "4m 05s"), (3725, "1h 02m"), (None, "-")],
)
def test_a_time_is_printed_as_one_says_it(seconds, text):
    assert format_seconds(seconds) == text


def test_unknown_is_a_dash():
    assert (format_bytes(None), format_tokens(None), format_seconds(None)) == ("-", "-", "-")

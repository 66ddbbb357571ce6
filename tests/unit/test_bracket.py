import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.search.bracket import HINT_COST, Bracket, Contradiction

SIZES = st.integers(1, 5000)


def bound(capacity: int) -> float:
    return 2 * math.log2(capacity) + 2 if capacity else 1


def search(bracket: Bracket, capacity: int) -> int:
    """Trials that a monotone law of this capacity takes."""
    trials = 0
    while (index := bracket.ask()) is not None:
        bracket.tell(index, index <= capacity)
        trials += 1
    return trials


@given(SIZES, st.data())
def test_bisect_finds_the_capacity_of_any_monotone_law_within_the_bound(size, data):
    """One trial where nothing fits; the ceiling where everything does."""
    capacity = data.draw(st.sampled_from([0, size]) | st.integers(0, size))
    bracket = Bracket(size)
    assert search(bracket, capacity) <= bound(capacity)
    assert (bracket.fits, bracket.end) == (capacity, capacity + 1)
    assert bracket.is_proven == (capacity < size)
    assert bracket.does_not_fit == (capacity + 1 if capacity < size else None)


@given(SIZES, st.data())
def test_no_hint_however_wrong_costs_more_than_the_trials_around_it(size, data):
    capacity = data.draw(st.integers(0, size))
    hint = data.draw(st.integers(1, 2 * size))
    bracket = Bracket(size, first=hint)
    trials = search(bracket, capacity)
    assert bracket.fits == capacity
    assert trials <= bound(capacity) + (HINT_COST if hint > capacity else 0)


@given(SIZES, st.data())
def test_a_hint_at_the_edge_takes_the_two_trials_that_prove_it(size, data):
    capacity = data.draw(st.integers(1, size))
    for hint in (capacity, capacity + 1):
        assert search(Bracket(size, first=hint), capacity) <= 2


@given(SIZES, st.data())
def test_a_capacity_in_tiles_is_found_above_shorter_lengths_that_do_not_fit(size, data):
    tiled_from = data.draw(st.integers(1, size))
    capacity = data.draw(st.integers(tiled_from, size))
    untiled = data.draw(st.integers(0, tiled_from - 1))
    bracket = Bracket(size, data.draw(st.integers(tiled_from, size)), tiled_from=tiled_from)
    while (index := bracket.ask()) is not None:
        bracket.tell(index, index <= untiled or tiled_from <= index <= capacity)
    assert bracket.fits == capacity


@pytest.mark.parametrize(
    ("capacity", "without", "worst"),
    [(0, 1, 4), (1, 2, 5), (2, 4, 7), (4, 6, 9), (8, 8, 11), (64, 14, 17)],
)
def test_a_hint_that_is_too_long_costs_three_trials_at_the_most(capacity, without, worst):
    size = 3000
    assert search(Bracket(size), capacity) == without
    hints = range(capacity + 2, size + 1)
    assert max(search(Bracket(size, first=hint), capacity) for hint in hints) == worst


@pytest.mark.parametrize("first", [None, 1, 40, 100])
@pytest.mark.parametrize("method", ["bisect", "linear"])
def test_nothing_is_said_to_fit_nowhere_before_the_least_packed_index_was_tried(first, method):
    bracket = Bracket(100, first, method, least_packed=51)
    while (index := bracket.ask()) is not None:
        bracket.tell(index, 51 <= index <= 60)
    assert (bracket.fits, bracket.end) == (60, 61)


@pytest.mark.parametrize("method", ["bisect", "linear"])
def test_a_least_packed_index_that_does_not_fit_costs_one_trial(method):
    assert search(Bracket(100, method=method, least_packed=51), 0) == 2


def test_an_empty_grid_asks_for_nothing():
    assert (Bracket(0).ask(), Bracket(0).trials_left) == (None, 0)


def test_a_failure_says_nothing_against_a_fit_of_fewer_packed_tokens():
    bracket = Bracket(10)
    for index, fits in [(1, False), (6, True), (9, True)]:
        bracket.tell(index, fits)
    assert bracket.contradictions() == (Contradiction(1, 6),)
    assert bracket.contradictions({1: 9, 6: 6, 9: 9}.__getitem__) == (Contradiction(1, 9),)
    assert bracket.contradictions({1: 10, 6: 6, 9: 9}.__getitem__) == ()


@given(SIZES, st.data())
def test_a_timeout_lowers_the_ceiling_and_proves_nothing(size, data):
    patience = data.draw(st.integers(1, size))
    capacity = data.draw(st.integers(patience, size))
    bracket = Bracket(size, first=data.draw(st.none() | st.integers(1, size)))
    while (index := bracket.ask()) is not None:
        if index >= patience:
            bracket.tell_undecided(index)
        else:
            bracket.tell(index, index <= capacity)
    assert (bracket.fits, bracket.end) == (patience - 1, patience)
    assert not bracket.is_proven


@given(st.integers(1, 40), st.data())
def test_any_outcomes_end_in_an_observed_pair_and_contradictions_are_listed(size, data):
    index = st.integers(1, size)
    told = data.draw(st.lists(st.tuples(index, st.booleans())))
    first, method = data.draw(st.none() | index), data.draw(st.sampled_from(["bisect", "linear"]))
    bracket = Bracket(size, first=first, method=method)
    for at, fits in told:
        bracket.tell(at, fits)
    for _ in range(size + 1):
        asked = bracket.ask()
        if asked is None:
            break
        assert asked not in [at for at, _ in told]
        fits = data.draw(st.booleans())
        told.append((asked, fits))
        bracket.tell(asked, fits)
    assert bracket.ask() is None
    assert bracket.fits == max([at for at, fits in told if fits], default=0)
    assert (bracket.fits + 1, False) in told or bracket.fits == size
    failed_below = {at for at, fits in told if not fits and at <= bracket.fits}
    assert {pair.failed_index for pair in bracket.contradictions()} == failed_below
    assert all((pair.fit_index, True) in told for pair in bracket.contradictions())


@given(st.integers(1, 200), st.data())
def test_linear_scans_upwards_and_stops_at_the_first_that_fails(size, data):
    capacity = data.draw(st.integers(0, size))
    start = data.draw(st.integers(1, capacity + 1))
    bracket = Bracket(size, first=start, method="linear")
    trials = search(bracket, capacity)
    assert bracket.fits == capacity
    if start <= capacity:
        assert trials == min(capacity + 1, size) - start + 1


@given(st.integers(2, 5000), st.data())
def test_linear_takes_a_start_that_fails_as_bisect_takes_a_hint(size, data):
    start = data.draw(st.integers(2, size))
    capacity = data.draw(st.integers(0, start - 1))
    bracket = Bracket(size, first=start, method="linear")
    trials = search(bracket, capacity)
    assert trials == search(Bracket(size, first=start), capacity) <= bound(capacity) + HINT_COST
    assert bracket.fits == capacity
    assert bracket.is_proven


def test_a_repeat_of_a_linear_start_that_fails_does_not_end_the_scan():
    bracket = Bracket(40, first=5, method="linear")
    for index, fits in [(5, True), (6, False), (5, False), (6, True)]:
        bracket.tell(index, fits)
    assert bracket.ask() == 7
    bracket.tell(7, fits=True)
    assert bracket.ask() == 8


@pytest.mark.parametrize("method", ["bisect", "linear"])
def test_where_a_budget_packs_less_further_up_that_is_tried_right_after_the_start(method):
    bracket = Bracket(100, 31, method, least_packed=61)
    bracket.tell(31, fits=False)
    assert bracket.ask() == 61
    bracket.tell(61, fits=False)
    while (index := bracket.ask()) is not None:
        bracket.tell(index, fits=False)
    assert (bracket.fits, bracket.end) == (0, 1)


@pytest.mark.parametrize("least_packed", [1, 11])
@pytest.mark.parametrize(
    "told", [[], [(1, False)], [(3, True)], [(9, False)], [(3, True), (9, False)]]
)
def test_the_trials_left_end_at_zero_and_never_before(told, least_packed):
    bracket = Bracket(20, least_packed=least_packed)
    for index, fits in told:
        bracket.tell(index, fits)
    while (index := bracket.ask()) is not None:
        assert bracket.trials_left > 0
        bracket.tell(index, index <= 6)
    assert bracket.trials_left == 0

"""The grid of lengths: the published one, and any other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.errors import UsageError
from highwater.nouns.study import Grid
from trial_specs import grid_of


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Any grid that can be."""
    start = draw(st.integers(min_value=2, max_value=20_000))
    return Grid(
        start_tokens=start,
        step_tokens=draw(st.integers(min_value=1, max_value=5000)),
        native_length_tokens=draw(st.integers(min_value=1, max_value=50_000)),
        beyond_step_tokens=draw(st.integers(min_value=1, max_value=20_000)),
        max_tokens=start + draw(st.integers(min_value=0, max_value=500_000)),
    )


def published(native: int, *, ceiling: int = 200_000) -> Grid:
    """The grid of the published tables."""
    return grid_of(4096, ceiling, native=native, beyond=native // 4)


def test_the_published_grid_steps_by_4096_up_to_the_native_length_then_by_a_quarter_of_it():
    grid = published(40960)
    assert [grid.length(index) for index in (1, 2, 9, 10, 11, 12)] == [
        4096,
        8192,
        36864,
        40960,
        51200,
        61440,
    ]


def test_a_native_length_off_the_grid_is_passed_by_one_small_step():
    grid = published(10_000)
    assert [grid.length(index) for index in (1, 2, 3, 4)] == [4096, 8192, 12288, 14788]


@given(grids(), st.integers(min_value=1, max_value=200))
def test_lengths_grow_with_their_index(grid, index):
    assert grid.length(index) < grid.length(index + 1)


@given(grids(), st.integers(min_value=1, max_value=200))
def test_the_index_of_a_length_is_the_index_it_came_from(grid, index):
    length = grid.length(index)
    assert grid.index_at_most(length) == index
    assert grid.index_at_most(length - 1) == index - 1


@given(grids())
def test_no_length_is_above_the_ceiling_and_the_next_one_is(grid):
    assert grid.length(grid.size) <= grid.max_tokens < grid.length(grid.size + 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"start_tokens": 1},
        {"step_tokens": 0},
        {"beyond_step_tokens": 0},
        {"max_tokens": 4095},
        {"start_tokens": 0},
    ],
)
def test_a_grid_without_lengths_is_refused(changes):
    fields = {
        "start_tokens": 4096,
        "step_tokens": 4096,
        "native_length_tokens": 40960,
        "beyond_step_tokens": 10240,
        "max_tokens": 8192,
    }
    with pytest.raises(UsageError):
        Grid(**{**fields, **changes})

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.memory.predictor import longest
from highwater.memory.trainers import predictor_of
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell, CellAnswer, Limit, Question
from highwater.search.scheduler import search_cells
from highwater.search.start_length import carried_start, first_index, unknown_trainer_line
from highwater.trials.simulated import FormulaLaw, SimulatedRunner
from highwater.units import GIB
from trial_specs import answer_of, answers_among, grid_of, question_on

GRID = grid_of(4096, 2**20, native=40960, beyond=10240)


def cell(gpus: int = 1, sp: int = 1, **settings) -> Cell:
    return Cell(layout=Layout(gpus=gpus, ulysses_degree=sp), settings=Settings(**settings))


def ask(*cells: Cell, model: str = "Qwen3-4B", **changes) -> Question:
    fields = {"cells": cells or (cell(),), "device_total_bytes": 80 * GIB, **changes}
    return question_on(fields.pop("grid", GRID), model=model, **fields)


def answered(where: Cell, index: int, limit: Limit = "memory") -> CellAnswer:
    fails = GRID.length(index + 1) if limit == "memory" else None
    return answer_of(where, GRID.length(index) if index else 0, fails, limit=limit)


LOSSES, LIMITS = (
    st.sampled_from(["full", "chunked"]),
    st.sampled_from(["memory", "ceiling", "time"]),
)
CELLS = st.builds(cell, st.sampled_from([1, 2, 4]), st.just(1), loss=LOSSES, offload=st.booleans())
ANSWERS = st.builds(answered, CELLS, st.integers(0, GRID.size - 1), LIMITS)


@given(st.lists(ANSWERS, max_size=6), st.integers(1, 200), st.sampled_from([1, 2, 4]))
def test_whatever_was_answered_before_the_first_index_is_on_the_grid(finished, memory_gib, gpus):
    index = first_index(ask(memory_budget_bytes=memory_gib * GIB), cell(gpus), finished)
    assert 1 <= index <= GRID.size


@pytest.mark.parametrize("prompt_tokens", [0, 2048])
@pytest.mark.parametrize("model", ["tiny", "Qwen3-0.6B"])
def test_the_first_length_is_the_longest_that_the_formula_says_fits(prompt_tokens, model):
    where, grid = cell(loss="full"), grid_of(256, 2**15, native=2**15, beyond=256)
    memory = 3 * GIB // 2 if model == "tiny" else 16 * GIB
    asked = ask(
        where, model=model, grid=grid, device="cpu" if model == "tiny" else "cuda",
        device_total_bytes=None if model == "tiny" else memory,
        memory_budget_bytes=memory, prompt_tokens=prompt_tokens,
    )  # fmt: skip
    usable = memory - asked.margin_bytes
    predictor = predictor_of(asked, where, usable)
    assert predictor is not None
    fits = longest(predictor, usable)
    assert 3 < fits < grid.size
    assert abs(first_index(asked, where, []) - fits) <= 1


def test_states_without_room_start_at_the_bottom_and_unknown_memory_nowhere():
    assert first_index(ask(model="Qwen3-32B"), cell(1), []) == 1
    assert first_index(ask(device_total_bytes=None), cell(), [answered(cell(), 5)]) is None


@pytest.mark.parametrize("loss", ["chunked", "full"])
def test_a_rung_where_a_token_costs_the_same_is_expected_to_end_where_the_other_did(loss):
    found, other = answered(cell(4, loss=loss), 9), cell(4, loss=loss, allocator="expandable")
    assert first_index(ask(), other, [found], unknown_trainer_line) in (9, 10)


@pytest.mark.parametrize("other", [{"allocator": "expandable"}, {"loss": "chunked"}], ids=str)
def test_what_native_loses_to_whole_logits_says_nothing_about_other_rungs(other):
    where = cell(**other)
    assert first_index(ask(), where, [answered(cell(), 3)]) == first_index(ask(), where, [])


@given(st.integers(2, 20))
def test_offloaded_states_leave_the_same_room_on_any_number_of_gpus(index):
    found = answered(cell(1, offload=True), index)
    hints = {first_index(ask(), cell(gpus, offload=True), [found]) for gpus in (1, 2, 4, 8)}
    assert hints <= {index, index + 1}, "but for NCCL and a layer's shards on their way"


@given(st.integers(1, 12))
def test_a_sequence_over_two_gpus_is_expected_to_be_twice_as_long(index):
    found = answered(cell(2, offload=True), index)
    expected = GRID.index_at_most(2 * GRID.length(index))
    assert first_index(ask(), cell(2, 2, offload=True), [found]) in range(expected, expected + 4)


@given(ANSWERS.filter(lambda answer: answer.cell.settings.loss == "full"))
def test_more_gpus_more_memory_or_less_margin_never_lower_the_expectation(found):
    roomy, narrow = ask(device_total_bytes=100 * GIB), ask(margin_bytes=8 * GIB)
    for small, large in ((ask(), roomy), (narrow, ask())):
        assert first_index(small, cell(2), []) <= first_index(large, cell(2), [])
    assert first_index(ask(), cell(2), [found]) <= first_index(ask(), cell(4), [found])


@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B", "Qwen3-30B-A3B"])
@pytest.mark.parametrize("resolution", [512, 4096])
def test_cells_that_share_what_they_learn_take_fewer_trials_for_the_same_answers(model, resolution):
    grid = grid_of(resolution, 2**20, native=40960)
    rungs = ({}, {"allocator": "expandable"}, {"allocator": "expandable", "loss": "chunked"})
    cells = tuple(cell(gpus, **rung) for gpus in (1, 2, 4, 8) for rung in rungs)
    sharing = ask(*cells, model=model, grid=grid, device_total_bytes=140 * GIB)
    galloping = msgspec.structs.replace(sharing, device_total_bytes=None)
    runner = SimulatedRunner(FormulaLaw(shape=sharing.model.shape), device_total_bytes=140 * GIB)
    with_hints, without = (
        answers_among(search_cells(question, runner)) for question in (sharing, galloping)
    )
    for one, other in zip(with_hints, without, strict=True):
        assert one.capacity_tokens == other.capacity_tokens
    most = 0.9 * sum(answer.trials for answer in without)
    assert sum(answer.trials for answer in with_hints) <= most


def test_the_carried_start_is_the_longest_of_fewer_gpus_and_of_less_sp_on_the_same_rung():
    """A cell where nothing fit carries none."""
    indices = {cell(2, 1): 3, cell(2, 2): 6, cell(4, 1): 5, cell(8, 2): 11}
    indices |= {cell(4, 1, allocator="expandable"): 9}
    finished = [answered(where, index) for where, index in indices.items()]
    assert carried_start(ask(), cell(4, 2), finished) == 6
    assert carried_start(ask(), cell(4, 1), finished) == 3
    assert carried_start(ask(), cell(1, 1), finished) is None
    assert carried_start(ask(), cell(2), [answered(cell(1), 0)]) is None

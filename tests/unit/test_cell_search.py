"""Searches of cells: where each begins, what it tries, what it answers."""

import math
import re
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.errors import MachineError
from highwater.memory.formula.constants import CONTEXT_BYTES
from highwater.memory.predictor import longest
from highwater.memory.trainers import formula_of_trials
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell, CellAnswer, Limit, Question
from highwater.nouns.trial import Outcome, TrialResult, TrialSpec
from highwater.search.bracket import HINT_COST
from highwater.search.cell_outcomes import CellAnswered, SearchEvent, TrialFinished, TrialStarted
from highwater.search.scheduler import search_cells
from highwater.search.start_length import (
    MemoryLine,
    carried_start,
    first_index,
    unknown_trainer_line,
)
from highwater.trials.simulated import Law, OneByOne, SimulatedRunner, UpperFormula
from highwater.units import GIB, MIB
from places import examples
from trial_specs import answer_of, answers_among, fits_up_to, grid_of, question_on

STEP = 1000
GRID_SIZE = 64
GRID = grid_of(STEP, GRID_SIZE * STEP)
NAMED_BY_A_LAW = [outcome for outcome in Outcome if outcome is not Outcome.MEMORY_ONLY_FIT]
"""A law says FIT of whatever memory holds; which fit it is depends on the trial."""


def ask(**changes) -> Question:
    """One cell on a grid of 64 lengths, index i of which is i thousand tokens."""
    return question_on(changes.pop("grid", GRID), **changes)


def packs_up_to(held_tokens: int) -> Law:
    return lambda spec: (
        Outcome.FIT if spec.length_tokens * spec.sequences <= held_tokens else Outcome.OUT_OF_MEMORY
    )


def events_of(question: Question, law: Law) -> list[SearchEvent]:
    return list(search_cells(question, SimulatedRunner(law)))


def tried_in(events: list[SearchEvent]) -> dict[int, Outcome]:
    ended = [event for event in events if isinstance(event, TrialFinished)]
    return {event.spec.length_tokens: event.result.outcome for event in ended}


def answers_of(question: Question, law: Law) -> list[CellAnswer]:
    return answers_among(events_of(question, law))


def in_turn(outcomes: dict[int, list[Outcome]], otherwise: Law) -> Law:
    """A law that answers some lengths (thousands of tokens) from a list before it is lawful."""
    left = {index * STEP: list(told) for index, told in outcomes.items()}

    def law(spec: TrialSpec) -> int | Outcome:
        told = left.get(spec.length_tokens)
        return told.pop(0) if told else otherwise(spec)

    return law


class Repeats(OneByOne):
    """A runner whose repeats follow another law than its first trials."""

    def __init__(self, first: Law, repeats: Law) -> None:
        self.launches: Counter[tuple[int, int]] = Counter()
        self._runners = (SimulatedRunner(first), SimulatedRunner(repeats))

    def run(self, spec: TrialSpec, *, attempt: int = 1, repeat: int = 0) -> TrialResult:
        self.launches[spec.length_tokens // STEP, repeat] += 1
        return self._runners[repeat > 0].run(spec, attempt=attempt, repeat=repeat)


@given(st.integers(0, GRID_SIZE - 1), st.sampled_from(["bisect", "linear"]))
def test_every_answer_is_a_pair_of_trials_one_that_fit_and_the_next_that_did_not(capacity, method):
    events = events_of(ask(method=method), fits_up_to(capacity * STEP))
    answer = events[-1].answer
    outcomes = tried_in(events)
    assert answer.capacity_tokens == capacity * STEP
    assert answer.does_not_fit_tokens == (capacity + 1) * STEP
    assert outcomes[answer.does_not_fit_tokens] is Outcome.OUT_OF_MEMORY
    assert capacity == 0 or outcomes[answer.capacity_tokens] is Outcome.FIT
    assert (answer.limit, answer.monotone, answer.trials) == ("memory", True, len(outcomes))


def bound(index: int) -> float:
    return 2 * math.log2(index) + 2 if index else 1


CELLS = tuple(
    Cell(layout=Layout(gpus=gpus), settings=Settings(allocator=allocator, loss=loss))
    for gpus in (1, 2, 4)
    for allocator, loss in (("native", "full"), ("expandable", "full"), ("expandable", "chunked"))
)


@given(
    st.lists(st.integers(0, GRID_SIZE), min_size=len(CELLS), max_size=len(CELLS)),
    st.floats(1e6, 1e15),
    st.floats(1e-3, 1e15),
    st.integers(1, 400),
)
def test_a_monotone_law_takes_few_trials(capacities, fixed_bytes, bytes_per_token, memory_gib):
    """Every cell has a capacity of its own, unlike the guess's or the other cells'."""
    known = dict(zip(CELLS, capacities, strict=True))

    def law(spec: TrialSpec) -> Outcome:
        return fits_up_to(known[Cell(layout=spec.layout, settings=spec.settings)] * STEP)(spec)

    question = ask(cells=CELLS, device_total_bytes=memory_gib * GIB)
    line = MemoryLine(fixed_bytes, bytes_per_token)
    events = search_cells(question, SimulatedRunner(law), line_of=lambda *_: line)
    for answer, capacity in zip(answers_among(events), capacities, strict=True):
        assert answer.capacity_tokens == capacity * STEP
        assert answer.trials <= bound(capacity) + HINT_COST


@settings(max_examples=examples(25))
@given(
    st.integers(2, 140),
    st.sampled_from(["Qwen3-0.6B", "Qwen3-4B", "Qwen3-30B-A3B"]),
    st.integers(1, 8),
)
def test_cells_that_order_each_others_trials_find_what_each_finds_alone(budget_gib, model, gpus):
    rungs = (("native", "full"), ("expandable", "full"), ("expandable", "chunked"))
    cells = tuple(
        Cell(layout=Layout(gpus=n), settings=Settings(allocator=allocator, loss=loss))
        for n in (1, gpus)
        for allocator, loss in rungs
    )
    grid = grid_of(4096, 1024**2, native=40960, beyond=10240)

    def found(*cells: Cell) -> list[int | None]:
        question = ask(model=model, memory_budget_bytes=budget_gib * GIB, cells=cells, grid=grid)
        answers = answers_of(question, UpperFormula(shape=question.model.shape))
        return [answer.capacity_tokens for answer in answers]

    assert found(*cells) == [found(cell)[0] for cell in cells]


def test_each_trial_is_announced_then_finished_and_the_answer_comes_last():
    events = events_of(ask(), fits_up_to(3 * STEP))
    assert isinstance(events[-1], CellAnswered)
    for started, finished in zip(events[:-1:2], events[1:-1:2], strict=True):
        assert isinstance(started, TrialStarted)
        assert isinstance(finished, TrialFinished)
        one, other = ((each.spec, each.attempt, each.repeat) for each in (started, finished))
        assert one == other


@given(
    budget=st.integers(6 * STEP, 3 * GRID_SIZE * STEP),
    held=st.integers(1, 2 * GRID_SIZE * STEP),
    sharded=st.sampled_from([1, 2]),
    method=st.sampled_from(["bisect", "linear"]),
    proof=st.sampled_from([{"proof": "full"}, {"proof": "memory", "timeout_s": 300.0}]),
    expected=st.none() | st.integers(0, GRID_SIZE * STEP),
)
def test_a_token_budget_hides_no_length_that_fits(budget, held, sharded, method, proof, expected):
    """Shorter lengths fill it, and take more memory than one that leaves almost half empty."""
    layout = Layout(gpus=sharded, ulysses_degree=sharded)
    cell = Cell(layout=layout, settings=Settings(token_budget_tokens=budget))
    question = ask(cells=(cell,), method=method, **proof)
    events = search_cells(question, SimulatedRunner(packs_up_to(held)), expected=lambda _: expected)
    [answer] = answers_among(events)
    trials = [question.trial(cell, index * STEP) for index in range(1, question.size_of(cell) + 1)]
    fitting = [each.length_tokens for each in trials if each.length_tokens * each.sequences <= held]
    assert answer.capacity_tokens == max(fitting, default=0)
    assert answer.monotone


@given(
    budget=st.integers(6, 2 * GRID_SIZE),
    held=st.integers(1, 2 * GRID_SIZE),
    max_index=st.integers(GRID_SIZE, 8 * GRID_SIZE),
)
def test_a_linear_start_that_a_token_budget_packs_again_costs_few_trials(budget, held, max_index):
    """What fits depends on the tokens of a GPU alone: a start that fills the budget there says
    nothing of longer ones.
    """
    packed = Settings(token_budget_tokens=budget * STEP)
    layouts = [Layout(gpus=4, ulysses_degree=sp) for sp in (1, 2, 4)]
    cells = tuple(Cell(layout=layout, settings=packed) for layout in layouts)
    question = ask(cells=cells, grid=grid_of(STEP, max_index * STEP), method="linear")

    def law(spec: TrialSpec) -> Outcome:
        return packs_up_to(held * STEP * spec.layout.context_degree)(spec)

    events = events_of(question, law)
    for answer in answers_among(events):
        cell = answer.cell
        first = next(e for e in events if isinstance(e, TrialFinished) and e.cell == cell)
        if first.result.outcome is Outcome.FIT:
            continue  # an upward scan, to the first length that does not
        trials = (question.trial(cell, i * STEP) for i in range(1, question.size_of(cell) + 1))
        fitting = (trial.length_tokens for trial in trials if law(trial) is Outcome.FIT)
        longest = max(fitting, default=0)
        assert answer.capacity_tokens == longest
        assert answer.monotone
        assert answer.trials <= bound(longest // STEP) + HINT_COST + 1


def test_a_length_that_fits_and_packs_no_fewer_tokens_than_a_shorter_one_that_did_not_is_reported():
    packed = Cell(layout=Layout(), settings=Settings(token_budget_tokens=59 * STEP))
    law = in_turn({1: [Outcome.OUT_OF_MEMORY]}, fits_up_to(GRID_SIZE * STEP))
    [answer] = answers_of(ask(cells=(packed,), method="linear"), law)
    (contradiction,) = answer.contradictions
    assert re.findall(r"[\d,]+\d", contradiction) == ["1,000", "59,000"]


CRASHED, TIMEOUT = Outcome.CRASHED, Outcome.TIMEOUT


def beyond(fits: int, otherwise: Outcome) -> Law:
    """All up to so many thousand tokens fit, and the others end otherwise."""
    return lambda spec: Outcome.FIT if spec.length_tokens <= fits * STEP else otherwise


@pytest.mark.parametrize(
    ("law", "fits", "not_fits", "limit", "said", "attempts"),
    [
        (fits_up_to(GRID_SIZE * STEP), 64_000, None, "ceiling", "64,000 tokens fit, .*", 1),
        (beyond(5, Outcome.HOST_OUT_OF_MEMORY), 5000, 6000, "host_memory", ".*", 1),
        (in_turn({4: [CRASHED]}, fits_up_to(4 * STEP)), 4000, 5000, "memory", ".*", 2),
        (beyond(3, CRASHED), 2000, None, "inconclusive", "4,000 tokens: none of 3 .*: CRASHED", 3),
        (beyond(0, CRASHED), None, None, "inconclusive", ".*", 3),
        (beyond(5, TIMEOUT), 5000, None, "time", "6,000 tokens .*: TIMEOUT", 1),
        (in_turn({8: [TIMEOUT]}, fits_up_to(5 * STEP)), 5000, 6000, "memory", ".*", 1),
    ],
)
def test_what_ends_a_search_is_its_limit(law, fits, not_fits, limit, said, attempts):
    events = events_of(ask(), law)
    answer = events[-1].answer
    assert (answer.capacity_tokens, answer.does_not_fit_tokens) == (fits, not_fits)
    assert (answer.limit, answer.monotone) == (limit, True)
    assert re.fullmatch(said, answer.reason)
    started = [event.attempt for event in events if isinstance(event, TrialStarted)]
    assert max(started) == attempts
    assert answer.trials == len(started)


def test_a_crash_in_one_cell_does_not_end_the_others():
    def law(spec: TrialSpec) -> int | Outcome:
        return CRASHED if spec.layout.gpus == 1 else fits_up_to(7 * STEP)(spec)

    cells = tuple(Cell(layout=Layout(gpus=n), settings=Settings()) for n in (1, 2))
    one, two = answers_of(ask(cells=cells), law)
    assert (one.limit, two.limit, two.capacity_tokens) == ("inconclusive", "memory", 7000)


@given(st.integers(0, 40 * STEP))
def test_the_margin_asks_for_the_longest_length_with_that_headroom(margin_mib):
    """By the law each token takes 1 MiB, and 40 thousand tokens fill the allocator's share."""
    budget = CONTEXT_BYTES["cuda"] + 40 * STEP * MIB
    question = ask(memory_budget_bytes=budget, margin_bytes=margin_mib * MIB)
    [answer] = answers_of(question, lambda spec: spec.length_tokens * MIB)
    assert answer.capacity_tokens == (40 * STEP - margin_mib) // STEP * STEP
    if answer.capacity_tokens:
        assert answer.headroom_bytes >= margin_mib * MIB
        assert answer.peak_reserved_bytes == answer.capacity_tokens * MIB


def test_a_fit_without_the_margin_says_so_and_unmeasured_headroom_is_none():
    budget = CONTEXT_BYTES["cuda"] + 40 * STEP * MIB
    question = ask(memory_budget_bytes=budget, margin_bytes=2 * GIB)
    [answer] = answers_of(question, lambda spec: spec.length_tokens * MIB)
    assert re.findall(r"[\d,.]+ \w+", answer.reason) == ["38,000 tokens", "1.95 GiB", "2.00 GiB"]
    [answer] = answers_of(ask(margin_bytes=GIB), fits_up_to(9 * STEP))
    assert answer.capacity_tokens == 0
    assert "could not be measured" in answer.reason


def test_confirm_repeats_both_sides_of_the_edge_and_tries_the_lengths_above_once():
    runner = Repeats(fits_up_to(5 * STEP), fits_up_to(5 * STEP))
    (answer,) = answers_among(search_cells(ask(confirm=3), runner))
    at_the_edge = {(index, repeat) for index in (5, 6) for repeat in (1, 2, 3)}
    assert at_the_edge | {(7, 0), (8, 0), (9, 0)} <= {*runner.launches}
    assert set(runner.launches.values()) == {1}
    assert answer.capacity_tokens == 5000
    assert answer.monotone is True
    assert answer.trials == runner.launches.total()


def seven_too(spec: TrialSpec) -> int | Outcome:
    return fits_up_to((7 if spec.length_tokens == 7 * STEP else 5) * STEP)(spec)


@pytest.mark.parametrize(
    ("first", "repeats", "confirm", "fits", "said"),
    [
        (fits_up_to(5 * STEP), fits_up_to(4 * STEP), 1, 5000, ["5,000"]),
        (fits_up_to(5 * STEP), fits_up_to(6 * STEP), 2, 6000, ["6,000"]),
        (seven_too, seven_too, 1, 7000, ["6,000", "7,000"]),
    ],
)
def test_what_a_repeat_or_a_longer_fit_contradicts_is_said(first, repeats, confirm, fits, said):
    runner = Repeats(first, repeats)
    (answer,) = answers_among(search_cells(ask(confirm=confirm), runner))
    assert (answer.capacity_tokens, answer.does_not_fit_tokens) == (fits, fits + STEP)
    assert answer.monotone is False
    assert confirm == 1 or runner.launches[7, 2] == 1, "the new edge is confirmed"
    (contradiction,) = answer.contradictions
    assert re.findall(r"\d,\d+", contradiction)[: len(said)] == said


def test_a_repeat_that_times_out_confirms_nothing_and_is_said():
    runner = Repeats(fits_up_to(5 * STEP), lambda spec: Outcome.TIMEOUT)
    (answer,) = answers_among(search_cells(ask(confirm=1), runner))
    assert (answer.capacity_tokens, answer.limit, answer.monotone) == (5000, "memory", True)
    assert answer.reason.endswith(" confirm it: 2")


@settings(max_examples=examples(50))
@given(
    st.lists(st.sampled_from(NAMED_BY_A_LAW), min_size=GRID_SIZE, max_size=GRID_SIZE),
    st.integers(0, 3),
)
def test_any_law_at_all_gets_an_answer_that_its_trials_bear_out(outcomes, confirm):
    law: Callable[[TrialSpec], Outcome] = lambda spec: outcomes[spec.length_tokens // STEP - 1]  # noqa: E731
    events = events_of(ask(confirm=confirm), law)
    answer = events[-1].answer
    tried = tried_in(events)
    assert not answer.capacity_tokens or tried[answer.capacity_tokens] is Outcome.FIT
    if answer.does_not_fit_tokens:
        assert tried[answer.does_not_fit_tokens].is_memory
        assert answer.does_not_fit_tokens == answer.capacity_tokens + STEP
    out_of_memory = [length for length, outcome in tried.items() if outcome.is_memory]
    assert answer.monotone == (min(out_of_memory, default=math.inf) > (answer.capacity_tokens or 0))


@pytest.mark.parametrize(
    "error", [MachineError("the GPU fell off the bus", hint="restart"), KeyboardInterrupt()]
)
def test_what_ends_the_machine_ends_the_campaign(error):
    def law(spec: TrialSpec) -> int:
        raise error

    with pytest.raises(type(error)):
        events_of(ask(), law)


LENGTHS = grid_of(4096, 2**20, native=40960, beyond=10240)


def cell(gpus: int = 1, sp: int = 1, **settings) -> Cell:
    return Cell(layout=Layout(gpus=gpus, ulysses_degree=sp), settings=Settings(**settings))


def ask_of(*cells: Cell, model: str = "Qwen3-4B", **changes) -> Question:
    fields = {"cells": cells or (cell(),), "device_total_bytes": 80 * GIB, **changes}
    return question_on(fields.pop("grid", LENGTHS), model=model, **fields)


def answered(where: Cell, index: int, limit: Limit = "memory") -> CellAnswer:
    fails = LENGTHS.length(index + 1) if limit == "memory" else None
    return answer_of(where, LENGTHS.length(index) if index else 0, fails, limit=limit)


LOSSES, LIMITS = (
    st.sampled_from(["full", "chunked"]),
    st.sampled_from(["memory", "ceiling", "time"]),
)
FEW_CELLS = st.builds(
    cell, st.sampled_from([1, 2, 4]), st.just(1), loss=LOSSES, offload=st.booleans()
)
ANSWERS = st.builds(answered, FEW_CELLS, st.integers(0, LENGTHS.size - 1), LIMITS)


@given(st.lists(ANSWERS, max_size=6), st.integers(1, 200), st.sampled_from([1, 2, 4]))
def test_whatever_was_answered_before_the_first_index_is_on_the_grid(finished, memory_gib, gpus):
    index = first_index(ask_of(memory_budget_bytes=memory_gib * GIB), cell(gpus), finished)
    assert 1 <= index <= LENGTHS.size


@pytest.mark.parametrize("prompt_tokens", [0, 2048])
@pytest.mark.parametrize("model", ["tiny", "Qwen3-0.6B"])
def test_the_first_length_is_the_longest_that_the_formula_says_fits(prompt_tokens, model):
    where, grid = cell(loss="full"), grid_of(256, 2**15, native=2**15, beyond=256)
    memory = 3 * GIB // 2 if model == "tiny" else 16 * GIB
    asked = ask_of(
        where, model=model, grid=grid, device="cpu" if model == "tiny" else "cuda",
        device_total_bytes=None if model == "tiny" else memory,
        memory_budget_bytes=memory, prompt_tokens=prompt_tokens,
    )  # fmt: skip
    usable = memory - asked.margin_bytes
    predictor = formula_of_trials(asked, where, usable)
    assert predictor is not None
    fits = longest(predictor, usable)
    assert 3 < fits < grid.size
    assert abs(first_index(asked, where, []) - fits) <= 1


def test_states_without_room_start_at_the_bottom_and_unknown_memory_nowhere():
    assert first_index(ask_of(model="Qwen3-32B"), cell(1), []) == 1
    assert first_index(ask_of(device_total_bytes=None), cell(), [answered(cell(), 5)]) is None


@pytest.mark.parametrize("loss", ["chunked", "full"])
def test_a_rung_where_a_token_costs_the_same_is_expected_to_end_where_the_other_did(loss):
    found, other = answered(cell(4, loss=loss), 9), cell(4, loss=loss, allocator="expandable")
    assert first_index(ask_of(), other, [found], unknown_trainer_line) in (9, 10)


@pytest.mark.parametrize("other", [{"allocator": "expandable"}, {"loss": "chunked"}], ids=str)
def test_what_native_loses_to_whole_logits_says_nothing_about_other_rungs(other):
    where = cell(**other)
    assert first_index(ask_of(), where, [answered(cell(), 3)]) == first_index(ask_of(), where, [])


@given(st.integers(2, 20))
def test_offloaded_states_leave_the_same_room_on_any_number_of_gpus(index):
    found = answered(cell(1, offload=True), index)
    hints = {first_index(ask_of(), cell(gpus, offload=True), [found]) for gpus in (1, 2, 4, 8)}
    assert hints <= {index, index + 1}, "but for NCCL and a layer's shards on their way"


@given(st.integers(1, 12))
def test_a_sequence_over_two_gpus_is_expected_to_be_twice_as_long(index):
    found = answered(cell(2, offload=True), index)
    expected = LENGTHS.index_at_most(2 * LENGTHS.length(index))
    assert first_index(ask_of(), cell(2, 2, offload=True), [found]) in range(expected, expected + 4)


@given(ANSWERS.filter(lambda answer: answer.cell.settings.loss == "full"))
def test_more_gpus_more_memory_or_less_margin_never_lower_the_expectation(found):
    roomy, narrow = ask_of(device_total_bytes=100 * GIB), ask_of(margin_bytes=8 * GIB)
    for small, large in ((ask_of(), roomy), (narrow, ask_of())):
        assert first_index(small, cell(2), []) <= first_index(large, cell(2), [])
    assert first_index(ask_of(), cell(2), [found]) <= first_index(ask_of(), cell(4), [found])


@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B", "Qwen3-30B-A3B"])
@pytest.mark.parametrize("resolution", [512, 4096])
def test_cells_that_share_what_they_learn_take_fewer_trials_for_the_same_answers(model, resolution):
    grid = grid_of(resolution, 2**20, native=40960)
    rungs = ({}, {"allocator": "expandable"}, {"allocator": "expandable", "loss": "chunked"})
    cells = tuple(cell(gpus, **rung) for gpus in (1, 2, 4, 8) for rung in rungs)
    sharing = ask_of(*cells, model=model, grid=grid, device_total_bytes=140 * GIB)
    galloping = msgspec.structs.replace(sharing, device_total_bytes=None)
    runner = SimulatedRunner(UpperFormula(shape=sharing.model.shape), device_total_bytes=140 * GIB)
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
    assert carried_start(ask_of(), cell(4, 2), finished) == 6
    assert carried_start(ask_of(), cell(4, 1), finished) == 3
    assert carried_start(ask_of(), cell(1, 1), finished) is None
    assert carried_start(ask_of(), cell(2), [answered(cell(1), 0)]) is None

"""Proof by memory-only trials."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.cli.commands import exit_code
from highwater.errors import EXIT_ANSWERED, EXIT_ANSWERED_NO, EXIT_INCONCLUSIVE
from highwater.model.held_bytes import step_flops
from highwater.model.model import STATE_BYTES_PER_PARAMETER, load_model
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell, CellAnswer, Question, Study
from highwater.nouns.trial import Outcome, Runner, TrialResult, TrialSpec
from highwater.pages import study_answer
from highwater.pages.table import plain_table
from highwater.search.cell_outcomes import CellAnswered, SearchEvent, TrialFinished, TrialStarted
from highwater.search.proof import FULL_SHARE, FullTrials
from highwater.search.scheduler import search_cells
from highwater.search.start_length import MemoryLine
from highwater.trials.simulated import OneByOne
from highwater.units import GIB
from trial_specs import TimedRunner, TimeLaw, fits_up_to, grid_of, question_on

STEP = 4096
GRID_SIZE = 128
MODEL = load_model("Qwen3-0.6B")
LIMIT_S = 300.0
OVERHEAD_S = 0.2
"""Of each step, whatever its length: what makes a short one a poor measure of a long one."""


def ask(**changes) -> Question:
    proven = {"proof": "memory", "timeout_s": LIMIT_S, "simulated": True}
    return question_on(grid_of(STEP, GRID_SIZE * STEP), **{**proven, **changes})


def steps_at(flops_per_s: float) -> TimeLaw:
    """Steps of a trainer of constant speed."""

    def seconds(spec: TrialSpec) -> float:
        tokens = spec.length_tokens
        whole = step_flops(MODEL.shape, length_tokens=tokens, sequences=1, settings=Settings())
        linear = 6 * MODEL.shape.matmul_parameters * tokens
        depth = MODEL.shape.layers if spec.attention_depth is None else spec.attention_depth
        return OVERHEAD_S + (linear + (whole - linear) * depth / MODEL.shape.layers) / flops_per_s

    return seconds


def runner(capacity: int, flops_per_s: float) -> TimedRunner:
    law, time = fits_up_to(capacity * STEP), steps_at(flops_per_s)
    return TimedRunner(law, step_time=time, timeout_s=LIMIT_S)


def events_of(question: Question, by: Runner) -> list[SearchEvent]:
    return list(search_cells(question, by))


def finished(events: list[SearchEvent]) -> list[tuple[TrialSpec, TrialResult]]:
    return [(event.spec, event.result) for event in events if isinstance(event, TrialFinished)]


def answer_of(events: list[SearchEvent]) -> CellAnswer:
    assert isinstance(events[-1], CellAnswered)
    return events[-1].answer


CAPACITIES = st.integers(0, GRID_SIZE - 1)
SPEEDS = st.floats(1e12, 1e16)


@given(CAPACITIES, SPEEDS, st.sampled_from(["bisect", "linear"]))
def test_the_answer_is_a_pair_full_fits_are_full_trials(capacity, flops_per_s, method):
    events = events_of(ask(method=method), runner(capacity, flops_per_s))
    answer, trials = answer_of(events), finished(events)
    lengths: dict[Outcome, set[int]] = {outcome: set() for outcome in Outcome}
    for spec, result in trials:
        is_mixed = result.outcome.is_fit and spec.is_memory_only == (result.outcome is Outcome.FIT)
        assert not is_mixed
        lengths[result.outcome].add(spec.length_tokens)
    full, memory_only = lengths[Outcome.FIT], lengths[Outcome.MEMORY_ONLY_FIT]
    if answer.limit == "time":  # even one layer takes too long: the longest that told stands
        assert answer.does_not_fit_tokens is None
    else:
        assert (answer.reach_tokens or 0) == capacity * STEP
        assert answer.does_not_fit_tokens == (capacity + 1) * STEP
        assert answer.does_not_fit_tokens in lengths[Outcome.OUT_OF_MEMORY]
    assert (answer.capacity_tokens or 0) == max(full, default=0)
    if answer.memory_only is not None:
        assert answer.memory_only.length_tokens == max(memory_only) > max(full, default=0)
    assert answer.monotone


@given(CAPACITIES, SPEEDS)
def test_nothing_is_foreseen_from_nothing(capacity, flops_per_s):
    """Before every memory-only trial a full one has told: by its time, or by running out of it."""
    told = False
    for spec, result in finished(events_of(ask(), runner(capacity, flops_per_s))):
        assert told or not spec.is_memory_only
        told |= not spec.is_memory_only and result.outcome in (Outcome.FIT, Outcome.TIMEOUT)


@given(st.integers(1, GRID_SIZE - 1), SPEEDS)
def test_what_is_trained_is_as_long_as_time_allows(capacity, flops_per_s):
    """The longest full fit is a forecast's worth below the limit, unless the trials are spent."""
    answer = answer_of(events_of(ask(), runner(capacity, flops_per_s)))
    seconds = steps_at(flops_per_s)
    question = ask()
    trials = [question.trial(question.cells[0], i * STEP) for i in range(1, capacity + 1)]
    limit_s = 0.8 * FULL_SHARE * LIMIT_S
    in_time = [trial.length_tokens for trial in trials if 2 * seconds(trial) <= limit_s]
    if in_time and answer.capacity_tokens is not None:
        assert answer.capacity_tokens >= 0.75 * max(in_time)


def test_a_length_whose_full_trial_ran_out_of_time_is_tried_memory_only_and_not_again_in_full():
    class Slow(OneByOne):
        """Full trials past 20 steps of the grid hang, whatever their forecast says."""

        def run(self, spec: TrialSpec, *, attempt: int = 1, repeat: int = 0) -> TrialResult:
            hangs, law = spec.length_tokens > 20 * STEP, fits_up_to(50 * STEP)
            taken_s = 1e9 if hangs and not spec.is_memory_only else 0.01
            return TimedRunner(law, step_time=lambda _: taken_s, timeout_s=LIMIT_S).run(spec)

    events = events_of(ask(), Slow())
    trials, answer = finished(events), answer_of(events)
    late = [spec.length_tokens for spec, result in trials if result.outcome is Outcome.TIMEOUT]
    assert late
    assert len(late) == len(set(late))
    assert (answer.reach_tokens, answer.does_not_fit_tokens) == (50 * STEP, 51 * STEP)
    assert answer.limit == "memory"
    assert answer.capacity_tokens <= 20 * STEP
    assert "(memory-only)" in answer.reason


def test_where_every_length_is_in_time_every_trial_is_full_and_finds_what_a_full_proof_finds():
    for capacity in (0, 1, 7, 100):
        fast = runner(capacity, 1e18)
        by_memory, in_full = (
            answer_of(events_of(question, fast))
            for question in (ask(), ask(proof="full", timeout_s=None))
        )
        assert by_memory.memory_only is None
        assert by_memory.capacity_tokens == in_full.capacity_tokens
        assert by_memory.does_not_fit_tokens == in_full.does_not_fit_tokens


@given(CAPACITIES, st.sampled_from(["bisect", "linear"]))
def test_a_full_proof_never_makes_a_memory_only_trial(capacity, method):
    events = events_of(ask(proof="full", timeout_s=None, method=method), runner(capacity, 1e14))
    assert not any(spec.is_memory_only for spec, _ in finished(events))
    assert answer_of(events).memory_only is None


def test_a_full_trial_that_runs_out_of_memory_where_a_memory_only_one_did_not_is_said():
    class Leaky(OneByOne):
        def run(self, spec: TrialSpec, *, attempt: int = 1, repeat: int = 0) -> TrialResult:
            law = fits_up_to((100 if spec.is_memory_only else 4) * STEP)
            return TimedRunner(law, step_time=steps_at(1e14), timeout_s=LIMIT_S).run(spec)

    def hint(question: Question, cell: Cell, usable_bytes: int) -> MemoryLine:
        left_bytes = usable_bytes - STATE_BYTES_PER_PARAMETER * MODEL.shape.parameters
        return MemoryLine(0, left_bytes / (100 * STEP))

    answer = answer_of(list(search_cells(ask(device_total_bytes=100 * GIB), Leaky(), line_of=hint)))
    assert answer.reach_tokens == 100 * STEP
    assert not answer.monotone
    assert "in full" in answer.reason


@pytest.mark.parametrize("confirm", [1, 2])
def test_confirmation_repeats_the_kind_of_trial_that_it_confirms(confirm):
    events = events_of(ask(confirm=confirm), runner(100, 2e14))
    answer = answer_of(events)
    repeats = [event.spec for event in events if isinstance(event, TrialStarted) and event.repeat]
    assert {spec.length_tokens for spec in repeats} == {100 * STEP, 101 * STEP}
    assert all(spec.is_memory_only for spec in repeats)
    assert answer.memory_only is not None


def test_no_full_trial_is_made_above_one_that_ran_out_of_memory():
    trials, spec = FullTrials(ask(), ask().cells[0], LIMIT_S), ask().trial(ask().cells[0], STEP)
    gpu = TimedRunner(fits_up_to(40 * STEP), step_time=lambda _: 0.01, timeout_s=LIMIT_S)
    for index in (20, 60, 50):
        longer = msgspec.structs.replace(spec, length_tokens=index * STEP)
        trials.tell(longer.length_tokens, gpu.run(longer))
    assert trials.next_index(100, lambda i: i * STEP) == 49


def study_of(capacity: int, flops_per_s: float) -> Study:
    answer = answer_of(events_of(ask(), runner(capacity, flops_per_s)))
    return Study(question=ask(), answers=(answer,))


def test_tables_lines_and_json_keep_the_two_apart():
    study = study_of(100, 2e14)
    (answer,) = study.answers
    assert answer.memory_only is not None
    assert answer.capacity_tokens is not None
    text = plain_table(study_answer.answer_table(study))
    header, row = text.splitlines()[2:4]
    assert header.split()[3:7] == ["trained", "in", "full", "memory-only"]
    assert f"{answer.capacity_tokens:,}* " in row
    assert "409,600* memory-only" in row
    assert f"trained in full: {answer.capacity_tokens:,} tokens" in text
    line = study_answer.published_line(study.question, answer.cell, answer) or ""
    assert f"max_model_len = {answer.capacity_tokens}, memory_only_len = 409600" in line
    published = "".join(map(study_answer.published_text, study_answer.published_tables([study])))
    assert f"{answer.capacity_tokens}* (409600* memory-only)" in published


def test_the_exit_code_of_a_memory_only_answer_is_that_of_an_answer():
    assert exit_code(study_of(100, 2e14)) == EXIT_ANSWERED
    assert exit_code(study_of(0, 2e14)) == EXIT_ANSWERED_NO
    assert exit_code(study_of(100, 1e9)) == EXIT_INCONCLUSIVE

"""The time of a search: what is tried first, what starts in the time that there is."""

from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from highwater.cli.search_context_length_capacity import parse, request_of, settings_of
from highwater.nouns.plan import Plan, plan
from highwater.nouns.request import request_from
from highwater.nouns.study import Cell, CellAnswer, Question
from highwater.nouns.trial import Outcome, TrialResult, TrialSpec
from highwater.pages.study_answer import study_answer
from highwater.search.budget import Budget, outlook, time_notes
from highwater.search.cell_outcomes import TrialFinished, TrialStarted
from highwater.search.proof import FULL_SHARE, ran_out_s, trial_s
from highwater.search.scheduler import BudgetSpentError, recorded_search, search_cells
from highwater.search.start_length import first_index
from highwater.store.journal import open_journal, read_study
from highwater.trials.simulated import Law, OneByOne
from places import FOUND, examples, machine_with, script
from tables import table
from trial_specs import answers_among, fits_up_to

STUDIES = sorted(FOUND.glob("*.jsonl"))
trials = script(FOUND / "trials.py")
ABOUT = 1.1
MOST_AT_AN_EDGE = 2.5
"""Median of the trials at the edge of a cell: two are the fewest that prove one."""
TOLD_WITHIN = 0.35
"""How far the time of a trial in a recorded search may be from its prediction, in the middle: they
ran beside others."""


def planned(**named: Any) -> Plan:
    return plan(request_from({"model": "Qwen3-0.6B", **named}, keywords=True), machine_with(1))


def test_half_of_the_edges_take_two_trials_and_searches_begin_at_the_predicted_edge():
    played = [each for path in STUDIES for each in trials.played_again(read_study(path))]
    counts = [now for _, now, _ in played]
    assert len(counts) > 40
    assert median(counts) <= MOST_AT_AN_EDGE
    assert sum(now <= then for _, now, then in played) > 0.85 * len(played)
    for path in STUDIES:
        study = read_study(path)
        if study.question.proof == "memory" and list(trials.edges(study)):
            question = study.question
            first = outlook(question)[0]
            assert first.first_tokens > question.grid.length(1), path.name
            assert first.edge_s is not None


def test_the_time_of_a_recorded_trial_is_predicted():
    off: list[float] = []
    for path in STUDIES:
        study = read_study(path)
        for trial in study.trials:
            result, spec = trial.result, trial.spec
            if result is None or not result.outcome.tells or spec.settings.offload:
                continue
            told = trial_s if result.outcome.is_fit else ran_out_s
            off.append(abs(told(study.question, spec) / result.wall_s - 1))
    assert len(off) > 100
    assert median(off) < TOLD_WITHIN / 2
    assert sum(each < TOLD_WITHIN for each in off) > 0.75 * len(off)


@pytest.mark.parametrize("slower", [1.0, 1.5])
@pytest.mark.parametrize("kind", trials.KINDS)
@pytest.mark.parametrize("model", trials.MODELS)
def test_a_search_without_flags_ends_in_about_15_minutes_with_something_found(model, kind, slower):
    found = trials.whole_search(model, kind, slower=slower)
    assert found.planned.budget_s == 15 * 60
    assert found.took_s <= ABOUT * 15 * 60 + 1e-6
    if not found.longest_fit_tokens:
        assert len(found.answers) == len(found.planned.question.cells)
        assert {answer.capacity_tokens for answer in found.answers} == {0}
    for answer in found.answers:
        assert answer.limit in ("memory", "ceiling")


def test_more_time_trains_more_in_full():
    usual, longer = (
        trials.whole_search("Qwen3-0.6B", "H100-80GB", slower=1.0, **named).answers
        for named in ({}, {"budget": "2h"})
    )
    assert len(usual) == len(longer) == 3
    by_cell = {each.cell: each for each in longer}
    for less in usual:
        more = by_cell[less.cell]
        assert less.reach_tokens == more.reach_tokens
        assert less.does_not_fit_tokens == more.does_not_fit_tokens
        assert less.capacity_tokens <= more.capacity_tokens
    in_full = [max(each.capacity_tokens for each in answers) for answers in (usual, longer)]
    assert in_full[0] < in_full[1]


def test_a_budget_is_no_part_of_the_question_and_several_layouts_have_as_much_each():
    usual, longer, named = planned(), planned(budget="2h"), planned(budget="2h", timeout="5m")
    assert usual.question.key == longer.question.key == named.question.key
    assert (usual.budget_s, longer.budget_s, named.budget_s) == (900, 7200, 7200)
    assert (usual.timeout_s, longer.timeout_s, named.timeout_s) == (100, 800, 300)
    assert usual.question.timeout_s == usual.timeout_s
    two = request_from({"model": "Qwen3-0.6B", "gpus": [1, 2]}, keywords=True)
    both = plan(two, machine_with(2))
    assert (both.budget_s, both.timeout_s) == (2 * 900, 100)


@pytest.mark.parametrize(
    ("named", "proof", "budget_s"), table("search_budget", "who_names_a_proof_or_a_limit_alone")
)
def test_who_names_a_proof_or_a_limit_alone_gets_what_they_always_did(named, proof, budget_s):
    found = planned(**named)
    assert (found.question.proof, found.budget_s) == (proof, budget_s)


class Recorded:
    """A search of one question on a clock, with a study that the next one goes on with."""

    def __init__(self, question: Question, law: Law, path: Path, *, slower: float) -> None:
        self.question, self.law, self.path, self.slower = question, law, path, slower
        self.launched: list[tuple[str, int, int]] = []

    def go_on(self, budget_s: float) -> tuple[bool, float]:
        """Search until the budget ends; whether every cell is answered, and the time it took."""
        question, clock = self.question, trials.Clock()
        limit_s, pace = question.timeout_s, self.slower
        runner = trials.TimedRunner(question, self.law, clock, timeout_s=limit_s, slower=pace)
        times: dict[str, Any] = {"timeout_s": limit_s or 0.0, "same_timeout": False}
        budget = Budget(question, runner, budget_s, **times, clock=clock)
        told = {"may_start": budget.allows, "order": budget.order}
        with open_journal(self.path, question) as journal:
            events = recorded_search(question, budget, journal, **told)
            try:
                for event in events:
                    if isinstance(event, TrialStarted):
                        self.launched.append((event.spec.key, event.attempt, event.repeat))
            except BudgetSpentError:
                return False, clock.now_s
        return True, clock.now_s


def on_h200(**changes: Any) -> Question:
    question = planned(max_length="256k").question
    return msgspec.structs.replace(question, **changes)


def reaching(indices: dict[Cell, int], question: Question) -> Law:
    def law(spec: TrialSpec) -> Outcome:
        index = indices[Cell(layout=spec.layout, settings=spec.settings)]
        longest = question.grid.length(index) if index else 0
        return Outcome.FIT if spec.length_tokens <= longest else Outcome.OUT_OF_MEMORY

    return law


@given(st.lists(st.integers(0, 32), min_size=3, max_size=3), st.integers(70, 1500), st.data())
@settings(max_examples=examples(15), deadline=None)
def test_a_search_ended_early_goes_on_to_the_answers(tmp_path_factory, indices, budget_s, data):
    question = on_h200()
    size = question.grid.size
    found = {cell: min(i, size) for cell, i in zip(question.cells, indices, strict=True)}
    slower = data.draw(st.sampled_from([0.7, 1.0, 1.4]))
    path = tmp_path_factory.mktemp("budget") / "s.jsonl"
    search = Recorded(question, reaching(found, question), path, slower=slower)
    is_over, longest_s = False, float(budget_s)
    for _ in range(30):
        is_over, took_s = search.go_on(longest_s)
        assert took_s <= ABOUT * longest_s + 1e-6
        if is_over:
            break
        longest_s *= 1.5
    assert is_over
    assert len(search.launched) - len(set(search.launched)) <= 30, "at most one a time was ended"
    study = read_study(path)
    assert study.complete
    for cell, index in found.items():
        answer = study.answer_of(cell)
        assert answer.reach_tokens == (question.grid.length(index) if index else 0)
        is_end = index == size
        assert answer.does_not_fit_tokens == (None if is_end else question.grid.length(index + 1))
        ended = [trial for trial in study.trials_of(cell) if trial.result is not None]
        told = {trial.spec.length_tokens: trial.result.outcome for trial in ended}
        assert not answer.reach_tokens or told[answer.reach_tokens].is_fit
        assert is_end or told[question.grid.length(index + 1)] is Outcome.OUT_OF_MEMORY


def test_a_trial_that_the_budget_ends_has_no_result_and_is_run_again(tmp_path):
    question = on_h200(device_name="a GPU of no known rates")
    law = reaching(dict.fromkeys(question.cells, 5), question)
    path = tmp_path / "s.jsonl"

    class Endless(OneByOne):
        """A runner whose trials take all the time they get."""

        def __init__(self, clock: Any) -> None:
            self.timeout_s, self.clock = 100.0, clock

        def run(self, spec: TrialSpec, *, attempt: int = 1, repeat: int = 0) -> Any:
            runner = trials.TimedRunner(question, law, self.clock, timeout_s=self.timeout_s)
            runner.timeout_s = -1.0
            return runner.run(spec, attempt=attempt, repeat=repeat)

    clock = trials.Clock()
    budget = Budget(question, Endless(clock), 60, timeout_s=100.0, same_timeout=False, clock=clock)
    with open_journal(path, question) as journal, pytest.raises(BudgetSpentError):
        list(recorded_search(question, budget, journal))
    (trial,) = read_study(path).trials
    assert trial.result is None
    search = Recorded(question, law, path, slower=1.0)
    assert search.go_on(3600)[0]
    assert search.launched[0][0] == trial.spec.key


def test_where_no_time_is_predicted_the_shortest_length_in_full_tells_it():
    question = on_h200(device_name="a GPU of no known rates")
    assert all(each.expected_s is None for each in outlook(question))
    law = reaching(dict.fromkeys(question.cells, 5), question)
    runner = trials.TimedRunner(question, law, trials.Clock(), timeout_s=9)
    first = next(e for e in search_cells(question, runner) if isinstance(e, TrialFinished))
    assert first.spec.length_tokens == question.grid.length(1)
    assert not first.spec.is_memory_only


def test_full_trials_take_no_more_than_their_share():
    question = on_h200()
    law = reaching(dict.fromkeys(question.cells, question.grid.size), question)
    runner = trials.TimedRunner(question, law, trials.Clock(), timeout_s=question.timeout_s)
    events = [e for e in search_cells(question, runner) if isinstance(e, TrialFinished)]
    full = [each for each in events if not each.spec.is_memory_only]
    assert full
    assert question.timeout_s is not None
    for each in full:
        assert trial_s(question, each.spec) <= FULL_SHARE * question.timeout_s
    for answer in answers_among(search_cells(question, runner)):
        assert answer.capacity_tokens
        assert answer.memory_only.length_tokens == question.grid.length(question.grid.size)


def found_with(
    question: Question, law: Law, path: Path, limit_s: float, *, slower: float = 1.0
) -> tuple[list[tuple[TrialSpec, TrialResult]], CellAnswer]:
    runner = trials.TimedRunner(question, law, trials.Clock(), timeout_s=limit_s, slower=slower)
    with open_journal(path, question) as journal:
        events = list(recorded_search(question, runner, journal, timeout_s=limit_s))
    study = read_study(path)
    assert not study.unproven, "trials bear the answer out"
    return [(e.spec, e.result) for e in events if isinstance(e, TrialFinished)], study.answers[0]


def in_full(timeout: str, **named: Any) -> Plan:
    words = {"model": "Qwen3-0.6B", "gpus": [1], "timeout": timeout, "max_length": "512k", **named}
    planned = plan(request_from(words, keywords=True), machine_with(1))
    assert planned.question.proof == "full"
    one = msgspec.structs.replace(planned.question, cells=planned.question.cells[:1])
    return msgspec.structs.replace(planned, question=one)


def predicted_tokens(question: Question) -> int:
    return question.grid.length(first_index(question, question.cells[0], []) or 1)


@pytest.mark.parametrize("timeout", [100, 160, 400])
def test_the_published_command_begins_where_time_allows_and_begins_nothing_twice(tmp_path, timeout):
    words = ["--model_path", "Qwen3-0.6B", "--test_gpu_num", "2", "--test_sp_num", "2"]
    arguments = parse([*words, "--timeout", str(timeout), "--entropy_saving"])
    place: dict[str, str | int] = {"device": "cuda", "max_length": "16m"}
    planned = plan(request_of(arguments, settings_of(arguments, {}), place), machine_with(2))
    question, cell = planned.question, planned.question.cells[0]
    expected = predicted_tokens(question)
    assert (trial_s(question, question.trial(cell, expected)) or 0) > timeout
    ended, answer = found_with(question, fits_up_to(expected), tmp_path / "s.jsonl", timeout)
    assert all(result.outcome is Outcome.FIT for _, result in ended)
    assert all((trial_s(question, spec) or 0) <= timeout for spec, _ in ended)
    assert len(ended) == 1, "the first is the longest that time allows"
    assert ended[0][0].length_tokens == outlook(question, timeout)[0].first_tokens
    assert answer.limit == "time"
    assert answer.capacity_tokens == ended[0][0].length_tokens < expected
    assert answer.does_not_fit_tokens is None
    (note,) = time_notes(question, timeout)
    assert f"{expected:,}" in note


def test_the_answer_of_a_search_that_time_ended_is_no_capacity_of_memory(tmp_path):
    question = in_full("90s").question
    found_with(question, fits_up_to(predicted_tokens(question)), tmp_path / "s.jsonl", 90)
    sentence = study_answer(read_study(tmp_path / "s.jsonl"))
    assert "take too long to tell" in sentence
    assert "ran out of memory" not in sentence


@example(limit_s=135, share=1.0, slower=1.0, method="bisect")
@example(limit_s=519, share=1.5, slower=0.5, method="bisect")
@given(
    limit_s=st.integers(60, 2400),
    share=st.floats(0.05, 1.5),
    slower=st.sampled_from([0.5, 0.8, 1.0, 1.3, 2.0]),
    method=st.sampled_from(["bisect", "linear"]),
)
@settings(max_examples=examples(40), deadline=None)
def test_nothing_predicted_to_be_late_starts(tmp_path_factory, limit_s, share, slower, method):
    question = msgspec.structs.replace(in_full(f"{limit_s}s").question, method=method)
    capacity = int(share * predicted_tokens(question))
    path = tmp_path_factory.mktemp("limit") / "s.jsonl"
    ended, answer = found_with(question, fits_up_to(capacity), path, limit_s, slower=slower)
    for number, (spec, result) in enumerate(ended):
        said = trial_s(question, spec) or 0.0
        is_first = number == 0 and spec.length_tokens == question.grid.length(1)
        fails_s = ran_out_s(question, spec) or 0.0
        is_beyond = spec.length_tokens > predicted_tokens(question) and fails_s <= limit_s
        # after the first one, trials that were faster than predicted tell that others are
        if number == 0 or slower >= 1:
            assert said <= limit_s or is_first or is_beyond
        if result.outcome is Outcome.TIMEOUT and said > limit_s and slower >= 1:
            assert [s.length_tokens for s, _ in ended].count(spec.length_tokens) == 1
    fit = max((s.length_tokens for s, r in ended if r.outcome is Outcome.FIT), default=None)
    assert (answer.capacity_tokens or None) == fit
    grid = question.grid
    if answer.limit == "memory":
        index = grid.index_at_most(capacity) if capacity >= grid.length(1) else 0
        assert (answer.capacity_tokens or 0) == (grid.length(index) if index else 0)
    elif answer.limit == "ceiling":
        assert answer.capacity_tokens == grid.length(grid.index_at_most(grid.max_tokens))
    else:
        assert answer.limit == "time"
        assert answer.does_not_fit_tokens is None


def test_where_even_the_shortest_length_is_predicted_to_be_late_it_is_tried_once(tmp_path):
    question = in_full("60s", start_length="256k").question
    assert (trial_s(question, question.trial(question.cells[0], 262_144)) or 0) > 60
    ended, answer = found_with(question, fits_up_to(2**20), tmp_path / "late.jsonl", 60)
    assert [result.outcome for _, result in ended] == [Outcome.TIMEOUT]
    assert (answer.limit, answer.capacity_tokens) == ("time", None)
    # and where it ends in time after all, the others are judged by it
    ended, answer = found_with(question, fits_up_to(2**20), tmp_path / "s.jsonl", 60, slower=0.1)
    assert ended[0][1].outcome is Outcome.FIT
    assert (answer.capacity_tokens or 0) > 262_144


def test_a_length_that_is_predicted_not_to_fit_is_tried_where_running_out_takes_no_time(tmp_path):
    question = in_full("40m").question
    edge = first_index(question, question.cells[0], []) or 1
    grid, cell = question.grid, question.cells[0]
    at, beyond = (question.trial(cell, grid.length(i)) for i in (edge, edge + 1))
    limit_s = ((trial_s(question, at) or 0) + (trial_s(question, beyond) or 0)) / 2
    law = fits_up_to(grid.length(edge))
    ended, answer = found_with(question, law, tmp_path / "s.jsonl", limit_s)
    assert (answer.limit, answer.capacity_tokens) == ("memory", grid.length(edge))
    assert len(ended) == 2


def test_a_late_trial_that_nobody_predicted_is_not_begun_again(tmp_path):
    question = msgspec.structs.replace(in_full("90s").question, device_name="a GPU of no rates")
    assert time_notes(question, 90) == ()
    law = fits_up_to(2**20)
    runner = trials.TimedRunner(in_full("90s").question, law, trials.Clock(), timeout_s=90)
    with open_journal(tmp_path / "s.jsonl", question) as journal:
        events = list(recorded_search(question, runner, journal, timeout_s=90))
    ended = [e for e in events if isinstance(e, TrialFinished)]
    assert Outcome.TIMEOUT in {each.result.outcome for each in ended}
    assert {each.attempt for each in ended} == {1}

"""Searches in full under a limit of time: what is predicted to exceed it is not started, what timed
out as was predicted is not begun again, and the answer says that time ended it.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from highwater.cli.search_context_length_capacity import parse, request_of, settings_of
from highwater.nouns.plan import Plan, plan
from highwater.nouns.request import request_from
from highwater.nouns.study import CellAnswer, Question
from highwater.nouns.trial import Outcome, TrialResult, TrialSpec
from highwater.pages.study_answer import study_answer
from highwater.search.budget import outlook, time_notes
from highwater.search.cell_outcomes import TrialFinished
from highwater.search.proof import ran_out_s, trial_s
from highwater.search.scheduler import recorded_search
from highwater.search.start_length import first_index
from highwater.store.journal import open_journal, read_study
from highwater.trials.simulated import Law
from places import examples, machine_with, script

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "find"
trials = script(RESULTS / "trials.py")


def found_with(
    question: Question, law: Law, path: Path, limit_s: float, *, slower: float = 1.0
) -> tuple[list[tuple[TrialSpec, TrialResult]], CellAnswer]:
    """The trials that ended, and the answer of the first cell as its study has it."""
    runner = trials.TimedRunner(question, law, trials.Clock(), timeout_s=limit_s, slower=slower)
    with open_journal(path, question) as journal:
        events = list(recorded_search(question, runner, journal, timeout_s=limit_s))
    study = read_study(path)
    assert not study.unproven, "trials bear the answer out"
    ended = [(e.spec, e.result) for e in events if isinstance(e, TrialFinished)]
    return ended, study.answers[0]


def in_full(timeout: str, **named: Any) -> Plan:
    words = {"model": "Qwen3-0.6B", "gpus": [1], "timeout": timeout, "max_length": "512k", **named}
    planned = plan(request_from(words, keywords=True), machine_with(1))
    assert planned.question.proof == "full"
    one = msgspec.structs.replace(planned.question, cells=planned.question.cells[:1])
    return msgspec.structs.replace(planned, question=one)


def holds(tokens: int) -> Law:
    return lambda s: Outcome.FIT if s.length_tokens <= tokens else Outcome.OUT_OF_MEMORY


def predicted_tokens(question: Question) -> int:
    return question.grid.length(first_index(question, question.cells[0], []) or 1)


@pytest.mark.parametrize("timeout", [100, 160, 400])
def test_the_published_command_begins_where_time_allows_and_begins_nothing_twice(tmp_path, timeout):
    words = ["--model_path", "Qwen3-0.6B", "--test_gpu_num", "2", "--test_sp_num", "2"]
    arguments = parse([*words, "--timeout", str(timeout), "--entropy_saving"])
    place: dict[str, str | int] = {"device": "cuda", "max_length": "16m"}
    request = request_of(arguments, settings_of(arguments, {}), place)
    planned = plan(request, machine_with(2))
    question, cell = planned.question, planned.question.cells[0]
    expected = predicted_tokens(question)
    assert (trial_s(question, question.trial(cell, expected)) or 0) > timeout
    ended, answer = found_with(question, holds(expected), tmp_path / "s.jsonl", timeout)
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
    planned = in_full("90s")
    question = planned.question
    found_with(question, holds(predicted_tokens(question)), tmp_path / "s.jsonl", 90)
    sentence = study_answer(read_study(tmp_path / "s.jsonl"))
    assert "take too long to tell" in sentence
    assert "ran out of memory" not in sentence


@example(limit_s=135, share=1.0, slower=1.0, method="bisect")
@given(
    limit_s=st.integers(60, 2400),
    share=st.floats(0.05, 1.5),
    slower=st.sampled_from([0.5, 0.8, 1.0, 1.3, 2.0]),
    method=st.sampled_from(["bisect", "linear"]),
)
@settings(max_examples=examples(40), deadline=None)
def test_nothing_predicted_to_be_late_starts_and_the_answer_is_what_was_seen(
    tmp_path_factory, limit_s, share, slower, method
):
    question = msgspec.structs.replace(in_full(f"{limit_s}s").question, method=method)
    capacity = int(share * predicted_tokens(question))
    path = tmp_path_factory.mktemp("limit") / "s.jsonl"
    ended, answer = found_with(question, holds(capacity), path, limit_s, slower=slower)
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
    if answer.limit == "memory":
        assert (answer.capacity_tokens or 0) == (
            question.grid.length(question.grid.index_at_most(capacity))
            if capacity >= question.grid.length(1)
            else 0
        )
    else:
        assert answer.limit == "time"
        assert answer.does_not_fit_tokens is None


def test_where_even_the_shortest_length_is_predicted_to_be_late_it_is_tried_once(tmp_path):
    question = in_full("60s", start_length="256k").question
    assert (trial_s(question, question.trial(question.cells[0], 262_144)) or 0) > 60
    ended, answer = found_with(question, holds(2**20), tmp_path / "late.jsonl", 60)
    assert [result.outcome for _, result in ended] == [Outcome.TIMEOUT]
    assert (answer.limit, answer.capacity_tokens) == ("time", None)
    # and where it ends in time after all, the others are judged by it
    ended, answer = found_with(question, holds(2**20), tmp_path / "s.jsonl", 60, slower=0.1)
    assert ended[0][1].outcome is Outcome.FIT
    assert (answer.capacity_tokens or 0) > 262_144


def test_a_length_that_is_predicted_not_to_fit_is_tried_where_running_out_takes_no_time(tmp_path):
    question = in_full("40m").question
    edge = first_index(question, question.cells[0], []) or 1
    grid, cell = question.grid, question.cells[0]
    at, beyond = (question.trial(cell, grid.length(i)) for i in (edge, edge + 1))
    limit_s = ((trial_s(question, at) or 0) + (trial_s(question, beyond) or 0)) / 2
    ended, answer = found_with(question, holds(grid.length(edge)), tmp_path / "s.jsonl", limit_s)
    assert (answer.limit, answer.capacity_tokens) == ("memory", grid.length(edge))
    assert len(ended) == 2


def test_a_late_trial_that_nobody_predicted_is_not_begun_again(tmp_path):
    question = msgspec.structs.replace(in_full("90s").question, device_name="a GPU of no rates")
    assert time_notes(question, 90) == ()
    law = holds(2**20)
    runner = trials.TimedRunner(in_full("90s").question, law, trials.Clock(), timeout_s=90)
    with open_journal(tmp_path / "s.jsonl", question) as journal:
        events = list(recorded_search(question, runner, journal, timeout_s=90))
    ended = [e for e in events if isinstance(e, TrialFinished)]
    assert Outcome.TIMEOUT in {each.result.outcome for each in ended}
    assert {each.attempt for each in ended} == {1}

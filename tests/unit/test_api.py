"""The Python interface: what the command line does, without the command line."""

import pytest

import highwater
from highwater.nouns.trial import Outcome
from highwater.search.cell_outcomes import CellAnswered, SearchEvent, TrialFinished


def test_a_search_from_python_answers_every_cell_and_can_be_followed(tmp_path):
    heard: list[SearchEvent] = []
    study = highwater.find(
        "Qwen3-0.6B",
        gpus=[1, 2],
        memory="80GiB",
        device="cuda",
        dry_run=True,
        study=str(tmp_path / "s.jsonl"),
        on_event=heard.append,
    )
    assert study.complete
    assert [event.answer for event in heard if isinstance(event, CellAnswered)] == list(
        study.answers
    )
    assert sum(isinstance(event, TrialFinished) for event in heard) == len(study.trials)
    assert highwater.open_study(tmp_path / "s.jsonl") == study


def test_one_trial_from_python():
    result = highwater.run_trial("Qwen3-0.6B", "8k", memory="80GiB", device="cuda", dry_run=True)
    assert result.outcome is Outcome.FIT
    assert result.simulated


def test_a_setting_that_does_not_exist_is_answered_with_the_nearest():
    with pytest.raises(highwater.HighwaterError) as refusal:
        highwater.find("Qwen3-0.6B", memoryy="80GiB")
    assert refusal.value.hint == "did you mean `memory`?"

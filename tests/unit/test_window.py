"""Sliding windows: lengths end where a layer would not attend to the whole document, and that is
said before anything starts.
"""

from pathlib import Path

import pytest
from places import NO_GPU, machine_with, write_model

from highwater import predict, recommend
from highwater.cli.search_context_length_capacity import place_of
from highwater.errors import UsageError
from highwater.spec.codec import from_builtins, to_builtins
from highwater.spec.model import load_model
from highwater.spec.plan import plan, plan_trial
from highwater.spec.request import request_from
from highwater.spec.study import Question

WINDOW = "m attends in a sliding window of as many tokens, and only full attention is supported"


@pytest.fixture
def mistral(tmp_path: Path) -> str:
    """A tiny model of Mistral's family, whose window is a quarter of its native length."""
    return str(
        write_model(
            tmp_path / "m", model_type="mistral", sliding_window=8192, max_position_embeddings=32768
        )
    )


def test_lengths_end_at_the_window_and_that_is_said(mistral: str) -> None:
    result = plan(request_from({"model": mistral}), machine_with(1))
    grid = result.question.grid
    assert [grid.length(index) for index in range(1, grid.size + 1)] == [4096, 8192]
    assert about_windows(result.notes) == [f"lengths end at 8,192: {WINDOW}"]


def test_a_prediction_ends_at_the_window_and_says_so(mistral: str) -> None:
    found = predict(mistral, gpus="1xH100-80GB", loss="chunked")
    assert {cell.capacity_tokens for cell in found.cells} == {8192}
    assert {cell.binding for cell in found.cells} == {"ceiling"}
    assert f"lengths end at 8,192: {WINDOW}" in found.notes


@pytest.mark.parametrize("flag", ["start_length", "max_length"])
def test_a_length_past_the_window_is_refused_with_one_that_works(mistral: str, flag: str) -> None:
    asked = {"model": mistral, flag: 16384}
    with pytest.raises(UsageError, match=r"16,384 .* window of 8,192") as refusal:
        plan(request_from(asked), machine_with(1))
    assert f"`--{flag.replace('_', '-')} 8192`" in refusal.value.hint
    plan(request_from({**asked, flag: 8192}), machine_with(1))


@pytest.mark.parametrize("exact", [False, True])
def test_so_is_a_predicted_length_before_anything_is_traced(mistral: str, exact: bool) -> None:
    with pytest.raises(UsageError, match="past the sliding window") as refusal:
        predict(mistral, gpus="1xH100-80GB", length="16k", exact=exact)
    assert "`--length 8192`" in refusal.value.hint
    assert predict(mistral, gpus="1xH100-80GB", length=8192).notes == ()


def test_so_are_one_trial_and_a_recommendation(mistral: str) -> None:
    with pytest.raises(UsageError, match="past the sliding window") as refusal:
        plan_trial(request_from({"model": mistral}), machine_with(1), 16384)
    assert "`--length 8192`" in refusal.value.hint
    assert plan_trial(request_from({"model": mistral}), machine_with(1), 8192).length_tokens == 8192
    with pytest.raises(UsageError, match="past the sliding window"):
        recommend(mistral, length=16384, gpus="1xH100-80GB")
    assert recommend(mistral, length=8192, gpus="1xH100-80GB").chosen


def test_documents_of_a_users_data_are_held_to_the_window_when_they_come_and_lengths_are_not(
    mistral: str,
) -> None:
    own = request_from({"model": mistral, "data": "batches:short"})
    assert plan_trial(own, machine_with(1), 16384).length_tokens == 16384
    result = plan(own, machine_with(1))
    assert result.question.grid.max_tokens == 1024**2
    assert about_windows(result.notes) == []


def test_a_trainer_with_windows_of_its_own_is_predicted_past_them(mistral: str) -> None:
    assert (
        predict(mistral, gpus="1xA100-80GB", length="16k", trainer="trinity")
        .cells[0]
        .capacity_tokens
        == 16384
    )


def test_a_window_beyond_every_length_changes_nothing(tmp_path: Path) -> None:
    windowed = str(write_model(tmp_path / "m", model_type="mistral", sliding_window=2 * 1024**2))
    grid = plan(request_from({"model": windowed}), machine_with(1)).question.grid
    assert grid.max_tokens == 1024**2
    assert about_windows(plan(request_from({"model": windowed}), machine_with(1)).notes) == []


def test_the_window_is_no_part_of_what_a_study_asks(mistral: str) -> None:
    """Studies from before layers were recorded are read, and have the keys that they had."""
    question = plan(request_from({"model": mistral}), machine_with(1)).question
    assert question.model.shape.window_tokens == 8192
    document = to_builtins(question)
    del document["model"]["shape"]["layer_runs"]
    before = from_builtins(document, Question)
    assert before != question
    assert before.key == question.key
    assert before.model.shape.window_tokens is None


def test_the_drop_in_command_searches_up_to_the_window(mistral: str) -> None:
    place = place_of(load_model(mistral), machine_with(1), start_tokens=4096)
    result = plan(request_from({"model": mistral, "rope": "yarn", **place}), machine_with(1))
    assert (result.question.grid.max_tokens, about_windows(result.notes)) == (
        8192,
        [f"lengths end at 8,192: {WINDOW}"],
    )
    assert place_of(load_model(mistral), NO_GPU, start_tokens=16384)["max_length"] == 8192


def about_windows(notes: tuple[str, ...]) -> list[str]:
    return [note for note in notes if "window" in note]

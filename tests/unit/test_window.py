"""Sliding windows: no length ends at one, and a ring that would share longer documents is refused
before anything starts, with a layout that works.
"""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater import predict, recommend
from highwater.cli.search_context_length_capacity import (
    parse,
    place_of,
    request_of,
    settings_of,
)
from highwater.errors import ModelError, UsageError
from highwater.model.model import load_model
from highwater.nouns.codec import from_builtins, to_builtins
from highwater.nouns.layout import SCORES_AT_HAND, stretch
from highwater.nouns.plan import plan, plan_trial
from highwater.nouns.request import Request, request_from
from highwater.nouns.study import Question
from places import NO_GPU, machine_with
from tiny_models import write_model

RING = r"a ring shares no document of 16,384 tokens .* window of 8,192"


@pytest.fixture
def mistral(tmp_path: Path) -> str:
    """A tiny model of Mistral's family, whose window is a quarter of its native length."""
    return str(
        write_model(
            tmp_path / "m", model_type="mistral", sliding_window=8192, max_position_embeddings=32768
        )
    )


def test_no_length_ends_at_a_window(mistral):
    result = plan(request_from({"model": mistral}), machine_with(1))
    assert result.question.grid.max_tokens == 1024**2
    assert about_windows(result.notes) == []
    assert predict(mistral, gpus="1xH100-80GB", loss="chunked").cells[0].capacity_tokens > 8192
    assert recommend(mistral, length=16384, gpus="1xH100-80GB").chosen
    spec = plan_trial(request_from({"model": mistral}), machine_with(1), 16384)
    assert spec.length_tokens == 16384


def test_a_ring_shares_documents_up_to_the_window(mistral):
    asked = {"model": mistral, "gpus": [2], "ring": [2]}
    within = plan(request_from({**asked, "max_length": 8192}), machine_with(2))
    assert {cell.layout.ring_degree for cell in within.question.cells} == {2}
    assert plan_trial(request_from(asked), machine_with(2), 8192).layout.ring_degree == 2


def test_a_ring_of_longer_documents_is_refused_and_the_hint_works(mistral):
    asked = {"model": mistral, "gpus": [2], "ring": [2], "max_length": 16384}
    with pytest.raises(UsageError, match=RING) as refusal:
        plan(request_from(asked), machine_with(2))
    assert "`--ulysses 2 --ring 1`" in refusal.value.hint
    mended = plan(request_from({**asked, "ulysses": [2], "ring": [1]}), machine_with(2))
    assert mended.question.cells
    with pytest.raises(UsageError, match=RING):
        plan_trial(request_from({**asked, "max_length": None}), machine_with(2), 16384)


@pytest.mark.parametrize("exact", [False, True])
def test_so_is_a_predicted_one_before_anything_is_traced(mistral, exact):
    with pytest.raises(UsageError, match=RING) as refusal:
        predict(mistral, gpus="2xH100-80GB", ring=[2], length="16k", exact=exact)
    assert "`--ulysses 2 --ring 1`" in refusal.value.hint
    with pytest.raises(UsageError, match=RING):
        recommend(mistral, gpus="2xH100-80GB", ring=[2], length=16384)


def test_one_layout_of_several_is_skipped_and_that_is_said(mistral):
    asked = {"model": mistral, "gpus": [2], "ring": [1, 2], "max_length": 16384}
    result = plan(request_from(asked), machine_with(2))
    assert {cell.layout.ring_degree for cell in result.question.cells} == {1}
    assert len(about_windows(result.notes)) == 1


def test_no_ring_is_offered_that_would_be_refused(tmp_path):
    """Three GPUs, between which two key heads cannot be divided."""
    sizes = {"max_position_embeddings": 32768, "num_attention_heads": 8, "num_key_value_heads": 2}
    windowed, full = (
        str(write_model(tmp_path / name, model_type=name, sliding_window=8192, **sizes))
        for name in ("mistral", "llama")
    )
    notes = [predict(m, gpus="3xH100-80GB", length=16384).notes for m in (windowed, full)]
    assert [any("--ring" in note for note in each) for each in notes] == [False, True]


def test_capped_scores_are_refused_in_a_ring_alone(tmp_path):
    """With a hint that works: heads are traded."""
    gemma = str(write_model(tmp_path / "g", model_type="gemma2"))
    asked = {"model": gemma, "gpus": [2], "ring": [2], "max_length": 4096}
    for request in (asked, {**asked, "data": "batches:short"}):
        with pytest.raises(UsageError, match="does not cap the scores") as refusal:
            plan(request_from(request), machine_with(2))
        assert "`--ulysses 2 --ring 1`" in refusal.value.hint
    assert plan(request_from({**asked, "ulysses": [2], "ring": [1]}), machine_with(2)).question
    assert plan(request_from({"model": gemma, "proof": "memory"}), machine_with(1)).question
    memory_only = request_from({"model": gemma, "attention_depth": 1})
    assert plan_trial(memory_only, machine_with(1), 4096).is_memory_only
    uncapped = str(write_model(tmp_path / "u", model_type="gemma2", attn_logit_softcapping=None))
    assert load_model(uncapped).shape.caps_scores, "what is left out is as the class has it"
    with pytest.raises(ModelError, match="attn_logit_softcapping is 0"):
        load_model(str(write_model(tmp_path / "z", model_type="gemma2", attn_logit_softcapping=0)))


def test_models_of_capped_scores_are_predicted(tmp_path):
    sizes = {"hidden_size": 2048, "head_dim": 256, "num_hidden_layers": 24}
    gemma = str(write_model(tmp_path / "g", model_type="gemma2", **sizes))
    shared = predict(gemma, gpus="2xH100-80GB", ulysses=[2], rope="yarn")
    alone = predict(gemma, gpus="1xH100-80GB", rope="yarn")
    capacities = [found.cells[0].capacity_tokens for found in (alone, shared)]
    assert 4096 < capacities[0] < capacities[1]
    assert recommend(gemma, length=4096, gpus="1xH100-80GB").chosen


@given(st.integers(1, 10**6), st.one_of(st.none(), st.integers(1, 10**6)), st.integers(1, 2**20))
def test_plain_attention_has_room_for_its_scores(tokens, window, heads):
    rows, keys = stretch(tokens, window, heads)
    assert rows * keys * heads <= SCORES_AT_HAND or rows == 1
    assert 1 <= rows <= tokens
    assert keys <= tokens
    assert keys >= min(tokens, window or tokens), "a row reads all of its window"


def test_documents_of_a_users_data_are_held_to_a_window_when_they_come(mistral):
    own = request_from({"model": mistral, "data": "batches:short", "gpus": [2], "ring": [2]})
    assert plan_trial(own, machine_with(2), 16384).length_tokens == 16384
    assert about_windows(plan(own, machine_with(2)).notes) == []


def test_the_window_is_no_part_of_what_a_study_asks(mistral):
    """Studies from before layers were recorded are read, and have the keys that they had."""
    question = plan(request_from({"model": mistral}), machine_with(1)).question
    assert question.model.shape.window_tokens == 8192
    document = to_builtins(question)
    del document["model"]["shape"]["layer_runs"]
    before = from_builtins(document, Question)
    assert before != question
    assert before.key == question.key
    assert before.model.shape.window_tokens is None


def test_the_drop_in_command_searches_past_the_window(mistral):
    place = place_of(load_model(mistral), machine_with(1), drop_in(mistral))
    result = plan(request_from({"model": mistral, "rope": "yarn", **place}), machine_with(1))
    assert result.question.grid.max_tokens == 16 * 1024**2
    asked = drop_in(mistral, "--start_length", "16384")
    place = place_of(load_model(mistral), NO_GPU, asked, starts=True)
    assert place["max_length"] == 16384


def drop_in(model: str, *words: str) -> Request:
    arguments = parse(["--model_path", model, "--test_gpu_num", "1", *words])
    return request_of(arguments, settings_of(arguments, {}), {})


def about_windows(notes: tuple[str, ...]) -> list[str]:
    return [note for note in notes if "window" in note]

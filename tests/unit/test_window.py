"""Sliding windows: no length ends at one."""

import shlex
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater import predict, recommend
from highwater.cli.search_context_length_capacity import parse, place_of, request_of, settings_of
from highwater.errors import ModelError, UsageError
from highwater.model.model import load_model
from highwater.nouns.cells import cells_of
from highwater.nouns.codec import from_builtins, to_builtins
from highwater.nouns.layout import SCORES_AT_HAND, stretch
from highwater.nouns.plan import plan, plan_trial
from highwater.nouns.request import Request, request_from
from highwater.nouns.study import Question
from places import NO_GPU, machine_with
from tables import deep, table
from tiny_models import write_model, written_model

RING = r"a ring shares no document of 16,384 tokens .* window of 8,192"


@pytest.fixture
def mistral(tmp_path: Path) -> str:
    """A tiny model of Mistral's family, whose window is a quarter of its native length."""
    sizes = {"sliding_window": 8192, "max_position_embeddings": 32768}
    return str(write_model(tmp_path / "m", model_type="mistral", **sizes))


def test_no_length_ends_at_a_window(mistral):
    result = plan(request_from({"model": mistral}), machine_with(1))
    assert result.question.grid.max_tokens == 1024**2
    assert about_windows(result.notes) == []
    assert predict(mistral, gpus="1xH100-80GB", loss="chunked").cells[0].capacity_tokens > 8192
    assert recommend(mistral, length=16384, gpus="1xH100-80GB").chosen
    spec = plan_trial(request_from({"model": mistral}), machine_with(1), 16384)
    assert spec.length_tokens == 16384


def test_a_ring_shares_documents_up_to_the_window_and_refuses_longer_ones(mistral):
    asked = {"model": mistral, "gpus": [2], "ring": [2]}
    within = plan(request_from({**asked, "max_length": 8192}), machine_with(2))
    assert {cell.layout.ring_degree for cell in within.question.cells} == {2}
    assert plan_trial(request_from(asked), machine_with(2), 8192).layout.ring_degree == 2
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


def test_a_ring_that_would_be_refused_is_skipped_and_never_offered(mistral, tmp_path):
    asked = {"model": mistral, "gpus": [2], "ring": [1, 2], "max_length": 16384}
    result = plan(request_from(asked), machine_with(2))
    assert {cell.layout.ring_degree for cell in result.question.cells} == {1}
    assert len(about_windows(result.notes)) == 1
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
        written_model(tmp_path / "z", model_type="gemma2", attn_logit_softcapping=0)


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


(MOST,) = deep(8) or (6,)
"""The most of each number that is asked for."""
MODEL = "Qwen3-8B"
SHAPE = load_model(MODEL).shape


def refusal_of(gpus: int, **settings: Any) -> str | None:
    """The hint of a layout that cannot be; None where it can."""
    request = request_from({"model": MODEL, "gpus": [gpus], **settings})
    try:
        cells, _ = cells_of(request, SHAPE, "cuda", (gpus,))
    except UsageError as refused:
        return refused.hint
    assert all(cell.layout.gpus == gpus for cell in cells)
    return None


def offered(hint: str) -> list[dict[str, Any]]:

    def settings(words: list[str]) -> dict[str, Any]:
        named = zip(words[::2], words[1::2], strict=True)
        typed = {flag.removeprefix("--"): value for flag, value in named}
        return {name: [int(n)] if n.isdecimal() else n for name, n in typed.items()}

    return [settings(shlex.split(flags)) for flags in hint.split("`")[1::2]]


@pytest.mark.parametrize("gpus", range(1, MOST + 1))
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_every_layout_that_a_hint_names_can_be(gpus, strategy):
    for ulysses, ring, copies in product(range(1, MOST + 1), repeat=3):
        asked = {"ulysses": [ulysses], "ring": [ring], "copies": [copies]}
        hint = refusal_of(gpus, strategy=strategy, **asked)
        if hint is not None:
            ways = offered(hint)
            assert ways
            for way in ways:
                assert refusal_of(gpus, strategy=strategy, **(asked | way)) is None, (asked, way)


@pytest.mark.parametrize(
    ("asked", "nearest"), table("window", "the_first_layout_that_is_named_is_the_nearest")
)
def test_the_first_layout_that_is_named_is_the_nearest_on_as_many_gpus(asked, nearest):
    hint = refusal_of(6, **({"strategy": "fsdp2"} | asked))
    assert hint is not None
    assert offered(hint)[0] == nearest


def test_of_several_numbers_one_that_is_kept_works_with_what_the_hint_changes():
    for counts, copies in product(([4, 6], [6, 8], [3, 5]), ([1, 4], [3, 4], [5])):
        asked = {"gpus": counts, "ulysses": [5, 7], "copies": copies, "strategy": "fsdp2"}
        with pytest.raises(UsageError) as refused:
            cells_of(request_from({"model": MODEL, **asked}), SHAPE, "cuda", tuple(counts))
        for way in offered(refused.value.hint or ""):
            changed = request_from({"model": MODEL, **(asked | way)})
            assert cells_of(changed, SHAPE, "cuda", tuple(counts))[0]

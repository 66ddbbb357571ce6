"""``find`` and ``predict`` answer one question alike: the cells, and every number that both print;
and of all settings that are predicted the simplest, the longest and the frontier are shown.
"""

import re
import runpy
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import highwater
from highwater.errors import HighwaterError
from highwater.memory.capacity import Prediction
from highwater.nouns.cells import simplicity
from highwater.nouns.study import Study
from highwater.nouns.trial import Outcome
from highwater.pages.prediction_tables import prediction_answer, prediction_table
from highwater.pages.study_answer import answer_table, study_answer
from highwater.pages.table import TextTable, plain_table
from tables import deep

AGREEMENT = runpy.run_path(
    str(Path(__file__).parents[2] / "docs" / "results" / "questions" / "agreement.py")
)
"""The recorded questions: what may be asked, and what the text of an answer says."""
NAMED = (
    *({"ulysses": [1]}, {"loss": "chunked"}, {"loss": "full"}, {"offload": True}, {"ring": [2]}),
    *({"offload": False}, {"allocator": "native"}, {"allocator": "expandable"}, {"copies": [2]}),
    *({"activations": "gpu"}, {"activations": "host"}, {"recompute": "all-but-attention"}),
)
"""One of what a search chooses itself."""
(QUESTIONS,) = deep(AGREEMENT["COUNT"]) or (16,)


def found(model: str, memory: str, gpus: int, **named: Any) -> Study:
    return highwater.find(model, gpus=[gpus], device="cuda", memory=memory, dry_run=True, **named)


def check_alike(study: Study, prediction: Prediction) -> None:
    predicted, best = {each.cell: each for each in prediction.cells}, prediction.answer
    for answer in study.answers:
        known = predicted[answer.cell]
        is_tight = best is None or not best.capacity_tokens
        reach = known.likely_edge_tokens if is_tight else known.capacity_tokens
        assert answer.capacity_tokens == reach, answer.cell.label
        if known.capacity_tokens:
            assert answer.headroom_bytes == known.headroom_bytes
            assert answer.does_not_fit_tokens == known.does_not_fit_tokens
    longest = max(answer.reach_tokens or 0 for answer in study.answers)
    assert longest == (best.capacity_tokens or best.likely_edge_tokens if best else 0)
    if not is_tight:
        check_texts_alike(
            page(study_answer(study), answer_table(study)),
            page(prediction_answer(prediction), prediction_table(prediction, is_whole=True)),
        )


def page(first_line: str, table: TextTable) -> str:
    return f"{first_line}\n\n{plain_table(table)}"


def check_texts_alike(found: str, predicted: str) -> None:
    """Every row of a search's table is one of the prediction's, and the first lines agree."""
    rows, every = (AGREEMENT["rows_of"](text) for text in (found, predicted))
    assert {name: every.get(name) for name in rows} == rows
    first, other = (AGREEMENT["sentence"](text.splitlines()[0]) for text in (found, predicted))
    both = first.keys() & other.keys()
    assert "longest" in both
    assert {name: first[name] for name in both} == {name: other[name] for name in both}


@pytest.mark.timeout(3600)  # 200 questions, where HIGHWATER_DEEP is set
@settings(deadline=None, max_examples=QUESTIONS, phases=(Phase.explicit, Phase.generate))
@given(  # a shrunk one is no clearer
    model=st.sampled_from(AGREEMENT["MODELS"]),
    memory=st.sampled_from(AGREEMENT["MEMORIES"]),
    gpus=st.sampled_from(AGREEMENT["COUNTS"]),
    lora=st.sampled_from(AGREEMENT["LORAS"]),
    objective=st.sampled_from(AGREEMENT["OBJECTIVES"]),
    more=st.sampled_from([{}, *NAMED]),
)
def test_a_dry_run_and_a_prediction_agree_on_every_number_that_both_print(
    model, memory, gpus, lora, objective, more
):
    named = {"objective": objective, **({} if lora is None else {"lora": lora}), **more}
    try:
        prediction = highwater.predict(model, gpus=gpus, gpu_memory=memory, **named)
    except HighwaterError as refused:
        with pytest.raises(HighwaterError, match=re.escape(refused.problem)):
            found(model, memory, gpus, **named)
    else:
        check_alike(found(model, memory, gpus, **named), prediction)


@pytest.mark.parametrize(
    ("model", "gpus", "length", "named"),
    [
        ("Qwen3-8B", 4, "32k", {}),
        ("Qwen3-8B", 4, "72k", {}),
        ("Qwen3-8B", 8, "256k", {"ulysses": [8], "loss": "chunked", "offload": "states"}),
        ("Llama-3.1-8B", 1, "64k", {"lora": 16, "activations": "host"}),
        ("Qwen3-0.6B", 2, "16k", {"objective": "dpo"}),
        ("Llama-3.1-70B", 8, "32k", {}),
    ],
)
def test_one_trial_of_a_dry_run_says_what_is_predicted_of_its_length(model, gpus, length, named):
    rung = {"allocator": "native", "loss": "full", "offload": False, "activations": "gpu"}
    rung |= {"ulysses": [1], **named}
    if rung["offload"] or rung["activations"] == "host":
        rung["allocator"] = "expandable"
    on = {"gpus": [gpus], "device": "cuda", "memory": "80GiB", "dry_run": True}
    trial = highwater.run_trial(model, length, **on, **rung)
    prediction = highwater.predict(model, gpus=gpus, gpu_memory="80GiB", length=length, **rung)
    (cell,) = prediction.cells
    assert (trial.outcome is Outcome.FIT) == (cell.capacity_tokens > 0 or cell.risk == "tight")
    if trial.outcome is Outcome.FIT:
        assert trial.headroom_bytes == cell.headroom_bytes


@pytest.mark.parametrize(
    ("model", "gpus"), [("Qwen3-8B", 4), ("Qwen3-8B", 8), ("Llama-3.1-70B", 8), ("gemma-2-9b", 2)]
)
def test_a_search_tries_the_simplest_and_the_longest_and_names_the_flags_of_the_rest(model, gpus):
    study = found(model, "80GiB", gpus)
    prediction = highwater.predict(model, gpus=gpus, gpu_memory="80GiB")
    ends = {prediction.simplest.cell, prediction.explained.cell}
    assert set(study.question.cells) == ends
    (note,) = (note for note in study.notes if "--ulysses" in note)
    assert f"{len(prediction.cells) - len(ends)} other settings are not tried" in note
    check_alike(study, prediction)


@pytest.mark.parametrize("named", NAMED, ids=str)
def test_a_search_that_names_a_setting_tries_the_ends_of_what_is_left(named):
    study = found("Qwen3-8B", "80GiB", 2, **named)
    prediction = highwater.predict("Qwen3-8B", gpus=2, gpu_memory="80GiB", **named)
    assert {*study.question.cells} == {prediction.simplest.cell, prediction.explained.cell}
    check_alike(study, prediction)


def test_a_search_of_several_degrees_tries_the_ends_of_each():
    ends = set()
    for ulysses in (1, 2):
        one = highwater.predict("Qwen3-8B", gpus=2, gpu_memory="80GiB", ulysses=[ulysses])
        ends |= {one.simplest.cell, one.explained.cell}
    study = found("Qwen3-8B", "80GiB", 2, ulysses=[1, 2])
    assert {*study.question.cells} == ends
    check_alike(study, highwater.predict("Qwen3-8B", gpus=2, gpu_memory="80GiB", ulysses=[1, 2]))


def test_a_search_that_leaves_nothing_open_has_the_grid_as_it_is_named():
    every = {"allocator": "native", "loss": "full", "offload": False, "activations": "gpu"}
    study = found("Qwen3-8B", "80GiB", 2, **every, ulysses=[1, 2])
    assert [cell.layout.ulysses_degree for cell in study.question.cells] == [1, 2]
    assert not study.notes or not any("are not tried" in note for note in study.notes)


def test_a_study_is_gone_on_with_as_it_began_and_another_question_is_not(tmp_path):
    file = str(tmp_path / "study.jsonl")
    began = found("Qwen3-8B", "80GiB", 2, ulysses=[1], study=file)
    again = found("Qwen3-8B", "80GiB", 2, study=file)
    assert again.question.cells == began.question.cells
    with pytest.raises(HighwaterError):
        found("Qwen3-8B", "80GiB", 2, lora=8, study=file)


@pytest.mark.parametrize(
    ("model", "gpus"),
    [("Qwen3-8B", "4xA100-80GB"), ("Llama-3.1-8B", "2xH100-80GB"), ("Qwen3-0.6B", "8xH200-141GB")],
)
def test_the_simplest_settings_of_the_native_length_come_first_and_are_the_first_that_train_it(
    model, gpus
):
    prediction = highwater.predict(model, gpus=gpus)
    simplest, native = prediction.native, prediction.native_length_tokens
    assert simplest is not None
    assert simplest.capacity_tokens == native
    assert prediction_answer(prediction).startswith(f"{model} trains its native {native:,} tokens")
    for each in prediction.cells:
        if simplicity(each.cell) < simplicity(simplest.cell):
            assert each.capacity_tokens < native


def test_no_native_length_is_said_to_train_where_none_does():
    prediction = highwater.predict("Llama-3.1-8B", gpus="RTX-4090", lora=16, activations="gpu")
    assert prediction.native is None
    assert prediction_answer(prediction).startswith("Llama-3.1-8B trains up to ")
    assert prediction.simplest.capacity_tokens


@pytest.mark.parametrize(
    ("gpus", "named", "is_least", "factor"),
    [
        ("8xA100-80GB", {}, True, 25.5),
        ("4xA100-80GB", {"activations": "gpu"}, False, 18.25),
        ("4xA100-80GB", {"max_length": "64k"}, True, 1.5),
        ("8xA100-80GB", {"max_length": 40_960}, False, None),
    ],
)
def test_the_longest_is_marked_where_the_search_ends_it_and_says_how_far_yarn_stretches(
    gpus, named, is_least, factor
):
    prediction = highwater.predict("Qwen3-8B", gpus=gpus, **named)
    said = prediction_answer(prediction)
    assert ("The longest is ≥" in said) == is_least
    assert prediction.yarn_factor == factor
    assert ("published models go up to 8" in said) == (factor is not None)


@pytest.mark.parametrize(
    ("model", "gpus"),
    [("Qwen3-8B", "4"), ("Qwen3-8B", "8xA100-80GB"), ("Qwen3-0.6B", "8xH200-141GB")],
)
def test_a_table_has_the_frontier_and_whole_every_setting(model, gpus):
    memory = {"gpu_memory": "80GiB"} if gpus.isdecimal() else {}
    prediction = highwater.predict(model, gpus=gpus, **memory)
    assert len(prediction_table(prediction, is_whole=True).rows) == len(prediction.cells)
    assert len(prediction_table(prediction).rows) <= 8
    kept = [each for each in prediction.cells if each.is_on_frontier]
    reached = [each.capacity_tokens for each in kept]
    assert max(reached) == prediction.explained.capacity_tokens
    assert len(set(reached)) == len(reached), "of equally long ones one is enough"


def test_a_prediction_of_before_has_every_cell_on_its_frontier():
    prediction = highwater.predict("Qwen3-0.6B", gpus="H100-80GB")
    old = msgspec.to_builtins(prediction)
    for cell in old["cells"]:
        cell.pop("is_on_frontier", None)
    for name in ("native", "yarn_factor"):
        old.pop(name, None)
    again = msgspec.convert(old, Prediction)
    assert all(each.is_on_frontier for each in again.cells)

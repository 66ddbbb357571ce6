"""The sentence that an answer begins with, whose every number is the answer's."""

import re
import runpy
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from studies import CELL, QUESTION, REAL, trial

import highwater
from highwater import recommend
from highwater.errors import HighwaterError
from highwater.memory.capacity import Prediction
from highwater.nouns.capacities import simplest, study_capacities
from highwater.nouns.cells import simplicity
from highwater.nouns.study import MemoryOnlyFit, Study
from highwater.nouns.trial import Outcome
from highwater.pages.prediction_tables import (
    in_lines,
    prediction_answer,
    prediction_table,
    recommendation_answer,
)
from highwater.pages.study_answer import answer_table, study_answer
from highwater.pages.table import TextTable, plain_table
from highwater.store.journal import read_study
from highwater.trials.simulated import SimulatedRunner
from highwater.units import format_bytes, format_tokens
from places import FOUND, RESULTS, ROOT, question_of
from tables import deep, table
from trial_specs import answer_of, study_found


def test_the_native_length_comes_first_and_then_the_longest_with_what_is_left():
    found = highwater.predict("Qwen3-4B", gpus="1xH100-80GB")
    best = max(found.cells, key=lambda cell: cell.capacity_tokens)
    said = prediction_answer(found)
    longest = format_tokens(best.capacity_tokens)
    assert said.startswith(
        f"Qwen3-4B trains its native 40,960 tokens (longest: {longest}) on 1 x H100-80GB: "
    )
    settings = "expandable segments, a chunked loss, the layers' activations in host memory"
    assert f"The longest is {format_tokens(best.capacity_tokens)} tokens with {settings}" in said
    assert format_bytes(best.footprint.host_bytes) in said
    assert f"{format_bytes(best.headroom_bytes)} of each GPU left" in said
    assert f" {best.step.tokens_per_s:,.0f} tokens/s, " in said.partition("longest")[2]
    on_gpu = max(c.capacity_tokens for c in found.cells if not c.cell.settings.uses_host)
    assert said.endswith(f" On the GPUs alone: {format_tokens(on_gpu)}.")


def test_at_one_length_it_is_yes_with_the_simplest_settings():
    found = highwater.predict("Qwen3-8B", gpus="4xA100-80GB", length="64k")
    first = next(cell for cell in found.cells if cell.capacity_tokens)
    said = prediction_answer(found)
    native = "65,536 tokens (1.6 x native 40,960)"
    assert said.startswith(f"Yes: Qwen3-8B trains {native} on 4 x A100-80GB: safe, ")
    assert " left, about " in said.partition(". With ")[0]
    assert ("expandable segments" in said) == (first.cell.settings.allocator == "expandable")


@pytest.mark.parametrize(("model", "gpus", "asked"), table("answer_sentence", "first_lines"))
def test_the_first_line_is_a_sentence_and_the_rest_has_lines_of_its_own(model, gpus, asked):
    said = prediction_answer(highwater.predict(model, gpus=gpus, **asked))
    first, *rest = in_lines(said).splitlines()
    most = 41 if "rollout" in asked else 30  # the share of vLLM that nobody typed takes 11 words
    assert len(first.split()) <= most
    assert rest
    assert " ".join((first, *rest)) == said
    assert all(
        each.startswith(("With ", "The longest ", "What would fit", "Nearest is")) for each in rest
    )


def test_where_nothing_fits_it_is_no_and_what_the_nearest_lacks():
    found = highwater.predict("Qwen3-32B", gpus="1xH100-80GB", length="64k", offload=False)
    assert not any(cell.capacity_tokens for cell in found.cells)
    least = -max(cell.headroom_bytes for cell in found.cells)
    said = prediction_answer(found)
    native = "65,536 tokens (1.6 x native 40,960)"
    assert said.startswith(f"No: Qwen3-32B does not train at {native} on 1 x H100-80GB")
    assert said.endswith(f"lacks {format_bytes(least)} of each GPU.")
    everywhere = prediction_answer(highwater.predict("Qwen3-32B", gpus="1xRTX-3090", offload=False))
    assert everywhere.startswith("No: Qwen3-32B does not train at 4,096 tokens or more")


@pytest.mark.parametrize(("asked", "words"), table("answer_sentence", "settings_are_said_in_words"))
def test_settings_are_said_in_words(asked, words):
    plain = {"gpus": "1xH200-141GB", "loss": "full", "allocator": "native"}
    found = highwater.predict("Qwen3-0.6B", length=4096, **plain | asked)
    assert words in prediction_answer(found)


@pytest.mark.parametrize(
    ("asked", "first"), table("answer_sentence", "what_pytorch_tried_to_allocate_comes_first")
)
def test_what_pytorch_tried_to_allocate_comes_first(asked, first):
    said = prediction_answer(highwater.predict(gpus="A100-80GB", lora=16, **asked))
    assert said.splitlines()[0] == first
    assert len(first.split()) <= 30


def test_the_file_of_a_trainer_that_counts_a_gpus_tokens_has_them_by_its_own_fields():
    found = recommend("Qwen3-4B", gpus="4xH100-80GB", length="32k", trainer="trinity")
    degree, tokens = found.chosen.cell.layout.ulysses_degree, found.chosen.token_budget_tokens
    second = in_lines(recommendation_answer(found, "verl")).splitlines()[1]
    assert second.startswith("In its file `use_dynamic_bsz` is true, ")
    assert f"size` is {degree}, and `ppo_max_token_len_per_gpu` {tokens}." in second


def test_attention_is_said_to_be_fused_where_a_trainers_own_choice_is_eager():
    asked = {"gpus": "2xA100-40GB", "length": "8k", "lora": 16, "trainer": "trl"}
    found = highwater.predict("gemma-2-9b-it", **asked)
    second = in_lines(prediction_answer(found)).splitlines()[1]
    assert second.startswith("Attention is taken as flash_attention_2; ")
    assert f" {format_bytes(2 * 16 * 8192**2)} in bfloat16 at 8,192 tokens" in second
    assert recommend("gemma-2-9b-it", **asked).assumed == found.assumed
    assert not highwater.predict("Qwen3-4B", **asked).assumed
    windows = highwater.predict("Mistral-7B-v0.1", **asked | {"trainer": "llamafactory"}).assumed
    assert windows.endswith("a mask of length x length, 64.0 MiB at 8,192 tokens")


@pytest.mark.parametrize(
    ("asked", "ended"), table("answer_sentence", "the_one_thing_that_ends_it_stands_after_the_no")
)
def test_the_one_thing_that_ends_it_stands_after_the_no(asked, ended):
    any_length = {name: value for name, value in asked.items() if name != "length"}
    longest, found = highwater.predict(**any_length), highwater.predict(**asked)
    both = prediction_answer(found, longest=longest), recommendation_answer(recommend(**asked))
    for first in (in_lines(said).splitlines()[0] for said in both):
        where, _, said = first.partition(f" on {found.gpus} x {found.device_name}")
        assert where.startswith("No: ")
        by = r"( for TRL 1.16| for \S+ ?\S* trainer)?"
        assert re.match(rf"{by}{re.escape(ended)}(, [\d.]+ GiB short)?(; .*)?\. Predicted", said), (
            first
        )


def test_safe_is_what_leaves_the_margin_and_was_not_measured():
    asked = {"length": "150k", "headroom": "30GiB", "offload": False}
    found = highwater.predict("Qwen3-8B", gpus="4xA100-80GB", **asked)
    fits = [row[2] for row in prediction_table(found, is_whole=True).rows]
    for cell, said in zip(found.cells, fits, strict=True):
        assert (said == "safe") == bool(cell.capacity_tokens)
    assert prediction_answer(found).startswith("No: ") == ("safe" not in fits)
    study = ROOT / "docs/results/find/qwen3-4b-card-full.jsonl"
    found = recommend("Qwen3-4B", gpus="1xH200-141GB", length="128k", studies=[study])
    assert (found.chosen.source, found.chosen.risk) == ("measured", None)
    said = recommendation_answer(found)
    assert said.startswith("Yes: ")
    assert ": 309.1 MiB of each GPU left" in said
    assert ". Measured. With " in said


_LENGTH = re.compile(r"\d{1,3}(?:,\d{3})+(?! tokens/s)")


def answered(**changes: Any) -> Study:
    usual = {"fits": 65_536, "fails": 69_632, "headroom_bytes": 3 * 2**30, "tokens_per_s": 12_345.6}
    return Study(question=QUESTION, answers=(answer_of(CELL, **usual | changes),))


def test_what_was_trained_comes_first_and_is_all_that_is_said_to_be():
    assert study_answer(answered()) == (
        "Qwen3-0.6B trains up to 65,536 tokens on 1 x simulated GPU with 80.00 GiB, measured, with "
        "expandable segments, a chunked loss and YaRN. 3.00 GiB of each GPU is left; "
        "12,346 tokens/s; 69,632 ran out of memory."
    )
    proof = MemoryOnlyFit(length_tokens=131_072, peak_reserved_bytes=2**36, headroom_bytes=2**30)
    said = study_answer(answered(memory_only=proof, fails=135_168))
    assert said.startswith("Memory holds Qwen3-0.6B at 131,072 tokens on ")
    assert "by memory-only trials" in said
    assert "; trained in full was 65,536, at 12,346 tokens/s." in said
    assert "1.00 GiB of each GPU is left; 135,168 ran out of memory." in said
    assert "no length was trained in full" in study_answer(answered(memory_only=proof, fits=None))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fits": 0, "fails": 4096}, "No: Qwen3-0.6B does not train at "),
        ({"fits": None, "limit": "inconclusive"}, "Not known yet: no trial"),
        ({"fails": None, "limit": "ceiling"}, "Qwen3-0.6B trains up to 65,536 "),
        ({"fails": None, "limit": "time"}, "Qwen3-0.6B trains up to 65,536 "),
    ],
)
def test_every_end_of_a_search_has_its_words(changes, said):
    assert study_answer(answered(**changes)).startswith(said)


def test_an_unfinished_search_says_between_which_lengths_it_is():
    trials = (trial(40_960, Outcome.FIT), trial(61_440, Outcome.OUT_OF_MEMORY))
    said = study_answer(msgspec.structs.replace(answered(), trials=trials, answers=()))
    assert said.startswith("Qwen3-0.6B fits at 40,960 tokens, and does not at 61,440, on ")
    assert said.endswith("the search in between is not finished.")


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_every_figure_of_a_recorded_study_is_one_of_its_own(path):
    study = read_study(path)
    said = study_answer(study)
    lengths = {format_tokens(each.spec.length_tokens) for each in study.trials}
    assert set(_LENGTH.findall(said)) <= lengths
    assert len(set(_LENGTH.findall(said))) >= 1
    ended = [each for each in study.trials if each.result is not None]
    longest = max(each.spec.length_tokens for each in ended if each.result.outcome.is_fit)
    assert format_tokens(longest) in said


def test_a_search_ended_at_its_edge_knows_both_sides_and_at_its_ceiling_one():
    study = highwater.open_study(FOUND / "edge-4b-1-chunked-offload.jsonl")
    assert not study.answers
    in_full, memory_only = study_capacities(study)
    assert (in_full.capacity_tokens, memory_only.capacity_tokens) == (8_192, 286_720)
    assert in_full.does_not_fit_tokens == memory_only.does_not_fit_tokens == 294_912
    assert memory_only.fits(286_720)
    assert memory_only.fits(290_000) is None
    assert memory_only.fits(294_912) is False
    (found,) = study_capacities(highwater.open_study(FOUND / "qwen3-0.6b-79gib-chunked.jsonl"))
    assert (found.capacity_tokens, found.does_not_fit_tokens) == (262_144, None)


def test_a_length_whose_own_trial_ran_out_of_memory_does_not_fit_whatever_longer_ones_did():
    study = highwater.open_study(FOUND / "qwen3-0.6b-79gib-full.jsonl")
    ended = [each for each in study.trials if each.result is not None]
    failed = next(each for each in ended if each.result.outcome is Outcome.OUT_OF_MEMORY)
    at_8192 = msgspec.structs.replace(failed.spec, length_tokens=8192)
    again = msgspec.structs.replace(failed, spec=at_8192)
    found = study_capacities(msgspec.structs.replace(study, trials=(*study.trials, again)))
    (odd,) = (each for each in found if each.odd_tokens)
    assert (odd.fits(8192), odd.fits(8193), odd.fits(10**6)) == (False, True, False)
    named = [simplest(found, length) for length in (4096, 8192, 12288)]
    other = "Env" if failed.spec.settings.label == "vanilla" else "vanilla"
    assert [each and each.cell.settings.label for each in named] == ["vanilla", other, "vanilla"]


def test_with_a_token_budget_nobody_knows_of_lengths_that_pack_more_than_what_fit():
    grid = {"start_length": 4096, "resolution": 4096, "max_length": 65_536}
    question = question_of(token_budget=65_536, loss="full", allocator="native", **grid)
    law = 40_960
    outcomes = (Outcome.OUT_OF_MEMORY, Outcome.FIT)
    runner = SimulatedRunner(lambda spec: outcomes[spec.length_tokens * spec.sequences <= law])
    study = study_found(question, runner)
    (found,) = study_capacities(study)
    assert (found.capacity_tokens, found.does_not_fit_tokens) == (40_960, 45_056)
    tried = {trial.spec.length_tokens for trial in study.trials}
    for length in range(4096, 65_537, 4096):
        packed = length * (65_536 // length)
        told = found.fits(length)
        assert told in (None, packed <= law)
        assert told is not None or length not in tried
    assert found.fits(4096) is None, "16 sequences of it are 65,536 tokens"
    assert any("may pack more tokens" in note for note in answer_table(study).footnotes)


AGREEMENT = runpy.run_path(str(RESULTS / "questions" / "agreement.py"))
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
@example(  # experts go in tiles from 32,769 tokens on, which take less than those below
    model="Qwen3-30B-A3B", memory="16GiB", gpus=1, lora=None, objective="sft", more={}
)
def test_a_dry_run_and_a_prediction_agree_on_numbers(model, memory, gpus, lora, objective, more):
    named = {"objective": objective, **({} if lora is None else {"lora": lora}), **more}
    try:
        prediction = highwater.predict(model, gpus=gpus, gpu_memory=memory, **named)
    except HighwaterError as refused:
        first = refused.problem
        if "ring" in more or "copies" in more:  # of the degrees that nobody named it says more
            first, *_ = first.split("; ")
        with pytest.raises(HighwaterError, match=re.escape(first)):
            found(model, memory, gpus, **named)
    else:
        check_alike(found(model, memory, gpus, **named), prediction)


VERL = ("Qwen3-8B", "8xA100-80GB", "64k", "--trainer", "verl", *AGREEMENT["ROLLOUT"])
ASKED = [("Qwen3-14B", "8xH100-80GB", "32k", "axolotl", "1"), (*VERL, "--prompt-tokens", "2048")]


@pytest.mark.parametrize("words", [*ASKED, *AGREEMENT["recommended"](7, QUESTIONS // 4)])
def test_a_recommendation_and_a_prediction_agree_on_numbers(words, tmp_path):
    assert AGREEMENT["put_recommended"](words, tmp_path)["differing"] == []


@pytest.mark.parametrize(
    ("model", "gpus", "length", "named"), table("answer_sentence", "trials_of_a_dry_run")
)
def test_one_trial_of_a_dry_run_says_what_is_predicted_of_its_length(model, gpus, length, named):
    rung = {"allocator": "native", "loss": "full", "offload": False, "activations": "gpu"}
    rung |= {"ulysses": [1], **named}
    if rung["offload"] or rung["activations"] == "host":
        rung["allocator"] = "expandable"
    on = {"gpus": [gpus], "device": "cuda", "memory": "80GiB", "dry_run": True}
    trial = highwater.run_trial(model, length, **on, **rung)
    (cell,) = highwater.predict(model, gpus=gpus, gpu_memory="80GiB", length=length, **rung).cells
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


def test_a_search_of_several_degrees_tries_the_ends_of_each_or_the_grid_as_named():
    ends = set()
    for ulysses in (1, 2):
        one = highwater.predict("Qwen3-8B", gpus=2, gpu_memory="80GiB", ulysses=[ulysses])
        ends |= {one.simplest.cell, one.explained.cell}
    study = found("Qwen3-8B", "80GiB", 2, ulysses=[1, 2])
    assert {*study.question.cells} == ends
    check_alike(study, highwater.predict("Qwen3-8B", gpus=2, gpu_memory="80GiB", ulysses=[1, 2]))
    every = {"allocator": "native", "loss": "full", "offload": False, "activations": "gpu"}
    study = found("Qwen3-8B", "80GiB", 2, **every, ulysses=[1, 2])
    assert [cell.layout.ulysses_degree for cell in study.question.cells] == [1, 2]
    assert not study.notes or not any("are not tried" in note for note in study.notes)


def test_a_study_is_gone_on_with_as_it_began_and_another_question_is_not(tmp_path):
    file = str(tmp_path / "study.jsonl")
    began = found("Qwen3-8B", "80GiB", 2, ulysses=[1], study=file)
    assert found("Qwen3-8B", "80GiB", 2, study=file).question.cells == began.question.cells
    with pytest.raises(HighwaterError):
        found("Qwen3-8B", "80GiB", 2, lora=8, study=file)


@pytest.mark.parametrize(
    ("model", "gpus"),
    [("Qwen3-8B", "4xA100-80GB"), ("Llama-3.1-8B", "2xH100-80GB"), ("Qwen3-0.6B", "8xH200-141GB")],
)
def test_the_simplest_settings_of_the_native_length_are_the_first_that_train_it(model, gpus):
    prediction = highwater.predict(model, gpus=gpus)
    simplest, native = prediction.native, prediction.native_length_tokens
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
        ("8xA100-80GB", {}, True, 25.6),
        ("4xA100-80GB", {"activations": "gpu"}, False, 18.3),
        ("4xA100-80GB", {"max_length": "64k"}, True, 1.6),
        ("8xA100-80GB", {"max_length": 40_960}, False, None),
    ],
)
def test_the_longest_is_marked_and_says_how_far_yarn_stretches(gpus, named, is_least, factor):
    prediction = highwater.predict("Qwen3-8B", gpus=gpus, **named)
    said = prediction_answer(prediction)
    assert ("The longest is ≥" in said) == is_least
    assert prediction.yarn_factor == factor
    assert ("published models go up to 8" in said) == (factor is not None)


@pytest.mark.parametrize(
    ("model", "gpus", "named"),
    [
        ("Qwen3-4B", "RTX-4090", {"lora": 16, "trainer": "trl"}),
        ("Qwen3-8B", "2xH100-80GB", {"offload": False}),
        ("Qwen3-1.7B", "L40S", {"resolution": 2048}),
    ],
)
def test_no_length_that_trains_is_more_than_a_step_above_the_longest(model, gpus, named):
    longest = highwater.predict(model, gpus=gpus, **named).explained
    reached, step = longest.capacity_tokens, named.get("resolution", 4096)
    assert longest.cell.layout.gpus * reached > 40_960
    assert longest.does_not_fit_tokens == reached + step
    here = {name: value for name, value in named.items() if name != "resolution"}
    above = [highwater.predict(model, gpus=gpus, length=reached + n * step, **here) for n in (1, 2)]
    assert not any(cell.capacity_tokens for each in above for cell in each.cells)


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
    old = msgspec.to_builtins(highwater.predict("Qwen3-0.6B", gpus="H100-80GB"))
    for record in (old, *old["cells"]):
        for name in ("native", "yarn_factor", "is_on_frontier"):
            record.pop(name, None)
    again = msgspec.convert(old, Prediction)
    assert all(each.is_on_frontier for each in again.cells)


@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_no_loss_is_told_of_a_reward_model_which_has_no_logits(loss):
    for trainer in ("highwater", "trl"):
        asked = {"lora": 16, "objective": "rw", "trainer": trainer}
        asked |= {"loss": loss} if trainer == "highwater" else {}
        found = highwater.predict("Llama-3.1-8B", gpus="L4", **asked)
        assert "chunked" not in prediction_answer(found) + plain_table(prediction_table(found))

"""The sentence that a prediction begins with: every number of it is the prediction's, and the words
are those of its settings.
"""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from studies import CELL, QUESTION, REAL, trial

import highwater
from highwater import recommend
from highwater.nouns.capacities import simplest, study_capacities
from highwater.nouns.study import MemoryOnlyFit, Study
from highwater.nouns.trial import Outcome
from highwater.pages.prediction_tables import (
    prediction_answer,
    prediction_table,
    recommendation_answer,
)
from highwater.pages.study_answer import answer_table, study_answer
from highwater.store.journal import read_study
from highwater.trials.simulated import SimulatedRunner
from highwater.units import format_bytes, format_tokens
from places import question_of
from tables import table
from trial_specs import answer_of, study_found


def test_the_native_length_comes_first_and_then_the_longest_with_what_is_left():
    found = highwater.predict("Qwen3-4B", gpus="1xH100-80GB")
    best = max(found.cells, key=lambda cell: cell.capacity_tokens)
    said = prediction_answer(found)
    assert said.startswith("Qwen3-4B trains its native 40,960 tokens on 1 x H100-80GB with ")
    settings = "expandable segments, a chunked loss, the layers' activations in host memory"
    assert f"The longest is {format_tokens(best.capacity_tokens)} tokens with {settings}" in said
    assert format_bytes(best.footprint.host_bytes) in said
    assert f"{format_bytes(best.headroom_bytes)} of each GPU left" in said
    assert best.step is not None
    assert f"{best.step.tokens_per_s:,.0f} tokens/s" in said
    on_gpu = max(c.capacity_tokens for c in found.cells if not c.cell.settings.uses_host)
    assert said.endswith(f"With everything on the GPUs: {format_tokens(on_gpu)}.")


def test_at_one_length_it_is_yes_with_the_simplest_settings():
    found = highwater.predict("Qwen3-8B", gpus="4xA100-80GB", length="64k")
    first = next(cell for cell in found.cells if cell.capacity_tokens)
    said = prediction_answer(found)
    assert said.startswith("Yes: Qwen3-8B trains 65,536 tokens on 4 x A100-80GB with ")
    assert ("expandable segments" in said) == (first.cell.settings.allocator == "expandable")


def test_where_nothing_fits_it_is_no_and_what_the_nearest_lacks():
    found = highwater.predict("Qwen3-32B", gpus="1xH100-80GB", length="64k", offload=False)
    assert not any(cell.capacity_tokens for cell in found.cells)
    least = min(cell.lacks_bytes for cell in found.cells)
    said = prediction_answer(found)
    assert said.startswith("No: Qwen3-32B does not train at 65,536 tokens on 1 x H100-80GB")
    assert said.endswith(f"lacks {format_bytes(least)} of each GPU.")
    everywhere = prediction_answer(highwater.predict("Qwen3-32B", gpus="1xRTX-3090", offload=False))
    assert everywhere.startswith("No: Qwen3-32B does not train at any length")


@pytest.mark.parametrize(
    ("asked", "words"),
    table("answer_sentence", "settings_are_said_in_words"),
)
def test_settings_are_said_in_words(asked, words):
    plain = {"loss": "full", "allocator": "native"}
    found = highwater.predict("Qwen3-0.6B", gpus="1xH200-141GB", length=4096, **plain | asked)
    assert words in prediction_answer(found)


def test_nothing_is_called_safe_that_leaves_less_than_was_asked_for():
    found = highwater.predict(
        "Qwen3-8B", gpus="4xA100-80GB", length="150k", headroom="30GiB", offload=False
    )
    fits = [row[2] for row in prediction_table(found, is_whole=True).rows]
    for cell, said in zip(found.cells, fits, strict=True):
        assert (said == "safe") == bool(cell.capacity_tokens)
    assert prediction_answer(found).startswith("No: ") == ("safe" not in fits)


def test_what_trials_measured_is_neither_safe_nor_tight():
    study = Path(__file__).parents[2] / "docs/results/find/qwen3-4b-card-full.jsonl"
    found = recommend("Qwen3-4B", gpus="1xH200-141GB", length="128k", studies=[study])
    assert found.chosen is not None
    assert (found.chosen.source, found.chosen.risk) == ("measured", None)
    said = recommendation_answer(found)
    assert said.startswith("Yes: ")
    assert "YaRN: 309.1 MiB of each GPU left" in said
    assert said.endswith(" Measured.")


_LENGTH = re.compile(r"\d{1,3}(?:,\d{3})+(?! tokens/s)")


def answered(**changes: Any) -> Study:
    usual = {"fits": 65_536, "fails": 69_632, "headroom_bytes": 3 * 2**30, "tokens_per_s": 12_345.6}
    return Study(question=QUESTION, answers=(answer_of(CELL, **usual | changes),))


def test_what_was_trained_comes_first_with_what_is_left_how_fast_and_what_ran_out():
    said = study_answer(answered())
    assert said == (
        "Qwen3-0.6B trains up to 65,536 tokens on 1 x simulated GPU with 80.00 GiB, measured, with "
        "expandable segments, a chunked loss and YaRN. 3.00 GiB of each GPU is left; "
        "12,346 tokens/s; 69,632 ran out of memory."
    )


def test_what_memory_holds_is_never_said_to_be_trained():
    proof = MemoryOnlyFit(length_tokens=131_072, peak_reserved_bytes=2**36, headroom_bytes=2**30)
    said = study_answer(answered(memory_only=proof, fails=135_168))
    assert said.startswith("Memory holds Qwen3-0.6B at 131,072 tokens on ")
    assert "by memory-only trials" in said
    assert "; trained in full was 65,536, at 12,346 tokens/s." in said
    assert "1.00 GiB of each GPU is left; 135,168 ran out of memory." in said
    untrained = study_answer(answered(memory_only=proof, fits=None))
    assert "no length was trained in full" in untrained


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


STUDIES = Path(__file__).parents[2] / "docs" / "results" / "find"


def test_a_search_that_was_ended_at_its_edge_knows_both_sides_of_it():
    study = highwater.open_study(STUDIES / "edge-4b-1-chunked-offload.jsonl")
    assert not study.answers
    in_full, memory_only = study_capacities(study)
    assert (in_full.capacity_tokens, memory_only.capacity_tokens) == (8_192, 286_720)
    assert in_full.does_not_fit_tokens == memory_only.does_not_fit_tokens == 294_912
    assert memory_only.fits(286_720)
    assert memory_only.fits(290_000) is None
    assert memory_only.fits(294_912) is False


def test_a_search_that_ended_at_its_ceiling_knows_of_no_length_that_does_not_fit():
    (found,) = study_capacities(highwater.open_study(STUDIES / "qwen3-0.6b-79gib-chunked.jsonl"))
    assert (found.capacity_tokens, found.does_not_fit_tokens) == (262_144, None)


def test_a_length_whose_own_trial_ran_out_of_memory_does_not_fit_whatever_longer_ones_did():
    study = highwater.open_study(STUDIES / "qwen3-0.6b-79gib-full.jsonl")
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

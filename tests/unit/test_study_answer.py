"""The sentence that a study begins with: every number of it is the study's, and no length is said
to be trained that was not.
"""

import re

import msgspec
import pytest
from studies import CELL, QUESTION, REAL, trial

from highwater.nouns.study import CellAnswer, MemoryOnlyFit, Study
from highwater.nouns.trial import Outcome
from highwater.pages.study.study_answer import study_answer
from highwater.store.journal import read_study
from highwater.units import format_tokens

_LENGTH = re.compile(r"\d{1,3}(?:,\d{3})+(?! tokens/s)")


def answered(**changes: object) -> Study:
    fields = {
        "cell": CELL,
        "capacity_tokens": 65_536,
        "does_not_fit_tokens": 69_632,
        "limit": "memory",
        "reason": "ran out",
        "trials": 2,
        "headroom_bytes": 3 * 2**30,
        "tokens_per_s": 12_345.6,
    }
    answer = CellAnswer(**(fields | changes))
    return Study(question=QUESTION, answers=(answer,))


def test_what_was_trained_comes_first_with_what_is_left_how_fast_and_what_ran_out():
    said = study_answer(answered())
    assert said == (
        "Qwen3-0.6B trains up to 65,536 tokens on 1 x simulated GPU with 80.00 GiB, measured, with "
        "expandable segments, a chunked loss and YaRN. 3.00 GiB of each GPU is left; "
        "12,346 tokens/s; 69,632 ran out of memory."
    )


def test_what_memory_holds_is_never_said_to_be_trained():
    proof = MemoryOnlyFit(length_tokens=131_072, peak_reserved_bytes=2**36, headroom_bytes=2**30)
    said = study_answer(answered(memory_only=proof, does_not_fit_tokens=135_168))
    assert said.startswith("Memory holds Qwen3-0.6B at 131,072 tokens on ")
    assert "by memory-only trials" in said
    assert "; trained in full was 65,536, at 12,346 tokens/s." in said
    assert "1.00 GiB of each GPU is left; 135,168 ran out of memory." in said
    untrained = study_answer(answered(memory_only=proof, capacity_tokens=None))
    assert "no length was trained in full" in untrained


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"capacity_tokens": 0, "does_not_fit_tokens": 4096}, "No: Qwen3-0.6B does not train at "),
        ({"capacity_tokens": None, "limit": "inconclusive"}, "Not known yet: no trial"),
        ({"does_not_fit_tokens": None, "limit": "ceiling"}, "Qwen3-0.6B trains up to 65,536 "),
        ({"does_not_fit_tokens": None, "limit": "time"}, "Qwen3-0.6B trains up to 65,536 "),
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
    longest = max(
        each.spec.length_tokens
        for each in study.trials
        if each.result is not None and each.result.outcome.is_fit
    )
    assert format_tokens(longest) in said

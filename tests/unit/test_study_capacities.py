"""What a study knows of its cells: finished or not, the next length is known not to fit where its
own trial ran out.
"""

from pathlib import Path

import msgspec

import highwater
from highwater.nouns.capacities import simplest, study_capacities
from highwater.nouns.study import RecordedTrial, Study
from highwater.nouns.trial import Outcome
from highwater.pages.study.tables import answer_table
from highwater.search.cell_outcomes import CellAnswered, TrialFinished
from highwater.search.scheduler import search_cells
from highwater.trials.simulated import SimulatedRunner
from places import question_of

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
    failed = next(
        each
        for each in study.trials
        if each.result is not None and each.result.outcome is Outcome.OUT_OF_MEMORY
    )
    again = msgspec.structs.replace(
        failed, spec=msgspec.structs.replace(failed.spec, length_tokens=8192)
    )
    found = study_capacities(msgspec.structs.replace(study, trials=(*study.trials, again)))
    (odd,) = (each for each in found if each.odd_tokens)
    assert (odd.fits(8192), odd.fits(8193), odd.fits(10**6)) == (False, True, False)
    named = {length: simplest(found, length) for length in (4096, 8192, 12288)}
    labels = {
        length: None if each is None else each.cell.settings.label for length, each in named.items()
    }
    other = "Env" if failed.spec.settings.label == "vanilla" else "vanilla"
    assert labels == {4096: "vanilla", 8192: other, 12288: "vanilla"}


def test_with_a_token_budget_nobody_knows_of_lengths_that_pack_more_than_what_fit():
    question = question_of(
        token_budget=65_536,
        start_length=4096,
        resolution=4096,
        max_length=65_536,
        loss="full",
        allocator="native",
    )
    law = 40_960
    runner = SimulatedRunner(
        lambda spec: (
            Outcome.FIT if spec.length_tokens * spec.sequences <= law else Outcome.OUT_OF_MEMORY
        )
    )
    trials, answers = [], []
    for event in search_cells(question, runner):
        if isinstance(event, TrialFinished):
            trials.append(
                RecordedTrial(
                    spec=event.spec, attempt=event.attempt, repeat=event.repeat, result=event.result
                )
            )
        if isinstance(event, CellAnswered):
            answers.append(event.answer)
    study = Study(question=question, trials=tuple(trials), answers=tuple(answers))
    (found,) = study_capacities(study)
    assert (found.capacity_tokens, found.does_not_fit_tokens) == (40_960, 45_056)
    tried = {trial.spec.length_tokens for trial in trials}
    for length in range(4096, 65_537, 4096):
        packed = length * (65_536 // length)
        told = found.fits(length)
        assert told in (None, packed <= law)
        assert told is not None or length not in tried
    assert found.fits(4096) is None, "16 sequences of it are 65,536 tokens"
    assert any("may pack more tokens" in note for note in answer_table(study).footnotes)

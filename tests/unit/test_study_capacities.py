"""What a study knows of its cells: finished or not, the next length is known not to fit where its own trial ran out."""

from pathlib import Path

import msgspec

import highwater
from highwater.spec.capacities import simplest, study_capacities
from highwater.spec.trial import Outcome

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
    failed = next(each for each in study.trials if each.result is not None and each.result.outcome is Outcome.OUT_OF_MEMORY)
    again = msgspec.structs.replace(failed, spec=msgspec.structs.replace(failed.spec, length_tokens=8192))
    found = study_capacities(msgspec.structs.replace(study, trials=(*study.trials, again)))
    (odd,) = (each for each in found if each.odd_tokens)
    assert (odd.fits(8192), odd.fits(8193), odd.fits(10**6)) == (False, True, False)
    named = {length: simplest(found, length) for length in (4096, 8192, 12288)}
    labels = {length: None if each is None else each.cell.settings.label for length, each in named.items()}
    other = "Env" if failed.spec.settings.label == "vanilla" else "vanilla"
    assert labels == {4096: "vanilla", 8192: other, 12288: "vanilla"}

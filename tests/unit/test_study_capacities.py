"""What a study knows of its cells: finished or not, the next length is known not to fit where its own trial ran out."""

from pathlib import Path

import highwater
from highwater.spec.capacities import study_capacities

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

"""A recommendation by bundled traces replays what it says, and no more: each replay is a twelfth
of a second.
"""

import pytest

from highwater.memory import trinity
from highwater.memory.question import memory_limit_of
from highwater.memory.trainers import predict_by_formula
from highwater.recommendation.candidates import Goal, first_fit, predicted_candidates
from highwater.recommendation.recommend import recommend
from highwater.trials.probe import gpus_meant

ASKED = [
    pytest.param("Qwen3-0.6B", "2xA100-80GB", 128 << 10, id="some fit"),
    pytest.param("Qwen3-0.6B", "2xA100-80GB", 1 << 20, id="none fits"),
    pytest.param("Qwen3-0.6B", "1xH100-80GB", 8 << 10, id="all fit"),
]
MOST_REPLAYS = 30
"""What the question with the most cells that a trace speaks of takes: 12 of them, at one length and
at their longest."""


def goal_of(model: str, gpus: str, length_tokens: int) -> Goal:
    where = gpus_meant(gpus, None)
    limit = memory_limit_of(where, host_memory="1TiB", reserved=0)
    return Goal(
        model=model,
        where=where,
        trainer="trinity",
        length_tokens=length_tokens,
        memory_limit=limit,
        settings={},
    )


@pytest.mark.parametrize(("model", "gpus", "length_tokens"), ASKED)
def test_what_is_recommended_is_what_is_predicted(model, gpus, length_tokens):
    goal = goal_of(model, gpus, length_tokens)
    found = predicted_candidates(goal)
    here, longest = {}, {}
    for sequences in goal.budgets:
        for predicted, length in ((here, length_tokens), (longest, None)):
            question, _ = goal.question(sequences, length_tokens=length)
            for each in predict_by_formula(question, goal.memory_limit, goal.trainer, None):
                predicted[each.cell] = each
    for candidate in found:
        at, beyond = here[candidate.cell], longest[candidate.cell]
        assert candidate.fits == bool(at.capacity_tokens)
        assert candidate.headroom_bytes == at.headroom_bytes
        assert candidate.risk == at.risk
        assert candidate.capacity_tokens == max(at.capacity_tokens, beyond.capacity_tokens)
        if not candidate.fits:
            assert candidate.lacks_bytes == at.lacks_bytes


@pytest.mark.parametrize(("model", "gpus", "length_tokens"), ASKED)
def test_the_first_that_fits_is_the_simplest_of_all_that_do(model, gpus, length_tokens):
    goal = goal_of(model, gpus, length_tokens)
    simplest = next((each for each in predicted_candidates(goal) if each.fits), None)
    first = first_fit(goal)
    assert (first is None) == (simplest is None)
    if first is not None and simplest is not None:
        assert first.cell == simplest.cell
        assert first.headroom_bytes == simplest.headroom_bytes


def test_the_question_with_the_most_cells_takes_no_replay_twice(monkeypatch):
    replays: list[tuple[object, ...]] = []
    replay_scaled = trinity.replay_scaled

    def counted(trace, tokens, **asked):
        replays.append((id(trace), tokens, *asked.items()))
        return replay_scaled(trace, tokens, **asked)

    for memory in (trinity._replayed, trinity._needed):
        memory.cache_clear()
    monkeypatch.setattr(trinity, "_ROOMY", {})
    monkeypatch.setattr(trinity, "replay_scaled", counted)
    found = recommend("Qwen3-8B", gpus="4xA100-80GB", length="64k", trainer="trinity")
    assert len(set(replays)) == len(replays) <= MOST_REPLAYS
    # what was recommended when every cell was replayed for all that a prediction tells
    chosen = found.chosen
    assert chosen is not None
    assert (chosen.cell.layout.ulysses_degree, chosen.is_lowered) == (4, True)
    assert chosen.headroom_bytes == 2_967_050_649
    assert [(each.capacity_tokens, each.headroom_bytes) for each in found.candidates[:12]] == [
        (12_288, -187_534_042_727),
        (12_288, -172_315_010_663),
        (20_480, -84_786_177_639),
        (24_576, -71_119_038_055),
        (51_200, -27_265_492_583),
        (51_200, -19_717_842_535),
        (24_576, -82_101_823_079),
        (28_672, -69_508_425_319),
        (51_200, -27_265_492_583),
        (51_200, -19_717_842_535),
        (102_400, 2_967_050_649),
        (102_400, 5_955_492_249),
    ]

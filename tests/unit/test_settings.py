"""Settings: what excludes each other, what a token budget holds, and what a step of each objective
computes.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.errors import UsageError
from highwater.model.footprint import step_flops
from highwater.model.model import load_model
from highwater.nouns.settings import Settings
from highwater.nouns.trial import TrialSpec
from highwater.search.cell_outcomes import CellAnswered
from highwater.search.scheduler import search_cells
from highwater.trials.simulated import SimulatedRunner
from places import question_of


@pytest.mark.parametrize(
    ("settings", "said", "mended"),
    [
        ({"critic": True}, "the objective sft has no critic", {"objective": "ppo"}),
        (
            {"objective": "rw", "entropy": "full"},
            "the objective rw has no entropy in it",
            {"entropy": "none"},
        ),
        (
            {"objective": "rw"},
            "rw trains on pairs, and 1 sequences",
            {"sequences_per_micro_batch": 2},
        ),
        (
            {"objective": "dpo", "sequences_per_micro_batch": 3},
            "dpo trains on pairs, and 3 sequences",
            {"sequences_per_micro_batch": 2},
        ),
        (
            {"objective": "dpo", "sequences_per_micro_batch": 2, "entropy": "full"},
            "the objective dpo has no entropy in it",
            {"entropy": "none"},
        ),
        ({"token_budget_tokens": 0}, "a token budget of 0", {"token_budget_tokens": 16_384}),
    ],
)
def test_settings_that_exclude_each_other_are_refused_and_what_the_hint_says_is_not(
    settings, said, mended
):
    with pytest.raises(UsageError) as refusal:
        Settings(**settings)
    assert refusal.value.problem.startswith(said)
    if said.startswith("the objective rw"):
        mended = mended | {"sequences_per_micro_batch": 2}
    Settings(**(settings | mended))


@given(st.integers(2, 2**20), st.sampled_from([1, 2, 4, 8]), st.integers(1, 2**21))
def test_a_token_budget_holds_as_many_sequences_as_fit_and_no_more(length, degree, budget):
    settings = Settings(token_budget_tokens=budget)
    held = settings.sequences(length, context_degree=degree)
    assert held * length <= budget * degree < (held + 1) * length
    assert (held > 0) == (length <= settings.longest_tokens(context_degree=degree))


@given(st.integers(8, 2**20), st.sampled_from([1, 2, 4, 8]))
def test_the_published_default_budget_is_two_sequences(length, degree):
    budget = -(-2 * length // degree)
    assert Settings(token_budget_tokens=budget).sequences(length, context_degree=degree) == 2


def trial(length: int, **fields) -> TrialSpec:
    question = question_of(**fields)
    return question.trial(question.cells[0], length)


def test_a_length_that_the_budget_does_not_hold_is_refused_with_one_that_works():
    with pytest.raises(UsageError, match=r"budget of 8192 .* 10000") as refusal:
        trial(10_000, token_budget="8k")
    assert "`--token-budget 10000`" in refusal.value.hint
    assert trial(10_000, token_budget=10_000).sequences == 1
    assert trial(10_000, token_budget=20_000, gpus=[2], ulysses=[2]).sequences == 4


@pytest.mark.parametrize("objective", ["rw", "dpo"])
def test_a_token_budget_of_pairs_needs_no_number_of_sequences_and_packs_pairs(objective):
    assert trial(10_000, objective=objective, token_budget=39_999).sequences == 2
    with pytest.raises(UsageError, match="each GPU gets of one pair of 10000"):
        trial(10_000, objective=objective, token_budget=19_999)


def test_a_search_ends_where_its_token_budget_does():
    question = question_of(
        token_budget="20k", loss="chunked", allocator="expandable", resolution="4k"
    )
    (answer,) = [
        event.answer
        for event in search_cells(question, SimulatedRunner(lambda _: 0))
        if isinstance(event, CellAnswered)
    ]
    assert (answer.capacity_tokens, answer.limit) == (20_480, "ceiling")
    assert answer.reason.startswith("20,480 tokens fit, ")
    assert "token budget" in answer.reason


def test_every_pass_that_an_objective_asks_for_is_work():
    shape = load_model("Qwen3-0.6B").shape

    def flops(**settings):
        return step_flops(shape, length_tokens=8192, sequences=2, settings=Settings(**settings))

    once = flops()
    assert flops(objective="grpo") * 3 == once * 4, "a forward pass of the reference"
    assert flops(objective="ppo") == once
    assert flops(objective="ppo", critic=True) * 3 == once * 7, (
        "a second model, and its values beforehand"
    )

"""A recommendation: every rung at one length, the first that fits, why simpler ones do not."""

import itertools
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import highwater
from highwater.cli.grammar import parse
from highwater.errors import UsageError
from highwater.memory.capacity import CellPrediction, MemoryLimit
from highwater.memory.question import memory_limit_of, predicted_question
from highwater.memory.trainers import calibration_of, predict_untraced
from highwater.nouns.cells import simplicity
from highwater.nouns.cluster import cluster
from highwater.nouns.recommendation import Aim, Candidate, Recommendation
from highwater.nouns.study import Cell, default_headroom_bytes
from highwater.nouns.trainer import OURS
from highwater.pages.recommendation_tables import next_rungs, recommendation_tables, rung_list
from highwater.pages.table import plain_table
from highwater.recommendation.candidates import Goal, predicted_candidates
from highwater.recommendation.recommend import recommend
from highwater.trainers import trinity as trinity
from highwater.trials.probe import gpus_meant
from highwater.units import GIB, MIB, format_bytes, format_tokens
from places import examples
from tiny_models import WIDE_HEADS, write_model

STUDY = Path(__file__).parents[2] / "docs" / "results" / "find" / "qwen3-0.6b-79gib-full.jsonl"
H20S = {"model": "Qwen3-8B", "gpus": "4xH20-96GB"}
TWO = {"sequences_per_micro_batch": 2}
"""A default token budget of two sequences, which can be lowered to one."""

lengths = st.integers(2, 400_000)
places = st.sampled_from(
    [
        ("Qwen3-8B", "4xH20-96GB"),
        ("Qwen3-4B", "A100-80GB"),
        ("Qwen3-14B", "8xH100-80GB"),
        ("Qwen3-0.6B", "3xL40S"),
    ]
)


def place(candidate: Candidate) -> tuple[str, int, bool]:
    return candidate.cell.settings.label, candidate.cell.layout.ulysses_degree, candidate.is_lowered


def test_every_rung_has_every_degree_that_divides_gpus_and_heads_with_either_budget():
    found = recommend(length="64k", **H20S, **TWO)
    offloaded = ("Env", "Env + Offload-states", "Env + Offload")
    losses = ("", " + chunked")
    rungs = ["vanilla", *(f"{each}{loss}" for each in offloaded for loss in losses)]
    rungs += [f"{each} + activations-on-host{loss}" for each in offloaded for loss in losses]
    every = {(r, d, low) for r in rungs for d in (1, 2, 4) for low in (False, True)}
    assert {place(each) for each in found.candidates} == every
    six = recommend("Qwen3-8B", gpus="6xH20-96GB", length="8k")
    degrees = {each.cell.layout.ulysses_degree for each in six.candidates}
    assert degrees == {1, 2}, "3 and 6 do not divide 32 heads"


def test_candidates_are_in_the_order_of_simplicity_and_a_lowered_budget_comes_before_offload():
    found = recommend(length="64k", **H20S, **TWO)
    for lowered in (False, True):
        keys = [simplicity(each.cell) for each in found.candidates if each.is_lowered is lowered]
        assert keys == sorted(keys)
    turns = [(each.cell.settings.offload, each.is_lowered) for each in found.candidates]
    assert list(dict.fromkeys(turns)) == [
        *((False, False), (False, True), ("states", False), ("states", True), (True, False)),
        (True, True),
    ]


@settings(max_examples=examples(25), deadline=None)
@given(places, lengths)
def test_the_chosen_rung_is_the_first_in_order_that_fits(where, length):
    model, gpus = where
    found = recommend(model, gpus=gpus, length=length)
    fitting = [each for each in found.candidates if each.fits]
    assert found.chosen == (fitting[0] if fitting else None)
    assert not any(each.fits for each in found.earlier)
    chosen = [found.chosen] if found.chosen else []
    assert (*found.earlier, *chosen, *found.later) == found.candidates
    assert (found.alternatives == ()) == bool(fitting)


@settings(max_examples=examples(25), deadline=None)
@given(places, lengths, lengths)
def test_a_shorter_length_never_needs_a_less_simple_rung(where, one, other):
    model, gpus = where
    short, long = (recommend(model, gpus=gpus, length=length) for length in sorted((one, other)))
    if long.chosen is not None:
        assert short.chosen.order <= long.chosen.order


def test_the_upper_end_decides_where_the_prediction_itself_would_fit():
    cells = highwater.predict("Qwen3-4B", gpus="H200-141GB").cells
    edge = next(each for each in cells if each.likely_tokens > each.capacity_tokens)
    asked = {"gpus": "H200-141GB", "sequences_per_micro_batch": 1}
    found = recommend("Qwen3-4B", length=edge.likely_tokens, **asked)
    assert not next(each for each in found.candidates if each.cell == edge.cell).fits


def test_the_command_that_is_named_predicts_that_cell():
    here = {"gpu_memory": "60GiB", "headroom": "2GiB", "reserved": "5GiB", "host_memory": "200GiB"}
    asked = [{**H20S, **here, "strategy": strategy} for strategy in ("fsdp", "fsdp2")]
    named = ("length", "gpu_memory", "host_memory", "reserved", "allocator", "loss", "headroom")
    usual = {"offload": False, "strategy": "fsdp2", "sequences_per_micro_batch": 1}
    offloads = set()
    for one in [one for each in asked for one in recommend(length="32k", **each).candidates[::7]]:
        offloads.add(one.cell.settings.offload)
        words = vars(parse(shlex.split(one.found_in)[1:]))
        typed = {name: words[name] for name in (*named, "ulysses")}
        typed |= {name: words.get(name, value) for name, value in usual.items()}
        again = highwater.predict(words["model"], gpus=words["cluster"], **typed)
        predicted = next(each for each in again.cells if each.cell == one.cell)
        assert predicted.headroom_bytes == one.headroom_bytes
    assert offloads == {False, "states", True}


@pytest.mark.parametrize("length", [2, 4097, 65_536, 100_001])
def test_a_token_budget_of_two_sequences_is_lowered_to_a_single_one(length):
    for each in recommend(length=length, **H20S, **TWO).candidates:
        degree, count = each.cell.layout.ulysses_degree, 1 if each.is_lowered else 2
        assert each.token_budget_tokens == -(-count * length // degree)
        assert each.cell.settings.sequences_per_micro_batch == count
        budget = {"token_budget_tokens": each.token_budget_tokens}
        by_budget = msgspec.structs.replace(each.cell.settings, **budget)
        assert by_budget.sequences(length, context_degree=degree) >= count


def test_a_budget_of_one_sequence_and_of_one_pair_cannot_be_lowered():
    def sequences(**settings: object) -> set[int]:
        found = recommend(length="8k", **settings, **H20S).candidates
        return {each.cell.settings.sequences_per_micro_batch for each in found}

    assert (sequences(sequences_per_micro_batch=1), sequences(objective="rw")) == ({1}, {2})
    assert sequences(objective="rw", sequences_per_micro_batch=4) == {2, 4}


def test_each_earlier_rung_says_what_it_lacks():
    found = recommend(length="96k", headroom="3GiB", host_memory="100GiB", **H20S)
    assert found.earlier
    for each in found.candidates:
        if each.fits:
            assert (each.lacks_bytes, each.lacks_of) == (None, None)
            assert each.headroom_bytes >= 3 * GIB
        elif each.lacks_of == "device":
            assert each.lacks_bytes >= 3 * GIB - each.headroom_bytes
            assert each.lacks_bytes > 0
        else:
            on_host = each.cell.settings.activations == "host"
            assert on_host or each.cell.settings.offload
            assert each.lacks_bytes > 0
            assert on_host or each.lacks_bytes == each.host_bytes - 100 * GIB
    assert {each.lacks_of for each in found.candidates} == {None, "device", "host"}
    first = found.earlier[0]
    text = "\n".join(map(plain_table, recommendation_tables(found)))
    assert f"lacks {format_bytes(first.lacks_bytes)} of a GPU" in text
    assert format_tokens(first.capacity_tokens) in text


def test_the_next_rungs_are_those_that_train_longer():
    found = recommend(length="64k", **H20S)
    bought = next_rungs(found)
    capacities = [found.chosen.capacity_tokens, *(each.capacity_tokens for each in bought)]
    assert len(bought) == 3
    assert capacities == sorted(set(capacities))
    *_, table = recommendation_tables(found)
    first = bought[0]
    speed = f"{first.step_time.tokens_per_s:,.0f}"
    longest = f"{format_tokens(first.capacity_tokens)}*"
    assert table.rows[-3][-2:] == (longest, speed)


def test_gpus_for_rollout_are_not_the_trainers():
    found = recommend(length="16k", rollout_gpus=2, **H20S)
    assert (found.gpus, found.rollout_gpus) == (2, 2)
    alone = recommend("Qwen3-8B", gpus="2xH20-96GB", length="16k")
    assert found.candidates == alone.candidates
    text = plain_table(rung_list(found, is_explained=True))
    assert re.search(r"^.* 2 x H20-96GB, .* 2 for rollout", text)
    assert "2 of 4 roll out" in text


def test_a_free_setting_is_preferred_to_one_that_leaves_too_little():
    """At the length that nothing set only just holds, expandable segments are taken."""
    cells = highwater.predict(**H20S, ulysses=[1], headroom=0).cells
    (vanilla,) = (each for each in cells if each.cell.settings.label == "vanilla")
    at_its_edge = {"length": vanilla.capacity_tokens, "ulysses": [1], **H20S}
    found = recommend(**at_its_edge)
    assert found.chosen.risk == "safe"
    assert found.chosen.headroom_bytes >= default_headroom_bytes(found.device_bytes)
    assert recommend(**at_its_edge, headroom=0).chosen.cell.settings.label == "vanilla"


@pytest.mark.parametrize("risk", ["likely", "tight"])
def test_where_nothing_is_safe_the_roomiest_that_may_fit_is_taken_and_says_so(risk):
    one = {"ulysses": [1], "allocator": "expandable", "loss": "chunked", "offload": False}
    one["activations"] = "gpu"
    (cell,) = highwater.predict(**H20S, **one, headroom=0, resolution="1k").cells
    tokens = cell.likely_tokens if risk == "tight" else cell.capacity_tokens
    found = recommend(length=tokens, **H20S, **one)
    assert found.chosen.risk == risk
    assert found.chosen.headroom_bytes < default_headroom_bytes(found.device_bytes)
    assert any(f"{risk}: " in note for note in recommendation_tables(found)[-1].footnotes)
    assert recommend(length=tokens, **H20S, **one, headroom="4GiB").chosen is None


def test_yarn_begins_past_the_native_length_and_comes_with_a_warning():
    assert recommend(length=40_960, **H20S).yarn is None
    found = recommend(length=65_536, **H20S)
    assert found.yarn.factor == 65_536 / 40_960
    yarn = {"rope_type": "yarn", "factor": 1.6, "original_max_position_embeddings": 40_960}
    assert found.yarn.rope_parameters == yarn | {"rope_theta": 1_000_000}
    assert found.yarn.max_position_embeddings == 65_536

    def explained(what):
        return "\n".join(map(plain_table, recommendation_tables(what, is_explained=True)))

    assert "numerical stability" in explained(found)
    assert "numerical stability" not in explained(recommend(length=40_960, **H20S))


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ({"token_budget": "64k"}, "`--sequences-per-micro-batch 2`"),
        ({"max_length": "64k"}, "leave `--max-length` out"),
        ({"trainer": "trinity", "studies": [STUDY]}, "leave `--study` out"),
    ],
)
def test_what_a_recommendation_is_not_about_is_refused(asked, hint):
    with pytest.raises(UsageError) as refused:
        recommend(length="8k", **H20S, **asked)
    assert hint in refused.value.hint


ASKED = [
    pytest.param("Qwen3-0.6B", "2xA100-80GB", 128 << 10, id="some fit"),
    pytest.param("Qwen3-0.6B", "2xA100-80GB", 1 << 20, id="none fits"),
    pytest.param("Qwen3-0.6B", "1xH100-80GB", 8 << 10, id="all fit"),
]


def goal_of(model: str, gpus: str, length_tokens: int) -> Goal:
    where = gpus_meant(gpus, None)
    limit = memory_limit_of(where, host_memory="1TiB", reserved=0)
    asked = {"model": model, "length_tokens": length_tokens, "settings": {}}
    return Goal(**asked, where=where, trainer="trinity", memory_limit=limit)


@pytest.mark.parametrize(("model", "gpus", "length_tokens"), ASKED)
def test_what_is_recommended_is_what_is_predicted(model, gpus, length_tokens):
    goal = goal_of(model, gpus, length_tokens)
    found = predicted_candidates(goal)
    here, longest = {}, {}
    for sequences in goal.budgets:
        for predicted, length in ((here, length_tokens), (longest, None)):
            question, _ = goal.question(sequences, length_tokens=length)
            for each in predict_untraced(question, goal.memory_limit, goal.trainer, None):
                predicted[each.cell] = each
    for candidate in found:
        at, beyond = here[candidate.cell], longest[candidate.cell]
        assert candidate.fits == bool(at.capacity_tokens)
        assert (candidate.headroom_bytes, candidate.risk) == (at.headroom_bytes, at.risk)
        assert candidate.capacity_tokens == max(at.capacity_tokens, beyond.capacity_tokens)
        if not candidate.fits:
            assert candidate.lacks_bytes == at.lacks_bytes


LAYERS = 5
QUESTIONS = (
    (1, 8, 2.5, 1),
    (2, 8, 3.0, 4),
    (2, 32, 4.5, 16),
    (1, 32, 7.0, 1),
    (4, 128, 7.5, 64),
    (4, 512, 3.0, 64),
    (1, 4, 24.0, 64),
)
"""GPUs, thousands of tokens, GiB of each GPU and of the host: often only some plans fit."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = {"num_hidden_layers": LAYERS, "max_position_embeddings": 1_000_000}
    return str(write_model(tmp_path_factory.mktemp("model"), WIDE_HEADS, **sizes))


def every_plan(cells: tuple[Cell, ...], kv_heads: int) -> Iterator[Cell]:
    """Each cell with each recomputation, number of head groups and of last layers on the GPU."""
    for cell in cells:
        heads = kv_heads // cell.layout.ulysses_degree
        groups = [each for each in range(1, heads + 1) if heads % each == 0]
        counts = range(1, LAYERS + 1) if cell.settings.activations == "host" else (1,)
        kinds = itertools.product(("none", "layer", "all-but-attention"), groups, counts)
        for recompute, number, layers in kinds:
            with suppress(UsageError):  # what is kept whole is neither on the host nor in groups
                yield cell.changed(
                    recompute=recompute, attention_head_groups=number, layers_on_gpu=layers
                )


def all_that_fit(
    model: str, gpus: int, length: int, gpu_bytes: int, host_bytes: int
) -> list[CellPrediction]:
    where = cluster(f"{gpus}xH100", gpu_memory_bytes=gpu_bytes, machine=None)
    question, _ = predicted_question(model, where, OURS, length, {"sequences_per_micro_batch": 1})
    cells = tuple(every_plan(question.cells, question.model.shape.kv_heads))
    question = msgspec.structs.replace(question, cells=cells)
    limit = MemoryLimit(device_bytes=gpu_bytes, host_bytes=host_bytes)
    found = predict_untraced(question, limit, OURS, calibration_of(question, OURS), extent="fit")
    return [each for each in found if each.capacity_tokens]


def test_the_best_plan_is_the_best_of_all_plans(model: str):
    seen: set[str] = set()
    for gpus, thousands, gpu_gib, host_gib in QUESTIONS:
        length, gpu_bytes = thousands * 1024, round(gpu_gib * GIB)
        host_bytes = host_gib * GIB + 300 * MIB
        plans = all_that_fit(model, gpus, length, gpu_bytes, host_bytes)
        aims: tuple[Aim, ...] = ("fastest", "lightest")
        where = {"gpus": f"{gpus}xH100", "gpu_memory": gpu_bytes, "host_memory": host_bytes}
        asked = {"length": length, "sequences_per_micro_batch": 1, **where}
        found: dict[Aim, Recommendation] = {
            aim: highwater.recommend(model, **asked, aim=aim) for aim in aims
        }
        if not plans:
            assert not any(each.chosen and each.chosen.risk == "safe" for each in found.values())
            seen.add("nothing")
            continue
        fastest, lightest = found["fastest"].chosen, found["lightest"].chosen
        rates = [plan.step.tokens_per_s for plan in plans if plan.step]
        assert fastest.step_time.tokens_per_s == pytest.approx(max(rates), rel=1e-9)
        by_cell = {plan.cell: plan.device_used_bytes for plan in plans}
        assert by_cell[lightest.cell] == min(by_cell.values())
        assert fastest.cell in by_cell
        seen |= {fastest.cell.settings.recompute, fastest.cell.settings.activations}
        seen |= {"groups"} if lightest.cell.settings.attention_head_groups > 1 else set()
    assert seen >= {"none", "all-but-attention", "gpu", "host", "groups", "nothing"}


def test_the_fastest_recomputes_nothing_where_that_fits_and_what_is_named_stays(model: str):
    asked = {"length": "8k", "gpus": "A100-80GB", "lora": 16}
    chosen = highwater.recommend("Llama-3.1-8B", aim="fastest", **asked).chosen
    assert chosen.cell.settings.recompute == "none"
    answer = highwater.predict("Llama-3.1-8B", recompute="none", **asked).answer
    assert chosen.step_time.tokens_per_s == pytest.approx(answer.step.tokens_per_s)
    found = highwater.recommend(
        model, length="32k", gpus="2xH100", aim="lightest", recompute="layer", activations="gpu"
    )
    assert {c.cell.settings.recompute for c in found.candidates} == {"layer"}
    assert {c.cell.settings.activations for c in found.candidates} == {"gpu"}


@pytest.mark.parametrize("aim", ["fastest", "lightest"])
def test_candidates_are_sorted_by_what_is_aimed_at(aim: Aim):
    found = highwater.recommend("Qwen3-8B", length="128k", gpus="4xH100", aim=aim)
    fitting = [each for each in found.candidates if each.fits]
    assert len(fitting) > 4
    assert found.chosen is not None
    assert found.chosen is fitting[0]
    every = [(each.cell.settings, each.cell.layout) for each in found.candidates]
    kinds = {(it.offload, it.activations, it.recompute, layout) for it, layout in every}
    assert len(kinds) == len(every)
    if aim == "fastest":
        rates = [each.step_time.tokens_per_s for each in fitting if each.step_time]
        assert rates == sorted(rates, reverse=True)
        assert found.chosen.cell.settings.recompute == "all-but-attention"


def test_what_nobody_knows_is_refused(tmp_path: Path):
    asked = {"length": "8k", "gpus": "4xH100"}
    for problem, more in (
        ("nobody knows how fast", {"gpu_memory": "70GiB", "gpus": "2", "aim": "fastest"}),
        ("plans are of our own step", {"trainer": "trl", "aim": "lightest"}),
        ("studies tell of a few", {"studies": [tmp_path / "study.json"], "aim": "fastest"}),
    ):
        with pytest.raises(UsageError, match=problem):
            highwater.recommend("Qwen3-8B", **asked | more)

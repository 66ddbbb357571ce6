"""A recommendation: every rung at one length, the first that fits, why simpler ones do not, and what would do where none does."""

import shlex
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import highwater
from highwater.cli.parser import parse
from highwater.errors import UsageError
from highwater.prediction.capacity import Room
from highwater.prediction.recorded import as_measured, obstacle
from highwater.recommendation import recommend
from highwater.report.recommendation import next_rungs, recommendation_tables, rung_list
from highwater.report.table import plain_table
from highwater.spec.codec import from_json, to_json
from highwater.spec.flops import step_flops
from highwater.spec.ladder import simplicity
from highwater.spec.model import load_model
from highwater.spec.recommendation import Candidate, Recommendation
from highwater.spec.study import MemoryOnlyFit, Study
from highwater.spec.trial import Outcome
from highwater.units import GIB, format_bytes, format_tokens

FOUND = Path(__file__).parents[2] / "docs" / "results" / "find"
STUDY = FOUND / "qwen3-0.6b-79gib-full.jsonl"
HERE = {"model": "Qwen3-0.6B", "gpus": "H200-141GB", "gpu_memory": "79.15GiB", "sequences_per_micro_batch": 1}
"""What the study's trials were about."""
H20S = {"model": "Qwen3-8B", "gpus": "4xH20-96GB"}

lengths = st.integers(2, 400_000)
places = st.sampled_from(
    [("Qwen3-8B", "4xH20-96GB"), ("Qwen3-4B", "A100-80GB"), ("Qwen3-14B", "8xH100-80GB"), ("Qwen3-0.6B", "3xL40S")]
)


def place(candidate: Candidate) -> tuple[str, int, bool]:
    return candidate.cell.settings.label, candidate.cell.layout.ulysses_degree, candidate.is_lowered


def test_every_rung_has_every_degree_that_divides_gpus_and_heads_with_either_budget():
    found = recommend(length="64k", **H20S)
    rungs = ("vanilla", "Env", "Env+chunked", "Env+Offload", "Env+Offload+chunked")
    assert {place(each) for each in found.candidates} == {(r, d, low) for r in rungs for d in (1, 2, 4) for low in (False, True)}
    six = recommend("Qwen3-8B", gpus="6xH20-96GB", length="8k")
    assert {each.cell.layout.ulysses_degree for each in six.candidates} == {1, 2}, "3 and 6 do not divide 32 heads"


def test_candidates_are_in_the_order_of_simplicity_and_a_lowered_budget_comes_before_offload():
    found = recommend(length="64k", **H20S)
    for lowered in (False, True):
        keys = [simplicity(each.cell) for each in found.candidates if each.is_lowered is lowered]
        assert keys == sorted(keys)
    turns = [(each.cell.settings.offload, each.is_lowered) for each in found.candidates]
    assert list(dict.fromkeys(turns)) == [(False, False), (False, True), (True, False), (True, True)]


@settings(max_examples=25, deadline=None)
@given(places, lengths)
def test_the_chosen_rung_is_the_first_in_order_that_fits(where, length):
    model, gpus = where
    found = recommend(model, gpus=gpus, length=length)
    fitting = [each for each in found.candidates if each.fits]
    assert found.chosen == (fitting[0] if fitting else None)
    assert not any(each.fits for each in found.earlier)
    assert (*found.earlier, *([found.chosen] if found.chosen else []), *found.later) == found.candidates
    assert (found.remedies == ()) == bool(fitting)


@settings(max_examples=25, deadline=None)
@given(places, lengths, lengths)
def test_a_shorter_length_never_needs_a_less_simple_rung(where, one, other):
    model, gpus = where
    short, long = (recommend(model, gpus=gpus, length=length) for length in sorted((one, other)))
    if long.chosen is not None:
        assert short.chosen is not None
        assert short.chosen.order <= long.chosen.order


@pytest.mark.parametrize("trainer", ["highwater", "trinity"])
def test_what_is_predicted_is_what_predict_says_and_fits_where_the_upper_end_does(trainer):
    asked = {"model": "Qwen3-4B", "gpus": "2xA100-80GB", "trainer": trainer, "allocator": "expandable", "host_memory": "400GiB"}
    found = recommend(length=50_000, **asked)
    for sequences in (2, 1):
        at_length, longest = (
            {each.cell: each for each in highwater.predict(length=n, sequences_per_micro_batch=sequences, **asked).cells}
            for n in (50_000, None)
        )
        ours = {each.cell: each for each in found.candidates if each.is_lowered is (sequences == 1)}
        assert ours.keys() == at_length.keys()
        for cell, each in ours.items():
            predicted = at_length[cell]
            assert each.fits == bool(predicted.capacity_tokens)
            assert each.headroom_bytes == predicted.headroom_bytes
            assert each.capacity_tokens == max(longest[cell].capacity_tokens, predicted.capacity_tokens)
            assert (each.source, each.capacity_source) == ("predicted", "predicted")
            if trainer == "highwater":
                assert predicted.interval is not None
                assert each.headroom_bytes == found.device_bytes - predicted.interval.high_bytes


def test_the_upper_end_decides_where_the_prediction_itself_would_fit():
    edge = next(
        each for each in highwater.predict("Qwen3-4B", gpus="H200-141GB").cells if each.likely_tokens > each.capacity_tokens
    )
    found = recommend("Qwen3-4B", gpus="H200-141GB", length=edge.likely_tokens, sequences_per_micro_batch=1)
    assert not next(each for each in found.candidates if each.cell == edge.cell).fits


def test_the_command_that_is_named_predicts_that_cell():
    here = {"gpu_memory": "60GiB", "margin": "2GiB", "reserved": "5GiB", "host_memory": "200GiB"}
    asked = {**H20S, **here, "strategy": "fsdp", "state_bytes_per_param": 12}
    for one in recommend(length="32k", **asked).candidates[::7]:
        words = parse(shlex.split(one.found_in)[1:])
        again = highwater.predict(
            words.model,
            gpus=words.cluster,
            length=words.length,
            gpu_memory=words.gpu_memory,
            host_memory=words.host_memory,
            reserved=words.reserved,
            state_bytes_per_param=words.state_bytes_per_param,
            allocator=words.allocator,
            loss=words.loss,
            **({"offload": True} if getattr(words, "offload", False) else {"offload": False}),
            strategy=getattr(words, "strategy", "fsdp2"),
            margin=words.margin,
            ulysses=words.ulysses,
            sequences_per_micro_batch=getattr(words, "sequences_per_micro_batch", 1),
        )
        predicted = next(each for each in again.cells if each.cell == one.cell)
        assert predicted.headroom_bytes == one.headroom_bytes


@pytest.mark.parametrize("length", [2, 4097, 65_536, 100_001])
def test_the_default_token_budget_holds_two_sequences_and_the_lowered_one_a_single_one(length):
    for each in recommend(length=length, **H20S).candidates:
        degree, count = each.cell.layout.ulysses_degree, 1 if each.is_lowered else 2
        assert each.token_budget_tokens == -(-count * length // degree)
        assert each.cell.settings.sequences_per_micro_batch == count
        by_budget = msgspec.structs.replace(each.cell.settings, token_budget_tokens=each.token_budget_tokens)
        assert by_budget.sequences(length, context_degree=degree) >= count


def test_a_lowered_budget_says_that_it_costs_more_micro_batches():
    found = recommend("Qwen3-4B", gpus="1xH20-96GB", length="32k", loss="full")
    assert found.chosen is not None
    text = "\n".join(map(plain_table, recommendation_tables(found)))
    assert found.chosen.is_lowered
    assert "below the default, so fewer tokens in each of more micro-batches" in text
    assert "2 times the micro-batches" in text


def test_a_budget_of_one_sequence_and_of_one_pair_cannot_be_lowered():
    assert not any(each.is_lowered for each in recommend(length="8k", sequences_per_micro_batch=1, **H20S).candidates)
    pairs = recommend(length="8k", objective="rw", **H20S)
    assert {each.cell.settings.sequences_per_micro_batch for each in pairs.candidates} == {2}
    four = recommend(length="8k", objective="rw", sequences_per_micro_batch=4, **H20S)
    assert {each.cell.settings.sequences_per_micro_batch for each in four.candidates} == {2, 4}


def test_each_earlier_rung_says_what_it_lacks():
    found = recommend(length="64k", margin="3GiB", host_memory="100GiB", **H20S)
    assert found.earlier
    for each in found.candidates:
        if each.fits:
            assert (each.lacks_bytes, each.lacks_of) == (None, None)
            assert each.headroom_bytes >= 3 * GIB
        elif each.lacks_of == "device":
            assert each.lacks_bytes == 3 * GIB - each.headroom_bytes > 0
        else:
            assert each.cell.settings.offload
            assert each.lacks_bytes == each.host_bytes - 100 * GIB > 0
    assert {each.lacks_of for each in found.candidates} == {None, "device", "host"}
    first = found.earlier[0]
    text = "\n".join(map(plain_table, recommendation_tables(found)))
    assert f"lacks {format_bytes(first.lacks_bytes)} of a GPU" in text
    assert format_tokens(first.capacity_tokens) in text


def test_the_next_rungs_are_those_that_train_longer():
    found = recommend(length="64k", **H20S)
    assert found.chosen is not None
    bought = next_rungs(found)
    capacities = [found.chosen.capacity_tokens, *(each.capacity_tokens for each in bought)]
    assert len(bought) == 3
    assert capacities == sorted(set(capacities))
    table = next(table for table in recommendation_tables(found) if table.title == "what the next would buy")
    assert table.rows[0][-2:] == ("71,680*", "+6,144")


def test_gpus_for_rollout_are_not_the_trainers():
    found, alone = recommend(length="16k", rollout_gpus=2, **H20S), recommend("Qwen3-8B", gpus="2xH20-96GB", length="16k")
    assert (found.gpus, found.rollout_gpus) == (2, 2)
    assert found.candidates == alone.candidates
    text = plain_table(rung_list(found))
    assert "on 2 x H20-96GB, 95.10 GiB each, besides 2 for rollout" in text
    assert "every count of GPUs is the trainer's, 2: 2 of 4 roll out" in text


@pytest.mark.parametrize(("gpus", "rollout", "hint"), [(4, 4, "3"), (4, 9, "3"), (4, -1, "0"), (1, 1, None)])
def test_rollout_has_to_leave_the_trainer_a_gpu(gpus, rollout, hint):
    with pytest.raises(UsageError) as refused:
        recommend("Qwen3-0.6B", gpus=f"{gpus}xH20-96GB", length="8k", rollout_gpus=rollout)
    mended = 0 if hint is None else int(hint)
    assert refused.value.hint.startswith("leave `--rollout-gpus` out" if hint is None else f"use `--rollout-gpus {hint}`")
    assert recommend("Qwen3-0.6B", gpus=f"{gpus}xH20-96GB", length="8k", rollout_gpus=mended).chosen


def by_label(found: Recommendation) -> dict[str, Candidate]:
    return {each.label: each for each in found.candidates}


def test_what_a_study_measured_is_taken_and_the_rest_predicted():
    found = recommend(length=150_000, studies=[STUDY], **HERE)
    each = by_label(found)
    for label in ("vanilla, 1 GPU", "Env, 1 GPU"):
        assert (each[label].source, each[label].capacity_source, each[label].capacity_tokens) == ("measured", "measured", 196_608)
        assert each[label].found_in == str(STUDY)
        assert each[label].fits
    assert each["Env+chunked, 1 GPU"].source == "predicted"
    assert found.chosen == each["vanilla, 1 GPU"]
    text = plain_table(rung_list(found))
    assert f"measured: {STUDY}" in text
    assert {row[2] for row in rung_list(found).rows} == {"measured", "predicted"}


def test_a_measured_answer_overrules_a_prediction_both_ways():
    predicted = by_label(recommend(length=190_000, **HERE))["Env, 1 GPU"]
    assert not predicted.fits, "the upper end is above what the GPU has"
    found = by_label(recommend(length=190_000, studies=[STUDY], **HERE))["Env, 1 GPU"]
    assert found.fits
    assert found.headroom_bytes == 1_328_257_433, "what the longest trial left: less than this length leaves"
    beyond = by_label(recommend(length=204_800, studies=[STUDY], **HERE))["Env, 1 GPU"]
    assert (beyond.fits, beyond.source, beyond.lacks_bytes, beyond.capacity_tokens) == (False, "measured", None, 196_608)
    tables = recommendation_tables(recommend(length=204_800, studies=[STUDY], **HERE))
    assert any("out of memory" in row and "196,608*" in row for table in tables for row in table.rows)


def test_between_the_two_trials_of_an_edge_nobody_measured_so_it_is_predicted():
    found = by_label(recommend(length=200_000, studies=[STUDY], **HERE))["Env, 1 GPU"]
    assert found.source == "predicted"


def changed(**fields) -> Study:
    """The study with another answer for Env."""
    study = highwater.open_study(STUDY)
    answers = tuple(
        msgspec.structs.replace(answer, **fields) if answer.cell.settings.label == "Env" else answer for answer in study.answers
    )
    return msgspec.structs.replace(study, answers=answers, trials=())


def told(study: Study, length: int) -> Candidate | None:
    return as_measured(by_label(recommend(length=length, **HERE))["Env, 1 GPU"], study, length)


@pytest.mark.parametrize("limit", ["ceiling", "time", "inconclusive"])
def test_a_search_that_no_memory_ended_tells_nothing_of_longer_lengths(limit):
    study = changed(limit=limit, does_not_fit_tokens=None)
    assert told(study, 196_608).fits
    assert told(study, 204_800) is None


def test_a_capacity_that_no_memory_ended_is_shown_as_the_least():
    study = STUDY.with_name("qwen3-0.6b-79gib-chunked.jsonl")
    found = recommend(length=100_000, studies=[study], **HERE)
    chunked = by_label(found)["Env+chunked, 1 GPU"]
    assert (chunked.source, chunked.capacity_tokens, chunked.is_at_least) == ("measured", 262_144, True)
    rows = {row[0]: row for row in rung_list(found).rows}
    assert "≥262,144*" in rows["Env+chunked"]
    assert not by_label(recommend(length=100_000, studies=[STUDY], **HERE))["Env, 1 GPU"].is_at_least
    most = recommend("Qwen3-0.6B", gpus="8xH200-141GB", length="1m").candidates[-1]
    assert (most.capacity_tokens, most.is_at_least) == (1024**2, True)


def test_headroom_is_what_the_shortest_longer_fit_left():
    study = highwater.open_study(STUDY)
    fits = [t for t in study.trials if t.spec.settings.label == "Env" and t.result.outcome is Outcome.FIT]
    for length in sorted({trial.spec.length_tokens for trial in fits}):
        left = min(t.result.headroom_bytes for t in fits if t.spec.length_tokens == length)
        assert told(study, length).headroom_bytes == told(study, length - 1).headroom_bytes == left


def test_little_headroom_comes_with_the_flag_that_asks_for_more():
    def shown(**more):
        return plain_table(recommendation_tables(recommend(length="64k", **H20S, **more))[0])

    assert "142.5 MiB of each GPU, at least; `--margin 2GiB` asks for more" in shown()
    assert "--margin" not in shown(margin="2GiB")


def test_what_is_proven_of_memory_alone_is_labelled():
    study = changed(
        memory_only=MemoryOnlyFit(length_tokens=300_000, peak_reserved_bytes=None, headroom_bytes=7), does_not_fit_tokens=304_000
    )
    found = told(study, 250_000)
    assert (found.fits, found.is_memory_only, found.headroom_bytes) == (True, True, 7)
    assert not told(study, 196_608).is_memory_only
    assert not told(study, 304_000).fits


def test_host_memory_that_ran_out_is_named():
    assert told(changed(limit="host_memory"), 204_800).lacks_of == "host"


def test_a_trial_of_the_very_length_counts_before_the_bracket():
    study = highwater.open_study(STUDY)
    failed = next(t for t in study.trials if t.spec.settings.label == "Env" and t.result.outcome is Outcome.OUT_OF_MEMORY)
    spec = msgspec.structs.replace(failed.spec, length_tokens=100_000)
    again = msgspec.structs.replace(study, trials=(*study.trials, msgspec.structs.replace(failed, spec=spec)))
    assert told(study, 100_000).fits
    assert not told(again, 100_000).fits


def test_an_answer_that_is_not_there_yet_tells_nothing():
    study = highwater.open_study(STUDY)
    assert told(msgspec.structs.replace(study, answers=()), 8192) is None
    assert told(changed(capacity_tokens=None, does_not_fit_tokens=None, limit="inconclusive"), 8192) is None


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"model": "Qwen3-1.7B"}, "its model is Qwen3-0.6B"),
        ({"gpus": "A100-80GB"}, "its GPUs are NVIDIA H200"),
        ({"gpu_memory": None}, "its trials had 79.15 GiB of each GPU, and 139.80 GiB are asked about"),
        ({"reserved": "20GiB"}, "its trials had 79.15 GiB of each GPU, and 59.15 GiB are asked about"),
        ({"margin": "1GiB"}, "its lengths leave 0.0 MiB, and 1.00 GiB are asked for"),
        ({"gpus": "2xH200-141GB"}, "no rung that is asked about has an answer for this length on 2 GPUs"),
        ({"objective": "grpo"}, "no rung that is asked about"),
    ],
)
def test_a_study_of_something_else_is_not_used_and_a_note_says_why(asked, why):
    found = recommend(length="8k", studies=[STUDY], **(HERE | asked))
    assert {each.source for each in found.candidates} == {"predicted"}
    assert found.notes[-1].startswith(f"{STUDY} is not used: {why}")


def test_simulated_trials_and_trials_on_the_cpu_measured_no_gpu():
    study, room = highwater.open_study(STUDY), Room(device_bytes=84_986_665_369)
    for change, why in (({"simulated": True}, "simulated"), ({"device": "cpu"}, "on the CPU")):
        other = msgspec.structs.replace(study, question=msgspec.structs.replace(study.question, **change))
        assert why in obstacle(other, model=study.question.model, device_name="H200-141GB", room=room, margin_bytes=0)


def test_a_step_is_timed_by_a_trial_and_unknown_without_one():
    assert {each.step_time for each in recommend(length="8k", **HERE).candidates} == {None}
    found = by_label(recommend(length=196_608, studies=[STUDY], **HERE))
    step = found["Env, 1 GPU"].step_time
    assert (step.source, step.tokens_per_s, step.step_tokens) == ("measured", pytest.approx(4901.8, abs=0.1), 2 * 196_608)
    assert step.time_s == pytest.approx(2 * 196_608 / step.tokens_per_s)
    assert found["Env+chunked, 1 GPU"].step_time is None


def test_a_step_of_another_length_is_predicted_at_the_same_flops_a_second_and_says_so():
    found = recommend(length=100_000, studies=[STUDY], **HERE)
    step = by_label(found)["Env, 1 GPU"].step_time
    shape, cell = load_model("Qwen3-0.6B").shape, by_label(found)["Env, 1 GPU"].cell
    measured = step.measured_length_tokens
    here, there = (step_flops(shape, length_tokens=n, sequences=2, settings=cell.settings) for n in (100_000, measured))
    assert step.source == "predicted"
    assert here / step.time_s == pytest.approx(there * step.tokens_per_s / (2 * measured))
    assert "tokens/s, measured at" in "\n".join(map(plain_table, recommendation_tables(found)))


def test_yarn_begins_past_the_native_length_and_comes_with_a_warning():
    assert recommend(length=40_960, **H20S).yarn is None
    found = recommend(length=65_536, **H20S)
    assert found.yarn.factor == 65_536 / 40_960
    assert found.yarn.rope_parameters == {
        "rope_theta": 1_000_000,
        "rope_type": "yarn",
        "factor": 1.6,
        "original_max_position_embeddings": 40_960,
    }
    assert found.yarn.max_position_embeddings == 65_536
    text = "\n".join(map(plain_table, recommendation_tables(found)))
    assert "numerical stability" in text
    assert "numerical stability" not in "\n".join(map(plain_table, recommendation_tables(recommend(length=40_960, **H20S))))


def test_a_length_that_positions_cannot_reach_is_refused():
    with pytest.raises(UsageError) as refused:
        recommend("Llama-3.1-8B", gpus="8xH200-141GB", length="256k")
    assert "--rope yarn" in refused.value.hint
    assert recommend("Llama-3.1-8B", gpus="8xH200-141GB", length="256k", rope="yarn").yarn is not None


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


@pytest.mark.parametrize("length", ["64k", "1m"])
def test_the_whole_noun_survives_json(length):
    found = recommend(length=length, **H20S)
    assert from_json(to_json(found), Recommendation) == found

"""Adapters, block-sparse attention and attention in head groups, as they are asked for."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import highwater
from highwater.api.prediction import predict
from highwater.errors import HighwaterError, UsageError
from highwater.memory.formula.formula import upper_footprint
from highwater.memory.formula.layers import Step, working_set_bytes
from highwater.model.held_bytes import step_flops
from highwater.model.model import load_model
from highwater.nouns.layout import Layout
from highwater.nouns.objective import (
    ATTENTION,
    Lora,
    adapter_parameters,
    nf4_bytes,
    refuse_no_target,
    saved_by_base,
)
from highwater.nouns.request import request_from, setting_flags
from highwater.nouns.settings import Settings, settings_in_words
from highwater.nouns.sparse_pattern import SparsePatternConfig
from highwater.nouns.training import TrainingRequest
from highwater.nouns.trial import Outcome, TrialSpec
from highwater.recommendation.training_settings import adapter_notes, chosen_trial
from highwater.speed import predicted_step
from highwater.trainers.targets import TARGETS, configured
from highwater.trials.probe import probe


@pytest.mark.parametrize("name", ["lm_head", "norm", "embed_tokens", "self_attn", "nonsense"])
def test_a_name_that_is_no_linear_layers_is_refused_with_those_that_are(name):
    with pytest.raises(UsageError, match=f"no linear layer {name}") as refused:
        highwater.predict("Qwen3-0.6B", gpus="1xH200-141GB", lora=4, lora_targets=f"q_proj,{name}")
    assert "q_proj" in refused.value.hint


def test_a_family_whose_names_nobody_read_is_refused_where_none_is_known():
    unread = load_model("Qwen3-0.6B").shape.replace(model_type="unread")
    refuse_no_target(unread, Lora(rank=4, alpha=8, targets="q_proj,query_key_value"))
    with pytest.raises(UsageError, match="no linear layer query_key_value"):
        refuse_no_target(unread, Lora(rank=4, alpha=8, targets="query_key_value"))


OF_EXPERTS = "q_proj,gate_proj,up_proj,down_proj"


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"lora": 12}, "adapters of rank 12 on experts"),
        ({"lora_targets": "gate_proj,down_proj"}, "are one parameter"),
        ({"lora_merged": True, "save_hf": "last"}, "are not merged here"),
        ({"trainer": "trl"}, "which are predicted for highwater's engine"),
    ],
)
def test_what_adapters_on_experts_do_not_go_with_is_refused(asked, problem):
    usual = {"gpus": "8xH100-80GB", "lora": 8, "lora_targets": OF_EXPERTS}
    with pytest.raises(UsageError, match=problem) as refused:
        highwater.predict("Qwen3-30B-A3B", **{**usual, **asked})
    assert refused.value.hint


def test_no_trainers_configuration_has_adapters_on_experts():
    adapted = {"length": 8192, "lora": 8, "lora_targets": OF_EXPERTS}
    found = highwater.recommend("Qwen3-30B-A3B", gpus="8xH100-80GB", **adapted)
    for target in TARGETS:
        with pytest.raises(UsageError, match=r"experts|adapters"):
            configured(target, found, found.candidates[0], model="Qwen3-30B-A3B")


@pytest.mark.parametrize("model", ["Qwen3-30B-A3B", "gpt-oss-20b"])
def test_adapters_beside_experts_are_on_attention_and_that_is_said(model):
    found = highwater.predict(model, gpus="8xH100-80GB", lora=4)
    assert any("on attention alone" in note for note in found.notes)
    assert any("not in MXFP4" in note for note in found.notes) == (model == "gpt-oss-20b")
    named = highwater.predict(model, gpus="8xH100-80GB", lora=4, lora_targets=",".join(ATTENTION))
    assert found.cells == named.cells
    assert any(cell.capacity_tokens for cell in found.cells)


@pytest.mark.parametrize("trainer", ["highwater", "axolotl", "trl"])
def test_a_packed_model_is_sharded_by_this_engine_and_by_others_if_asked(trainer):
    asked = {"gpus": "4xH100", "lora": 32, "lora_base": "nf4", "length": "64k", "trainer": trainer}
    usual, copied, shared = (predict("Llama-3.1-8B", copies=n, **asked) for n in (None, 4, 1))
    is_ours = trainer == "highwater"
    assert usual.cells == (shared if is_ours else copied).cells
    for each, whole in zip(shared.cells, copied.cells, strict=True):
        assert each.headroom_bytes > whole.headroom_bytes
    for found, said in ((usual, "`--copies 1`"), (shared, "nobody measured")):
        assert any(said in note for note in found.notes) != is_ours


def test_a_base_in_four_bits_takes_a_quarter_and_is_labelled():
    """Source: bitsandbytes' 0.5 bytes a number, and one and 4 bytes for each 64 and 16,384."""
    assert nf4_bytes(4096 * 4096) == 2**23 + 2**18 + 4 * 2**10 + 4
    settings = Settings(lora=32, lora_base="nf4")
    assert settings.label == "LoRA-32 + NF4"
    shape = load_model("Llama-3.1-8B").shape
    lora = settings.adapters
    assert lora is not None
    linear = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
    saved = saved_by_base(shape, lora, element=2)
    assert saved == pytest.approx(linear * (2 - 0.5 - 1 / 64), rel=2e-4)


def test_the_usual_weight_is_the_same_question_as_none():
    asked = {"model": "Qwen3-0.6B", "lora": 4}
    usual, same, other = (
        request_from({**asked, **more}, keywords=True).settings
        for more in ({}, {"lora_alpha": 8}, {"lora_alpha": 6})
    )
    assert usual == same
    assert other.label.endswith("LoRA-4 + alpha-6")
    assert usual.slug.endswith("lora-4")


def test_adapters_are_as_many_numbers_as_peft_says_of_llama_and_has_on_experts():
    """Source: 83,886,080 trainable parameters of rank 32 on all linear layers of Llama-3.1-8B."""
    shape = load_model("Llama-3.1-8B").shape
    assert adapter_parameters(shape, Lora(rank=32, alpha=64)) == 83_886_080
    only = Lora(rank=16, alpha=32, targets="q_proj,v_proj")
    assert adapter_parameters(shape, only) == 32 * 16 * (4096 + 4096 + 4096 + 1024)
    experts, shape = (
        Lora(rank=8, alpha=16, targets=OF_EXPERTS[7:]),
        load_model("Qwen3-30B-A3B").shape,
    )
    of_expert = 16 * (2048 + 1536) + 8 * (768 + 2048)  # gate and up are one parameter, of rank 16
    assert adapter_parameters(shape, experts) == 48 * 128 * of_expert


def test_a_frozen_weight_has_no_gradient_to_compute():
    shape = load_model("Llama-3.1-8B").shape
    asked = {"length_tokens": 4096, "sequences": 1}
    whole = step_flops(shape, **asked, settings=Settings())
    adapters = step_flops(shape, **asked, settings=Settings(lora=32))
    saved = 2 * shape.matmul_parameters * 4096 - 6 * 83_886_080 * 4096
    assert whole - adapters == saved
    reference = step_flops(shape, **asked, settings=Settings(lora=32, objective="grpo"))
    assert reference - adapters == step_flops(shape, **asked, settings=Settings()) // 3


NATIVE = 32_768


def trial(length_tokens: int, **settings: object) -> TrialSpec:
    request = request_from({"model": "tiny", "device": "cpu", "memory": "2GiB"}, keywords=True)
    asked = TrainingRequest(data=("data.jsonl",), length=256, steps=1, output="run")
    chosen = chosen_trial(request, asked, probe()).spec
    changed = msgspec.structs.replace(chosen.settings, **settings)
    return msgspec.structs.replace(chosen, length_tokens=length_tokens, settings=changed)


@pytest.mark.parametrize(
    ("length_tokens", "settings", "is_noted"),
    [
        (2 * NATIVE, {"lora": 4}, True),
        (NATIVE, {"lora": 4}, False),
        (2 * NATIVE, {"lora": 4, "lora_merged": True, "save_hf": "last"}, False),
        (2 * NATIVE, {}, False),
    ],
)
def test_adapters_trained_with_yarn_are_said_not_to_have_it(length_tokens, settings, is_noted):
    notes = adapter_notes(trial(length_tokens, **settings))
    assert any("the YaRN of factor 2 that" in note for note in notes) == is_noted


CELLS = Path(__file__).parents[2] / "docs/results/lora/cells"
TRIALS = json.loads((CELLS / "trials.json").read_text())
PREDICTED = json.loads((CELLS / "predicted.json").read_text())
ON_H100S = json.loads((CELLS.parent / "h100.json").read_text())
FITS = [trial for trial in TRIALS if Outcome(trial["result"]["outcome"]).is_fit]
TOLERANCE = 0.0005


@pytest.mark.parametrize(
    "trial", FITS + ON_H100S, ids=lambda each: f"{each['cell']}-{each['length_tokens']}"
)
def test_the_formula_has_the_peak_of_a_recorded_trial(trial):
    assert_peak(trial, TOLERANCE)


def assert_peak(recorded: dict[str, Any], tolerance: float) -> None:
    spec, kinds = recorded["spec"], tuple[Settings, Layout]
    settings, layout = msgspec.convert((spec["settings"], spec["layout"]), kinds, strict=False)
    shape = load_model(spec["model_name"]).shape
    found = upper_footprint(Step(shape, settings, layout, length_tokens=spec["length_tokens"]))
    ranks = recorded["result"]["ranks"]
    measured = max(rank["memory"]["peak_allocated_bytes"] for rank in ranks)
    assert found.allocated_bytes == pytest.approx(measured, rel=tolerance), found.peak.name


@pytest.mark.parametrize("cell", sorted({trial["cell"] for trial in TRIALS}))
def test_what_was_said_to_fit_does_and_the_capacity_is_within_a_step(cell):
    tried = [trial for trial in TRIALS if trial["cell"] == cell]
    lengths = [trial["length_tokens"] for trial in FITS if trial["cell"] == cell]
    said = PREDICTED[cell]
    for trial in tried:
        is_memory = Outcome(trial["result"]["outcome"]).is_memory
        assert not is_memory or trial["length_tokens"] > said["capacity_tokens"]
    assert said["capacity_tokens"] <= max(lengths) <= said["likely_tokens"]


SPARSE, USUAL = {"attention": "block_sparse"}, "dilated_sparse"


def test_a_pattern_is_what_the_settings_say_with_the_published_names():
    named = {"block_size": 256, "local_window_size": 1024, "global_tokens": 32}
    named["pattern_type"] = "global_local"
    request = request_from({"model": "Qwen3-0.6B", **SPARSE, **named})
    assert request.settings.pattern == SparsePatternConfig(**named)
    assert Settings().pattern is None


@pytest.mark.parametrize("ratio", ["0.05", 0.05, 1, "adaptive"])
def test_a_ratio_is_typed_or_given_as_a_number(ratio):
    request = request_from({"model": "Qwen3-0.6B", **SPARSE, "sparsity_ratio": ratio})
    pattern = request.settings.pattern
    assert pattern.sparsity_ratio == (ratio if ratio == "adaptive" else float(ratio))


def test_a_label_says_what_is_kept_where_it_is_not_the_default():
    settings = Settings(attention="block_sparse", sparsity_ratio=0.02, block_size=256)
    assert settings.label == "block-sparse + kept-0.02 + block-256"
    assert Settings(attention="block_sparse").label == "block-sparse"
    flags = " ".join(setting_flags(settings))
    assert flags.endswith("--attention block_sparse --sparsity-ratio 0.02 --block-size 256")


@pytest.mark.parametrize(
    ("pattern", "values", "said", "hint"),
    [
        (None, {"block_size": 64}, "dense attention keeps every block", "--attention block_sparse"),
        (None, {"sparsity_ratio": 0.5}, "dense attention keeps every block", "--sparsity-ratio"),
        (USUAL, {"sparsity_ratio": 1.5}, "sparsity_ratio 1.5", "0.05"),
        (USUAL, {"sparsity_ratio": 0}, "sparsity_ratio 0", "0.05"),
        (USUAL, {"sparsity_ratio": "few"}, "'few' is not a share", "0.05"),
        (USUAL, {"block_size": 0}, "block_size is 0", "1 or more"),
        (USUAL, {"block_size": 8192}, "4096 is the most", "4096"),
        (USUAL, {"global_tokens": -1}, "global_tokens is -1", "0 or more"),
        ("local_window", {"sparsity_ratio": 0.1}, "says what is kept", "--sparsity-ratio"),
        (USUAL, {"local_window_size": 64}, "dilated_sparse does not read it", "--local-window"),
        (USUAL, {"global_tokens": 7}, "dilated_sparse does not read it", "global_local"),
        ("local_window", {"global_tokens": 7}, "local_window does not read it", "global_local"),
        ("strided", {"local_window_size": 64}, "strided does not read it", "out"),
        ("block_top_k", {}, "no kernel on GPUs", "dilated_sparse"),
        (USUAL, {"block_size": 100}, "a multiple of 64", "`--block-size 128`"),
        (USUAL, {"exact": True}, "are not traced", "leave `--exact` out"),
        (USUAL, {"recompute": "all-but-attention"}, "not kept in recomputation", "layer"),
    ],
)
def test_what_no_pattern_can_be_is_refused(pattern, values, said, hint):
    kept = {} if pattern is None else {**SPARSE, "pattern_type": pattern}
    with pytest.raises(HighwaterError) as refused:
        predict("Qwen3-0.6B", gpus="1xH100-80GB", **kept, **values)
    assert said in refused.value.problem
    assert hint in (refused.value.hint or "")


def test_a_prediction_says_that_the_model_is_another_one():
    def noted(**asked: Any) -> list[str]:
        notes = predict("Qwen3-0.6B", gpus="1xH100-80GB", **asked).notes
        return [note for note in notes if "changes the model" in note]

    (note,) = noted(**SPARSE)
    assert note.startswith("block-sparse attention")
    assert noted() == []


def test_a_ring_of_gpus_is_refused_with_a_layout_that_works():
    with pytest.raises(UsageError, match="in a ring of GPUs is not predicted") as refused:
        predict("Qwen3-0.6B", gpus="2xH100-80GB", ulysses=[1], ring=[2], **SPARSE)
    assert "`--ulysses 2 --ring 1`" in (refused.value.hint or "")
    predict("Qwen3-0.6B", gpus="2xH100-80GB", ulysses=[2], ring=[1], **SPARSE)


def test_flops_of_attention_are_those_of_the_pairs_that_are_kept():
    shape = load_model("Qwen3-0.6B").shape

    def flops(**settings: Any) -> int:
        return step_flops(shape, length_tokens=8192, sequences=1, settings=Settings(**settings))

    linear = 6 * shape.matmul_parameters * 8192
    dense, sparse = flops() - linear, flops(**SPARSE, sparsity_ratio=0.05) - linear
    whole = flops(**SPARSE, sparsity_ratio=1) - linear
    assert whole == pytest.approx(dense, rel=2e-4), "a causal half, its diagonal counted"
    # of 64 rows of blocks 20 keep one, 20 two, 20 three, 4 four: 72 whole ones and 64 diagonals
    kept = (72 * 128**2 + 64 * 128 * 129 // 2) / (8192 * 8193 // 2)
    assert sparse / whole == pytest.approx(kept, rel=1e-9)


RECORDED = sorted((Path(__file__).parents[2] / "docs/results/attention/training").glob("*.json"))
SPARSE_TOLERANCE = 0.0025


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_formula_has_the_peak_of_a_recorded_step(path):
    assert_peak(json.loads(path.read_text()), SPARSE_TOLERANCE)


ONE, FOUR = {"gpus": "1xH100-80GB"}, {"gpus": "4xH100-80GB"}


@pytest.mark.parametrize(
    ("model", "groups", "asked", "problem"),
    [
        ("Llama-3.1-8B", 3, ONE, "8 key/value heads"),
        ("Llama-3.1-8B", 16, ONE, "8 key/value heads"),
        ("Qwen3-30B-A3B", 8, FOUR, "4 key/value heads"),
        ("Llama-3.1-8B", 4, FOUR | {"ring": 2}, "a ring passes on"),
        ("Llama-3.1-8B", 4, FOUR | {"ulysses": 4}, "4 equal groups"),
        ("Llama-3.1-8B", 8, FOUR | {"ulysses": 2}, "8 equal groups"),
        ("gemma-2-2b", 2, ONE, "family gemma2"),
        ("gpt-oss-20b", 2, FOUR, "family gpt_oss"),
        ("Phi-4", 2, ONE, "family phi3"),
    ],
)
def test_heads_that_make_no_such_groups_are_refused_with_a_hint(model, groups, asked, problem):
    asked = {**asked, "attention_head_groups": groups}
    with pytest.raises(HighwaterError, match=problem) as refused:
        highwater.predict(model, **asked)
    words = refused.value.hint.split("`")[1].split()
    offered = dict(zip(words[::2], words[1::2], strict=False))
    if "out" in refused.value.hint:
        asked = {name: value for name, value in asked.items() if name != "attention_head_groups"}
    else:
        asked |= {name[2:].replace("-", "_"): int(value) for name, value in offered.items()}
    assert highwater.predict(model, **asked).cells


def test_groups_of_the_heads_that_ranks_share_are_predicted():
    found = highwater.predict("Llama-3.1-8B", **FOUR, attention_head_groups=2, ulysses=4)
    assert found.cells[0].cell.settings.label == "head-groups-2"
    assert found.cells[0].cell.words.startswith("2 head groups")
    assert "attention in 2 head groups" in settings_in_words(found.cells[0].cell.settings)


def test_a_layer_of_an_8b_takes_little_more_than_half_in_four_groups():
    shape = load_model("Llama-3.1-8B").shape

    def per_token(groups: int) -> float:
        settings = Settings(loss="chunked", lora=32, attention_head_groups=groups)
        one, two = (
            working_set_bytes(
                Step(shape, settings, Layout(), length_tokens=tokens).layer(shape.runs[0].kind)
            )
            for tokens in (1 << 17, 1 << 18)
        )
        return (two - one) / (1 << 17)

    assert [round(per_token(groups) / 1000) for groups in (1, 2, 4, 8)] == [90, 69, 53, 49]


def test_a_step_costs_the_projections_of_queries_keys_and_values_once_more():
    shape = load_model("Llama-3.1-8B").shape
    plain = Settings(loss="chunked")
    steps = [
        predicted_step(shape, each, Layout(gpus=4), length_tokens=1 << 16, device_name="H100-80GB")
        for each in (plain, msgspec.structs.replace(plain, attention_head_groups=4))
    ]
    assert 1 < steps[1].time_s / steps[0].time_s < 1.02

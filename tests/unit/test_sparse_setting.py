"""Block-sparse attention as a setting: what is asked, labelled, noted and refused."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from highwater.api.prediction import predict
from highwater.errors import HighwaterError, UsageError
from highwater.memory.formula.formula import footprint
from highwater.memory.formula.layers import Step
from highwater.model.footprint import step_flops
from highwater.model.model import load_model
from highwater.nouns.codec import key_of
from highwater.nouns.request import request_from, setting_flags
from highwater.nouns.settings import Settings
from highwater.nouns.sparse_pattern import SparsePatternConfig
from highwater.nouns.trial import TrialSpec

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
    assert pattern is not None
    assert pattern.sparsity_ratio == (ratio if ratio == "adaptive" else float(ratio))


def test_dense_settings_have_the_identity_that_they_had_before_there_were_others():
    dense, sparse = Settings(), Settings(attention="block_sparse")
    assert "attention" not in key_of(dense, without=())
    assert key_of(dense, without=()) == key_of(Settings(block_size=128), without=())
    assert key_of(dense, without=()) != key_of(sparse, without=())


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
TOLERANCE = 0.0025
"""Relative."""


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_formula_has_the_peak_of_a_recorded_step(path):
    document = json.loads(path.read_text())
    spec = msgspec.convert(document["spec"], TrialSpec, strict=False)
    shape = load_model(spec.model_name).shape
    found = footprint(Step(shape, spec.settings, spec.layout, length_tokens=spec.length_tokens))
    (rank,) = document["result"]["ranks"]
    measured = rank["memory"]["peak_allocated_bytes"]
    assert found.allocated_bytes == pytest.approx(measured, rel=TOLERANCE), found.peak.name

"""LoRA as it is asked for: what is refused before anything starts, and what it is called."""

import json
from pathlib import Path

import msgspec
import pytest

import highwater
from highwater.errors import UsageError
from highwater.memory.formula.formula import footprint
from highwater.memory.formula.layers import Step
from highwater.model.footprint import step_flops
from highwater.model.model import load_model
from highwater.nouns.layout import Layout
from highwater.nouns.objective import Lora, adapter_parameters, nf4_bytes, saved_by_base
from highwater.nouns.request import request_from
from highwater.nouns.settings import Settings
from highwater.nouns.training import TrainingRequest
from highwater.nouns.trial import Outcome, TrialSpec
from highwater.recommendation.training_settings import adapter_notes, chosen_trial
from highwater.trainers.targets import TARGETS, configured
from highwater.trials.probe import probe


@pytest.mark.parametrize("name", ["lm_head", "norm", "embed_tokens", "self_attn", "nonsense"])
def test_a_name_that_is_no_linear_layers_is_refused_with_those_that_are(name):
    with pytest.raises(UsageError, match=f"no linear layer {name}") as refused:
        highwater.predict("Qwen3-0.6B", gpus="1xH200-141GB", lora=4, lora_targets=f"q_proj,{name}")
    assert "q_proj" in refused.value.hint


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
    found = highwater.recommend(
        "Qwen3-30B-A3B", gpus="8xH100-80GB", length=8192, lora=8, lora_targets=OF_EXPERTS
    )
    for target in TARGETS:
        with pytest.raises(UsageError, match=r"experts|adapters"):
            configured(target, found, found.candidates[0], model="Qwen3-30B-A3B")


def test_routers_have_no_adapters_and_the_hint_names_what_has():
    with pytest.raises(UsageError, match="routers have no adapters") as refused:
        highwater.predict("Qwen3-30B-A3B", gpus="8xH100-80GB", lora=4)
    targets = refused.value.hint.split("--lora-targets ")[1].strip("`")
    found = highwater.predict("Qwen3-30B-A3B", gpus="8xH100-80GB", lora=4, lora_targets=targets)
    assert any(cell.capacity_tokens for cell in found.cells)


def test_a_packed_model_is_not_sharded_and_the_hint_works():
    asked = {"gpus": "4xH100-80GB", "lora": 32, "lora_base": "nf4", "rope": "yarn"}
    with pytest.raises(UsageError, match="not sharded") as refused:
        highwater.predict("Llama-3.1-8B", **asked)
    assert refused.value.hint == "use `--copies 4`"
    found = highwater.predict("Llama-3.1-8B", copies=4, **asked)
    shared = {each.cell.layout.ulysses_degree: each.capacity_tokens or 0 for each in found.cells}
    assert shared[4] > shared[1] > 0


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


def test_more_gpus_of_a_packed_model_are_copies_and_the_flags_work():
    asked = {"length": "128k", "lora": 16, "lora_base": "nf4", "activations": "gpu"}
    found = highwater.recommend("Llama-3.1-8B", gpus="1xRTX-4090", **asked)
    (more,) = (each for each in found.alternatives if each.kind == "more GPUs")
    flags = dict(zip(more.flags[::2], more.flags[1::2], strict=True))
    gpus, copies = flags["--gpus"], int(flags["--copies"])
    assert gpus == f"{copies}xRTX-4090"
    assert highwater.recommend("Llama-3.1-8B", gpus=gpus, copies=copies, **asked).chosen is not None


NATIVE = 32_768
"""Positions of the tiny model."""


def trial(length_tokens: int, **settings: object) -> TrialSpec:
    request = request_from({"model": "tiny", "device": "cpu", "memory": "2GiB"}, keywords=True)
    asked = TrainingRequest(data=("data.jsonl",), length=256, steps=1, output="run")
    chosen = chosen_trial(request, asked, probe()).spec
    return msgspec.structs.replace(
        chosen,
        length_tokens=length_tokens,
        settings=msgspec.structs.replace(chosen.settings, **settings),
    )


@pytest.mark.parametrize(
    ("length_tokens", "settings", "is_noted"),
    [
        (2 * NATIVE, {"lora": 4}, True),
        (NATIVE, {"lora": 4}, False),
        (2 * NATIVE, {"lora": 4, "lora_merged": True, "save_hf": "last"}, False),
        (2 * NATIVE, {}, False),
    ],
)
def test_adapters_that_are_trained_with_yarn_are_said_not_to_have_it(
    length_tokens, settings, is_noted
):
    notes = adapter_notes(trial(length_tokens, **settings))
    assert any("the YaRN of factor 2 that" in note for note in notes) == is_noted


CELLS = Path(__file__).parents[2] / "docs/results/lora/cells"
TRIALS = json.loads((CELLS / "trials.json").read_text())
PREDICTED = json.loads((CELLS / "predicted.json").read_text())
ON_H100S = json.loads((CELLS.parent / "h100.json").read_text())
FITS = [trial for trial in TRIALS if Outcome(trial["result"]["outcome"]).is_fit]
TOLERANCE = 0.0005
"""Relative."""


@pytest.mark.parametrize(
    "trial", FITS + ON_H100S, ids=lambda each: f"{each['cell']}-{each['length_tokens']}"
)
def test_the_formula_has_the_peak_of_a_recorded_trial(trial):
    spec = trial["spec"]
    settings, layout = msgspec.convert((spec["settings"], spec["layout"]), tuple[Settings, Layout])
    shape = load_model(spec["model_name"]).shape
    found = footprint(Step(shape, settings, layout, length_tokens=spec["length_tokens"]))
    ranks = trial["result"]["ranks"]
    measured = max(rank["memory"]["peak_allocated_bytes"] for rank in ranks)
    assert found.allocated_bytes == pytest.approx(measured, rel=TOLERANCE), found.peak.name


@pytest.mark.parametrize("cell", sorted({trial["cell"] for trial in TRIALS}))
def test_what_was_said_to_fit_does_and_the_capacity_is_within_a_step(cell):
    lengths = [trial["length_tokens"] for trial in FITS if trial["cell"] == cell]
    ran_out = [
        trial["length_tokens"]
        for trial in TRIALS
        if trial["cell"] == cell and Outcome(trial["result"]["outcome"]).is_memory
    ]
    said = PREDICTED[cell]
    assert not [length for length in ran_out if length <= said["capacity_tokens"]]
    assert said["capacity_tokens"] <= max(lengths) <= said["likely_tokens"]

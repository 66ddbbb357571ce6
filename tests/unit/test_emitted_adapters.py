"""LoRA in the words of verl, AReaL, Trinity-RFT and torchtitan."""

import re
import shlex

import pytest
from test_emitted_others import goal, is_a
from trainers import recorded

from highwater.errors import UsageError
from highwater.trainers import areal as areal_file
from highwater.trainers import torchtitan as torchtitan_file
from highwater.trainers import verl as verl_file
from highwater.trainers.targets import TARGETS, configured, refuse_unknown_settings
from highwater.trainers.trinity import words as trinity_file
from highwater.trainers.trl import words as trl_file

MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
EXPECTED = {
    "verl": {
        f"{MODEL}.lora_rank": 16,
        f"{MODEL}.lora_alpha": 32,
        f"{MODEL}.target_modules": "all-linear",
        f"{ACTOR}.fsdp_config.model_dtype": "fp32",
        f"{ACTOR}.strategy": "fsdp2",
        "actor_rollout_ref.rollout.load_format": "safetensors",
    },
    "areal": {
        "actor.use_lora": True,
        "actor.lora_rank": 16,
        "actor.lora_alpha": 32,
        "actor.target_modules.0": "all-linear",
        "actor.optimizer_dtype": "float32",
        "actor.weight_update_mode": "disk",
        "rollout.use_lora": True,
        "sglang.enable_lora": True,
        "sglang.max_lora_rank": 16,
    },
    "trinity": {
        "model.lora_configs.0.name": "lora",
        "model.lora_configs.0.lora_rank": 16,
        "model.lora_configs.0.lora_alpha": 32,
        "model.lora_configs.0.target_modules": "all-linear",
        "synchronizer.sync_method": "checkpoint",
        "trainer.trainer_strategy": "fsdp2",
    },
    "torchtitan": {
        "lora.rank": 16,
        "lora.alpha": 32.0,
        "lora.target_modules.0": "wqkv",
        "lora.target_modules.1": "wo",
        "lora.target_modules.2": "w1",
        "lora.target_modules.3": "w3",
        "lora.target_modules.4": "w2",
        "training.dtype": "float32",
    },
}
FILES = {
    "verl": ("verl", verl_file),
    "areal": ("areal", areal_file),
    "trinity": ("trinity-rft", trinity_file),
    "torchtitan": ("torchtitan", torchtitan_file),
}
KINDS = {"SyncMethod": "str", "any": "str"}


@pytest.mark.parametrize("target", EXPECTED)
def test_adapters_are_named_as_a_trainer_names_them(target):
    values = TARGETS[target].emit(*goal(target, "16k", lora=16)).values
    assert EXPECTED[target].items() <= values.items()
    package, file = FILES[target]
    known = recorded(package, file.VERSION)
    for name, value in EXPECTED[target].items():
        listed = re.sub(r"target_modules\.\d$", "target_modules", name)
        kind = known[listed]
        assert is_a(value, KINDS.get(kind, kind)), (name, kind)


@pytest.mark.parametrize("target", EXPECTED)
def test_without_lora_nothing_is_said_of_adapters(target):
    emitted = TARGETS[target].emit(*goal(target, "16k"))
    assert "lora" not in emitted.text.lower()


def test_layers_with_adapters_are_named_where_a_trainer_has_names():
    asked = {"lora": 16, "lora_targets": "o_proj,down_proj"}
    of_verl, of_areal, of_titan = (
        TARGETS[target].emit(*goal(target, "16k", **asked))
        for target in ("verl", "areal", "torchtitan")
    )
    assert of_verl.values[f"{MODEL}.target_modules"] == "[o_proj,down_proj]"
    assert f"{MODEL}.target_modules=[o_proj,down_proj]" in shlex.split(of_verl.command)
    names = [of_areal.values[f"actor.target_modules.{number}"] for number in range(2)]
    assert names == ["o_proj", "down_proj"]
    assert "target_modules=['wo', 'w2']" in of_titan.text
    assert not any("wqkv" in each for each in of_titan.cannot)


def test_a_packed_model_is_trls_to_load_and_the_scripts_to_pack():
    asked = {"gpus": "1xA100-80GB", "lora": 16, "lora_base": "nf4"}
    emitted = TARGETS["trl"].emit(*goal("trl", "16k", **asked))
    known = recorded("trl", trl_file.VERSION)
    expected = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "use_bnb_nested_quant": True,
        "bnb_4bit_quant_storage": "bfloat16",
    }
    assert expected.items() <= emitted.values.items()
    assert all(is_a(value, known[f"sft.{name}"]) for name, value in expected.items())
    beside = TARGETS["accelerate"].emit(*goal("accelerate", "16k", **asked))
    assert any("packed in NF4" in each for each in beside.cannot)
    plain = TARGETS["trl"].emit(*goal("trl", "16k", **asked | {"lora_base": "bf16"}))
    assert not expected.keys() & plain.values.keys()


def test_an_alpha_that_is_no_whole_number_is_torchtitans_alone():
    asked = {"lora": 8, "lora_alpha": 12.5}
    assert TARGETS["torchtitan"].emit(*goal("torchtitan", "16k", **asked)).values["lora.alpha"] == (
        12.5
    )
    for target, name in (("verl", "verl"), ("areal", "AReaL"), ("trinity", "Trinity-RFT")):
        with pytest.raises(UsageError, match=f"{name}'s lora_alpha is a whole") as refused:
            TARGETS[target].emit(*goal(target, "16k", **asked))
        assert refused.value.hint == "use `--lora-alpha 12`"
        assert TARGETS[target].emit(*goal(target, "16k", **asked | {"lora_alpha": 12}))


@pytest.mark.parametrize(
    ("target", "changes", "said"),
    [
        ("trinity", {"lora_targets": "q_proj,v_proj"}, "no adapters on layers by their names"),
        ("trinity", {"lora": 24, "rollout_gpus": 1}, "no adapters of rank 24"),
        ("trinity", {"lora": 1024, "rollout_gpus": 1}, "no adapters of rank 1024"),
        ("verl", {"lora": 1024}, "up to rank 512, not 1024"),
        ("torchtitan", {"lora_targets": "q_proj,o_proj"}, "in one layer"),
        ("torchtitan", {"gpus": "1xL40S-48GB", "length": "64k"}, "more of each GPU"),
    ],
)
def test_adapters_that_a_trainer_cannot_have_are_refused_with_a_hint_that_works(
    target, changes, said
):
    asked = {"length": "16k", "lora": 16, "ulysses": [1]} | changes
    with pytest.raises(UsageError, match=said) as refused:
        TARGETS[target].emit(*goal(target, **asked))
    verb = refused.value.hint.partition(" ")[0]
    words = shlex.split(re.findall("`(.+?)`", refused.value.hint)[0])
    for flag, value in zip(words[::2], words[1::2], strict=True):
        name = flag.removeprefix("--").replace("-", "_")
        if verb == "leave":
            del asked[name]
        else:
            asked[name] = int(value) if name == "lora" else value
    assert TARGETS[target].emit(*goal(target, **asked))


def test_torchtitan_has_adapters_on_its_own_models_alone():
    asked = {"lora": 16, "lora_targets": "o_proj"}
    with pytest.raises(UsageError, match="models of its own") as refused:
        TARGETS["torchtitan"].emit(*goal("torchtitan", "16k", **asked), model_path="/models/mine")
    assert "`--lora 16 --lora-targets o_proj`" in refused.value.hint
    assert TARGETS["torchtitan"].emit(*goal("torchtitan", "16k"), model_path="/models/mine")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("trinity", "cannot express adapters in float32"),
        ("torchtitan", "cannot express a frozen model in bf16"),
        ("torchtitan", "they are one layer, wqkv, with one adapter of rank 16"),
        ("verl", "fsdp_config.model_dtype: float32"),
        ("areal", "actor.optimizer_dtype: float32"),
        ("areal", "untested"),
        ("verl", "LoRA has other states there, which nobody measured"),
    ],
)
def test_how_a_trainers_lora_differs_is_said(target, said):
    assert said in TARGETS[target].emit(*goal(target, "16k", lora=16)).text


@pytest.mark.parametrize("target", EXPECTED)
def test_merged_adapters_are_refused_by_name(target):
    merged = {"lora": 16, "lora_merged": True, "save_hf": "last"}
    if TARGETS[target].predicted_for == "trinity":
        with pytest.raises(UsageError, match="--lora-merged"):
            refuse_unknown_settings(target, merged)
        return
    with pytest.raises(UsageError, match="no words for --lora-merged"):
        configured(target, *goal(target, "16k", **merged), model="Qwen3-4B")

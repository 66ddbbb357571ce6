"""What is emitted for Axolotl, LLaMA-Factory and ms-swift: names and types of their packages, what
they cannot express, and what they are refused.
"""

import json
import re
import shlex
from functools import cache

import msgspec
import pytest
import yaml
from test_emitted_others import goal, is_a, rung
from trainers import recorded

from highwater.errors import UsageError
from highwater.recommendation.recommend import recommend
from highwater.trainers import axolotl as axolotl_file
from highwater.trainers import llamafactory as llamafactory_file
from highwater.trainers import ms_swift as ms_swift_file
from highwater.trainers.emitted import DATASET, Emitted, nested
from highwater.trainers.targets import TARGETS, configured, configured_choice

FILES = {"axolotl": axolotl_file, "llamafactory": llamafactory_file, "ms-swift": ms_swift_file}
NESTED = ("overrides_of_model_config", "ENV")
"""Sections whose names are the model's, or variables."""
LISTED = ("datasets", "plugins", "dataset", "lora_target_modules", "target_modules")


@cache
def emitted(target: str, length: str = "16k", **changes) -> Emitted:
    """One GPU's sequences unless it is said otherwise: LLaMA-Factory shares none."""
    ulysses = changes.pop("degree", 1)
    return TARGETS[target].emit(*goal(target, length, ulysses=[ulysses], **changes))


@pytest.mark.parametrize("target", FILES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"length": "128k", "offload": True},
        {"loss": "chunked", "optimizer": "adamw-8bit"},
        {"lora": 16},
        {"lora": 16, "lora_targets": "q_proj,v_proj"},
        {"lora": 16, "lora_base": "nf4", "gpus": "1xH200-141GB"},
        {"recompute": "none", "length": "4k"},
    ],
)
def test_every_name_and_type_is_one_of_the_trainers_own(target, changes):
    known = recorded(target, FILES[target].VERSION)
    for name, value in emitted(target, **changes).values.items():
        section = name.partition(".")[0]
        if section in NESTED:
            assert section == "ENV" or section in known
        elif section in LISTED:
            assert re.search(r"list\[|List\[|str", known[section])
        else:
            kind = re.sub("OptimizerNames|AttentionFunction|QuantizationMethod", "str", known[name])
            is_listed = kind.startswith("Literal") and str(value) in re.findall(r"\w+", kind)
            assert is_listed or is_a(value, kind), (name, known[name])


@pytest.mark.parametrize("target", FILES)
@pytest.mark.parametrize("changes", [{}, {"length": "128k"}, {"lora": 8}])
def test_the_text_says_what_the_values_say(target, changes):
    made = emitted(target, **changes)
    assert yaml.safe_load(made.text) == nested(made.values)
    lines = [line for line in made.text.splitlines() if " cannot express " in line]
    assert [line.partition(" cannot express ")[2] for line in lines] == list(made.cannot)
    assert DATASET in made.text


@pytest.mark.parametrize(
    ("target", "changes", "expected"),
    [
        ("axolotl", {}, {"adapter": "lora", "lora_target_linear": True}),
        ("axolotl", {"lora_base": "nf4"}, {"adapter": "qlora", "load_in_4bit": True}),
        ("axolotl", {"lora_targets": "o_proj"}, {"lora_target_modules.0": "o_proj"}),
        ("llamafactory", {}, {"finetuning_type": "lora", "lora_target": "all"}),
        ("llamafactory", {"lora_base": "nf4"}, {"quantization_bit": 4, "quantization_type": "nf4"}),
        ("llamafactory", {"lora_targets": "q_proj,o_proj"}, {"lora_target": "q_proj,o_proj"}),
        ("ms-swift", {}, {"tuner_type": "lora", "target_modules.0": "all-linear"}),
        ("ms-swift", {"lora_base": "nf4"}, {"quant_method": "bnb", "quant_bits": 4}),
        ("ms-swift", {"lora_targets": "o_proj"}, {"target_modules.0": "o_proj"}),
    ],
)
def test_adapters_are_named_as_a_trainer_names_them(target, changes, expected):
    gpus = {"gpus": "1xH200-141GB"} if "lora_base" in changes else {}
    values = emitted(target, lora=16, **changes, **gpus).values
    assert expected.items() <= values.items()
    rank = "lora_r" if target == "axolotl" else "lora_rank"
    assert (values[rank], values["lora_alpha"], values["lora_dropout"]) == (16, 32, 0.0)
    packed = {"load_in_4bit", "quantization_bit", "quant_bits"} & values.keys()
    assert bool(packed) is ("lora_base" in changes)


@pytest.mark.parametrize("target", FILES)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"objective": "dpo"}, "is written for sft, not for dpo"),
        ({"optimizer": "adamw-bf16"}, "has no adamw-bf16"),
        (
            {"optimizer": "adamw-8bit", "parameters": "bf16", "micro_batches": 1},
            "has no parameters in bf16",
        ),
    ],
)
def test_what_a_trainer_does_not_have_is_refused_with_a_hint_that_works(target, changes, said):
    asked = {"length": "16k", "ulysses": [1]} | changes
    with pytest.raises(UsageError, match=said) as refused:
        TARGETS[target].emit(*goal(target, **asked))
    for verb, way in re.findall("(use|leave) `(.+?)`", refused.value.hint):
        words = shlex.split(way)
        names = [flag.removeprefix("--") for flag in words[::2]]
        mended = {name: value for name, value in asked.items() if name not in names}
        if verb == "use":
            mended |= dict(zip(names, words[1::2], strict=True))
        assert TARGETS[target].emit(*goal(target, **mended))


@pytest.mark.parametrize(
    ("target", "changes", "said"),
    [
        ("llamafactory", {"ulysses": [2]}, "shares no sequence among GPUs"),
        ("llamafactory", {"ulysses": [1], "copies": [2]}, "without copies"),
        ("ms-swift", {"ulysses": [1], "copies": [2]}, "without copies"),
        ("axolotl", {"ulysses": [2], "copies": [2]}, "no copies of one ring"),
    ],
)
def test_a_layout_that_a_trainer_does_not_have_is_refused_with_a_hint_that_works(
    target, changes, said
):
    with pytest.raises(UsageError, match=said) as refused:
        TARGETS[target].emit(*goal(target, "16k", **changes))
    for way in re.findall("`(.+?)`", refused.value.hint):
        flag, degree = way.split()
        mended = changes | {flag.removeprefix("--"): [int(degree)]}
        assert TARGETS[target].emit(*goal(target, "16k", **mended))


@pytest.mark.parametrize(
    ("target", "changes", "said"),
    [
        ("axolotl", {}, "parameters in float32"),
        ("axolotl", {"degree": 2}, "2 GPUs share each sequence by context parallelism"),
        (
            "axolotl",
            {"degree": 2, "sequences_per_micro_batch": 2},
            "packed sequences, 2 in a micro-batch",
        ),
        ("axolotl", {"optimizer": "adamw-8bit"}, "moments of 8 bits that are updated in pieces"),
        ("llamafactory", {"optimizer": "adamw-8bit"}, "moments of 8 bits that are updated"),
        ("llamafactory", {"recompute": "all-but-attention"}, "--recompute all-but-attention"),
        ("ms-swift", {"strategy": "fsdp"}, "FSDP1"),
        ("ms-swift", {"loss": "chunked", "degree": 2}, "--loss chunked with shared sequences"),
        ("ms-swift", {"ring": [2]}, "ring=2: 2 GPUs share heads"),
        ("ms-swift", {"degree": 8, "gpus": "8xH200-141GB", "model": "Qwen2.5-32B"}, ""),
    ],
)
def test_what_a_trainer_cannot_express_is_said(target, changes, said):
    degree = changes.pop("degree", 1)
    made = TARGETS[target].emit(*goal(target, "16k", ulysses=[degree], **changes))
    assert any(said in each for each in made.cannot) or not said


def test_heads_and_a_ring_are_shared_as_the_number_of_key_heads_has_it():
    """Four key heads among eight GPUs: four by heads, and two such groups round a ring."""
    asked = {"gpus": "8xH200-141GB", "model": "Qwen2.5-7B"}
    made = TARGETS["ms-swift"].emit(*goal("ms-swift", "16k", ulysses=[4], ring=[2], **asked))
    assert made.values["sequence_parallel_size"] == 8
    assert made.cannot == ()
    other = TARGETS["ms-swift"].emit(*goal("ms-swift", "16k", ulysses=[2], ring=[4], **asked))
    (said,) = other.cannot
    assert said.startswith("SP=2, ring=4: 4 GPUs share heads, and 2 such groups pass")


def test_llamafactory_recomputes_by_itself_alone():
    for recompute in ("layer", "none"):
        made = emitted("llamafactory", "4k", recompute=recompute)
        launched = yaml.safe_load(made.beside["accelerate.yaml"])
        assert launched["fsdp_config"]["fsdp_activation_checkpointing"] is False
        assert launched["num_processes"] == 4
        assert made.values["disable_gradient_checkpointing"] is (recompute == "none")


def test_ms_swifts_file_of_fsdp2_has_its_own_names():
    known = recorded("ms-swift", ms_swift_file.VERSION)
    for offload in (False, True):
        found, _ = goal("ms-swift", "16k")
        made = TARGETS["ms-swift"].emit(found, rung(found, degree=1, offload=offload))
        sharding = json.loads(made.beside["fsdp.json"])
        assert sharding["fsdp"].split()[2:] == ["offload"] * offload
        for name, value in sharding["fsdp_config"].items():
            assert type(value).__name__ == known[f"fsdp_config.{name}"]


@pytest.mark.parametrize("target", FILES)
def test_one_micro_batch_a_step_is_not_left_to_the_user(target):
    one, several = (emitted(target, "4k", micro_batches=number) for number in (1, 2))
    replaced = "gradient_accumulation_steps\n"
    assert one.values["gradient_accumulation_steps"] == 1
    assert replaced in several.text
    assert replaced not in one.text


@pytest.mark.parametrize("target", FILES)
def test_a_model_is_named_by_its_id_where_it_is_filled_in(target):
    found, chosen = goal(target, "16k", ulysses=[1])
    (name,) = {"base_model", "model_name_or_path", "model"} & configured(
        target, found, chosen, model="Qwen3-4B", is_filled_in=True
    ).values.keys()
    filled_in = configured(target, found, chosen, model="Qwen3-4B", is_filled_in=True)
    assert filled_in.values[name] == "Qwen/Qwen3-4B"
    assert "MODEL_PATH" not in filled_in.text
    plain = configured(target, found, chosen, model="Qwen3-4B")
    assert name not in plain.values
    assert "$MODEL_PATH" in plain.command


def test_settings_without_whole_logits_come_before_those_with():
    found = recommend("Qwen3-8B", length="128k", gpus="8xH100-80GB")
    made = configured_choice("axolotl", found, model="Qwen3-8B")
    assert made is not None
    assert made.emitted.logits_bytes is None
    assert made.emitted.values["liger_fused_linear_cross_entropy"] is True
    shared = [each for each in found.candidates if each.cell.layout.ulysses_degree > 1]
    alone = msgspec.structs.replace(found, candidates=tuple(shared))
    roomy = configured_choice("ms-swift", alone, model="Qwen3-8B")
    assert roomy is not None
    assert roomy.emitted.logits_bytes == 10 * 151_936 * 131_072 // 4, "half of them lacks room"

"""A recommendation in other trainers' words."""

import ast
import re

import msgspec
import pytest
import yaml
from emitting import FILES, OF_OURS, emitted, goal, has_words_for, rung, ways

from highwater.errors import UsageError
from highwater.nouns.codec import from_json, to_json
from highwater.nouns.trainer import trainer_title
from highwater.recommendation.recommend import recommend
from highwater.trainers.emitted import DATASET, Emitted, nested
from highwater.trainers.targets import (
    TARGETS,
    configured,
    configured_choice,
    refuse_unknown_settings,
)
from places import ROOT

OF_VERLS_ACTOR = ("trinity", "verl", "areal")
BY_ITSELF = ("axolotl", "llamafactory", "ms-swift")
"""Trainers that read everything, their data and adapters too, from one file of YAML."""
IN_YAML = ("trinity", "areal", "trl", "accelerate", *BY_ITSELF)
NF4 = {"lora": 16, "lora_base": "nf4", "gpus": "1xH200-141GB"}
COPIED = {**NF4, "gpus": "2xH200-141GB", "copies": [2], "ulysses": [1]}
ACTOR, VERLS_MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
NARROW = {"optimizer": "adamw-8bit", "parameters": "bf16", "micro_batches": 1}
WINDOWED = {"model": "gemma-2-2b", "length": "8k"}
"""A model with windows, which torch's context parallelism refuses."""


@pytest.mark.parametrize("target", FILES)
@pytest.mark.parametrize("length", ["16k", "128k"])
def test_every_name_and_type_of_every_rung_is_one_of_the_trainers_own(target, length):
    found, _ = goal(target, length, **{"ulysses": [1]} if target == "llamafactory" else {})
    for candidate in found.candidates:
        made = TARGETS[target].emit(found, candidate)
        for name, value in made.values.items():
            assert has_words_for(target, name, value), name
        if target in IN_YAML:
            assert yaml.safe_load(made.text) == nested(made.values)
        lines = [line for line in made.text.splitlines() if " cannot express " in line]
        assert [line.partition(" cannot express ")[2] for line in lines] == list(made.cannot)
        assert (DATASET in made.text) or target not in BY_ITSELF


def ranked(prefix: str, modules: str = "target_modules") -> dict[str, object]:
    return {f"{prefix}lora_rank": 16, f"{prefix}lora_alpha": 32, f"{prefix}{modules}": "all-linear"}


def numbered(name: str, *values: str) -> dict[str, str]:
    return {f"{name}.{number}": value for number, value in enumerate(values)}


def case(target: str, expected: dict[str, object], **changes: object):
    return target, changes, expected


OF_VERL = {f"{ACTOR}.fsdp_config.model_dtype": "fp32", f"{ACTOR}.strategy": "fsdp2"}
OF_VERL |= {"actor_rollout_ref.rollout.load_format": "safetensors"}
OF_AREAL = {"actor.use_lora": True, "rollout.use_lora": True, "sglang.enable_lora": True}
OF_AREAL |= {"actor.optimizer_dtype": "float32", "actor.weight_update_mode": "disk"}
OF_AREAL |= {"sglang.max_lora_rank": 16}
OF_TRINITY = {"model.lora_configs.0.name": "lora", "synchronizer.sync_method": "checkpoint"}
OF_TRINITY |= {"trainer.trainer_strategy": "fsdp2"}
OF_TITAN = {"lora.rank": 16, "lora.alpha": 32.0, "training.dtype": "float32"}
OF_TRL = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True}
OF_TRL |= {"bnb_4bit_quant_storage": "uint8"}
SOME = {"lora_targets": "o_proj,down_proj"}


@pytest.mark.parametrize(
    ("target", "changes", "expected"),
    [
        case("verl", ranked(f"{VERLS_MODEL}.") | OF_VERL),
        case("verl", {f"{VERLS_MODEL}.target_modules": "[o_proj,down_proj]"}, **SOME),
        case("areal", ranked("actor.", "target_modules.0") | OF_AREAL),
        case("areal", numbered("actor.target_modules", "o_proj", "down_proj"), **SOME),
        case("trinity", ranked("model.lora_configs.0.") | OF_TRINITY),
        case("torchtitan", OF_TITAN),
        case("torchtitan", numbered("lora.target_modules", "wqkv", "wo", "w1", "w3", "w2")),
        case("torchtitan", {"lora.alpha": 12.5}, lora=8, lora_alpha=12.5),
        case("torchtitan", numbered("lora.target_modules", "wo", "w2"), **SOME),
        case("trl", OF_TRL, **NF4),
        case("axolotl", {"adapter": "lora", "lora_target_linear": True}),
        case("axolotl", {"adapter": "qlora", "load_in_4bit": True}, **NF4),
        case("axolotl", {"lora_target_modules.0": "o_proj"}, lora_targets="o_proj"),
        case("llamafactory", {"finetuning_type": "lora", "lora_target": "all"}),
        case("llamafactory", {"quantization_bit": 4, "quantization_type": "nf4"}, **NF4),
        case("llamafactory", {"lora_target": "o_proj,down_proj"}, **SOME),
        case("ms-swift", {"tuner_type": "lora", "target_modules.0": "all-linear"}),
        case("ms-swift", {"quant_method": "bnb", "quant_bits": 4}, **NF4),
        case("ms-swift", {"target_modules.0": "o_proj"}, lora_targets="o_proj"),
    ],
)
def test_adapters_are_named_as_a_trainer_names_them(target, changes, expected):
    made = emitted(target, **{"lora": 16} | changes)
    assert expected.items() <= made.values.items()
    assert all(has_words_for(target, name, value) for name, value in made.values.items())
    if target in BY_ITSELF:
        rank = "lora_r" if target == "axolotl" else "lora_rank"
        assert [made.values[name] for name in (rank, "lora_alpha", "lora_dropout")] == [16, 32, 0.0]
    packed = {"load_in_4bit", "quantization_bit", "quant_bits"} & made.values.keys()
    assert bool(packed) is ("lora_base" in changes)


@pytest.mark.parametrize(
    ("target", "name", "value"),
    [
        ("accelerate", "fsdp_config.fsdp_activation_checkpointing_offload", True),
        ("axolotl", "activation_offloading", "hidden_states"),
        ("verl", f"{VERLS_MODEL}.enable_activation_offload", True),
    ],
)
def test_activations_on_the_host_go_by_the_words_of_who_has_some(target, name, value):
    def values(activations: str):
        found, _ = goal("trl", "16k", ulysses=[1], activations=activations, loss="chunked")
        chosen = next(c for c in found.candidates if c.cell.settings.activations == activations)
        kept = msgspec.structs.replace(chosen, token_budget_tokens=16_384)
        return TARGETS[target].emit(found, kept).values

    assert values("host")[name] == value
    assert has_words_for(target, name, value)
    assert name not in values("gpu")


def test_trl_leaves_activations_on_the_host_to_fsdp2_in_accelerates_file():
    (launched,) = emitted("trl", activations="host", loss="chunked").beside.values()
    assert "fsdp_activation_checkpointing_offload: true" in launched
    with pytest.raises(UsageError, match="with FSDP2 alone") as caught:
        emitted("trl", activations="host", loss="chunked", strategy="fsdp")
    assert "--strategy fsdp2" in str(caught.value)


@pytest.mark.parametrize("trainer", ["llamafactory", "ms-swift", "trl"])
def test_nobody_predicts_activations_on_the_host_of_a_trainer_that_is_not_known_with_them(trainer):
    title = trainer_title(trainer)
    with pytest.raises(UsageError, match=f"{title} is not predicted with `--activations`"):
        recommend("Qwen3-4B", length="16k", trainer=trainer, gpus="H200-141GB", activations="host")


@pytest.mark.parametrize("target", ["verl", "areal", "trinity", "torchtitan"])
def test_without_lora_nothing_is_said_of_adapters_and_merged_ones_are_refused_by_name(target):
    assert "lora" not in emitted(target).text.lower()
    merged = {"lora": 16, "lora_merged": True, "save_hf": "last"}
    if TARGETS[target].predicted_for == "trinity":
        with pytest.raises(UsageError, match="--lora-merged"):
            refuse_unknown_settings(target, merged, "trinity")
        return
    with pytest.raises(UsageError, match="no words for --lora-merged"):
        configured(target, *goal(target, "16k", **merged), model="Qwen3-4B")


@pytest.mark.parametrize(
    ("target", "changes", "said"),
    [
        ("trl", {"objective": "dpo", "ulysses": [2]}, "in `trl sft` alone, not in `trl dpo`"),
        ("trl", {"objective": "dpo", "ring": [2]}, "in `trl sft` alone, not in `trl dpo`"),
        ("trl", {"objective": "grpo", "ulysses": [2]}, "in `trl sft` alone, not in `trl grpo`"),
        ("torchtitan", {"objective": "grpo"}, "torchtitan trains sft, not grpo"),
        *((target, {"objective": "dpo"}, "written for sft, not for dpo") for target in BY_ITSELF),
        ("trl", WINDOWED | {"ulysses": [2], "copies": [2]}, "ZeRO-3 has no copies"),
        ("accelerate", {"ulysses": [2], "copies": [2]}, "no copies of one ring"),
        ("accelerate", {"ring": [4], "copies": [2]}, "inside a copy, of 2 GPUs, not among 4"),
        ("accelerate", {"ring": [2], "copies": [2]}, "no copies of one ring"),
        ("torchtitan", {"ring": [4], "copies": [2]}, "inside a copy, of 2 GPUs, not among 4"),
        ("llamafactory", {"copies": [2]}, "without copies"),
        ("ms-swift", {"copies": [2]}, "without copies"),
        ("axolotl", {"ulysses": [2], "copies": [2]}, "no copies of one ring"),
        *((t, {"optimizer": "adamw-bf16"}, "has no adamw-bf16") for t in ("trl", *BY_ITSELF)),
        ("trl", {"optimizer": "adamw-bf16", "ulysses": [2]}, "TRL has no adamw-bf16"),
        ("trl", WINDOWED | {"optimizer": "adamw-8bit", "ulysses": [2]}, "flat shards"),
        *((target, NARROW, "parameters in bf16") for target in ("trl", *BY_ITSELF)),
        ("verl", {"lora": 8, "lora_alpha": 12.5}, "verl's lora_alpha is a whole"),
        ("areal", {"lora": 8, "lora_alpha": 12.5}, "AReaL's lora_alpha is a whole"),
        ("trinity", {"lora": 8, "lora_alpha": 12.5}, "Trinity-RFT's lora_alpha is a whole"),
        ("trinity", {"lora": 16, "lora_targets": "q_proj,v_proj"}, "no adapters on layers by"),
        ("trinity", {"lora": 24, "rollout_gpus": 1}, "no adapters of rank 24"),
        ("trinity", {"lora": 1024, "rollout_gpus": 1}, "no adapters of rank 1024"),
        ("verl", {"lora": 1024}, "up to rank 512, not 1024"),
        ("torchtitan", {"lora": 16, "lora_targets": "q_proj,o_proj"}, "in one layer"),
        ("torchtitan", {"lora": 16, "gpus": "1xL40S-48GB", "length": "64k"}, "more of each GPU"),
    ],
)
def test_what_a_trainer_does_not_have_is_refused_with_hints_that_work(target, changes, said):
    words = {"length": "16k", "ulysses": [1]} | changes
    with pytest.raises(UsageError, match=said) as refused:
        emitted(target, **words)
    mended = list(ways(refused.value.hint, words))
    assert mended
    for each in mended:
        assert TARGETS[target].emit(*goal(target, **each))


@pytest.mark.parametrize("target", [*OF_VERLS_ACTOR, "trl", "accelerate"])
def test_what_a_trainer_has_no_words_for_is_refused_by_name(target):
    """So are rings and copies: tests/data/hints.json has them for each of these."""
    found, chosen = goal(target, "16k")
    tiled = msgspec.structs.replace(chosen.cell.settings, mlp_tiles=4)
    cell = msgspec.structs.replace(chosen.cell, settings=tiled)
    with pytest.raises(UsageError, match="--mlp-tiles 4") as refused:
        configured(target, found, msgspec.structs.replace(chosen, cell=cell), model="Qwen3-4B")
    assert refused.value.hint == "leave `--mlp-tiles 4` out"


def test_copies_of_a_model_in_nf4_are_those_of_ddp():
    """Nothing is sharded among them: FSDP's launcher would shard what NF4 has whole."""
    launcher = emitted("llamafactory", length="16k", **COPIED).beside["accelerate.yaml"]
    assert "distributed_type: MULTI_GPU" in launcher
    assert "fsdp" not in launcher
    swift = emitted("ms-swift", length="16k", **COPIED)
    assert "fsdp" not in swift.values
    assert (swift.values["ENV.NPROC_PER_NODE"], swift.values["gradient_checkpointing"]) == (2, True)
    assert swift.beside == {}
    with pytest.raises(UsageError, match="not with shards"):
        emitted("trl", length="16k", **{**COPIED, "copies": [1], "trainer": "highwater"})


def test_torchtitan_has_adapters_on_its_own_models_alone():
    words = {"lora": 16, "lora_targets": "o_proj"}
    with pytest.raises(UsageError, match="models of its own") as refused:
        TARGETS["torchtitan"].emit(*goal("torchtitan", "16k", **words), model_path="/models/mine")
    assert "`--lora 16 --lora-targets o_proj`" in refused.value.hint
    assert TARGETS["torchtitan"].emit(*goal("torchtitan", "16k"), model_path="/models/mine")


def lacking(target: str, *said: str, **changes: object):
    return target, {"length": "16k"} | changes, said


SHARED = "2 GPUs share each sequence by context parallelism"


@pytest.mark.parametrize(
    ("target", "changes", "said"),
    [
        lacking("accelerate", "the token budget of 131072 a", "the objective sft", length="128k"),
        lacking("accelerate", "1 x 16384 tokens, over 2 GPUs", degree=2),
        lacking("accelerate", "2 GPUs pass keys and values round a ring", degree=2),
        lacking("accelerate", "1 x 8192 tokens, over 2 GPUs", **WINDOWED, degree=2),
        lacking("accelerate", "recomputation with DeepSpeed", "ZeRO-3", **WINDOWED, degree=2),
        lacking("accelerate", "packed in NF4", **NF4),
        lacking("trl", "whole logits"),
        lacking("trl", "packed sequences with a ring", "Ulysses with fsdp2", degree=2),
        lacking("trl", "packed sequences with Ulysses", "it is DeepSp", **WINDOWED, degree=2),
        lacking("torchtitan", "YaRN's attention factor", length="128k"),
        lacking("torchtitan", "Ulysses: 2 GPUs share each sequence by context", degree=2),
        lacking("torchtitan", "FSDP1", strategy="fsdp"),
        lacking("torchtitan", "a frozen model in bf16", "one layer, wqkv, with one", lora=16),
        lacking("trinity", "adapters in float32", lora=16),
        lacking("areal", "FSDP1", length="128k", degree=2),
        lacking("axolotl", "parameters in float32"),
        lacking("axolotl", SHARED, degree=2),
        lacking("axolotl", "packed sequences, 2 in a", degree=2, sequences_per_micro_batch=2),
        lacking("axolotl", "moments of 8 bits that are updated in", optimizer="adamw-8bit"),
        lacking("llamafactory", "moments of 8 bits that are updated", optimizer="adamw-8bit"),
        lacking("ms-swift", "FSDP1", strategy="fsdp"),
        lacking("ms-swift", "--loss chunked with shared sequences", loss="chunked", degree=2),
        lacking("ms-swift", "ring 2: 2 GPUs share heads", ring=[2]),
    ],
)
def test_what_a_trainer_cannot_express_is_said(target, changes, said):
    degree = changes.get("degree", 1)
    asked = {name: value for name, value in changes.items() if name != "degree"}
    found, _ = goal(target, **{"ulysses": [degree]} | asked)
    chosen = found.chosen if "ring" in changes else rung(found, degree=degree)
    made = TARGETS[target].emit(found, chosen)
    for each in said:
        assert any(each in sentence for sentence in made.cannot), (each, made.cannot)


def test_how_a_trainers_lora_differs_is_said():
    verl, areal = (emitted(target, lora=16).text for target in ("verl", "areal"))
    assert "fsdp_config.model_dtype: float32" in verl
    assert "LoRA has other states there, which nobody measured" in verl
    assert "actor.optimizer_dtype: float32" in areal
    assert "untested" in areal


@pytest.mark.parametrize("target", FILES)
def test_the_variables_of_the_allocator_go_by_both_names(target):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    both = dict.fromkeys(names, "expandable_segments:True")
    found, chosen = goal(target, "16k", ulysses=[1])
    assert chosen.cell.settings.allocator == "expandable"
    made = TARGETS[target].emit(found, chosen)
    if target == "areal":  # its rollout is not told: only the actor's workers are
        assert yaml.safe_load(made.text)["actor"]["scheduling_spec"][0]["env_vars"] == both
        assert made.environment == {}
    elif target == "verl":  # it would end its rollout
        assert made.environment == {}
        assert "vLLM's sleep mode" in made.text
        assert not re.search(r"^(export|PYTORCH)", made.text, re.MULTILINE)
    else:
        assert made.environment == both
        assert all(name in made.text for name in both)
        assert "expandable_segments:True" not in emitted(target, allocator="native").text


@pytest.mark.parametrize("target", FILES)
def test_whose_prediction_it_is_stands_in_the_heading(target):
    found, chosen = goal(target, "16k", ulysses=[1])
    heading = TARGETS[target].emit(found, chosen).text.partition("start")[0]
    whose = {"trinity": "Trinity-RFT's trainer", "areal": "Trinity-RFT's trainer, which is verl's"}
    if target in OF_OURS:
        assert "predicted for highwater's own engine" in heading
    else:
        assert whose.get(target, "predicted") in heading
    measured = msgspec.structs.replace(chosen, source="measured", found_in="studies/mine.jsonl")
    heading = TARGETS[target].emit(found, measured).text
    assert "measured for " in heading
    assert "(in studies/mine.jsonl)" in heading
    assert found.accuracy not in heading


@pytest.mark.parametrize("target", FILES)
@pytest.mark.parametrize(
    "path", ["/models/mine", 'it\'s "q" #1: a=b, ${oc.env:HOME} \\ ü', "- x", "yes", "\u2028x"]
)
def test_a_path_is_a_path(target, path):
    text = TARGETS[target].emit(*goal(target, "16k", ulysses=[1]), model_path=path).text
    if target == "torchtitan":
        keywords = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.keyword)]
        named = [ast.literal_eval(node.value) for node in keywords if node.arg == "hf_model"]
        assert named == [path]
    elif target == "accelerate":
        assert not path.isprintable() or f"the script loads {path} in float32" in text
    elif target in IN_YAML:
        places = {"areal": ("actor", "path"), "trinity": ("model", "model_path")}
        places |= {"axolotl": ("base_model",), "ms-swift": ("model",)}
        found = yaml.safe_load(text)
        for name in places.get(target, ("model_name_or_path",)):
            found = found[name]
        is_omegaconfs = target in ("areal", "trinity")
        assert found == (path.replace("${", "\\${") if is_omegaconfs else path)


@pytest.mark.parametrize("target", FILES)
def test_no_name_of_a_model_ends_a_comment(target):
    found, chosen = goal(target, "16k", ulysses=[1])
    for end in ("\n", "\r", "\x0b", "\u2028", "\x85"):
        named = msgspec.structs.replace(found, model_name=f"a{end}import os")
        made = TARGETS[target].emit(named, chosen)
        lines = made.text.split("\nfrom ")[0].splitlines()
        assert not any(line.startswith("import os") for line in lines[:-1])
        assert from_json(to_json(made), Emitted) == made


@pytest.mark.parametrize("target", FILES)
def test_a_version_is_one_that_is_installed_to_be_tested_with(target):
    package = TARGETS[target].package or target
    pins = ROOT / "tests" / "emit" / "requirements" / f"{target}.txt"
    if pins.exists():
        assert f"{package}=={FILES[target].VERSION}" in pins.read_text().splitlines()


@pytest.mark.parametrize("target", BY_ITSELF)
def test_one_micro_batch_a_step_is_not_left_to_the_user(target):
    one, several = (emitted(target, length="4k", micro_batches=number) for number in (1, 2))
    replaced = "gradient_accumulation_steps\n"
    assert one.values["gradient_accumulation_steps"] == 1
    assert replaced in several.text
    assert replaced not in one.text


@pytest.mark.parametrize("target", BY_ITSELF)
def test_a_model_is_named_by_its_id_where_it_is_filled_in(target):
    found, chosen = goal(target, "16k", ulysses=[1])
    filled_in = configured(target, found, chosen, model="Qwen3-4B", is_filled_in=True)
    (name,) = {"base_model", "model_name_or_path", "model"} & filled_in.values.keys()
    assert filled_in.values[name] == "Qwen/Qwen3-4B"
    assert "MODEL_PATH" not in filled_in.text
    plain = configured(target, found, chosen, model="Qwen3-4B")
    assert name not in plain.values
    assert "$MODEL_PATH" in plain.command


def test_settings_without_whole_logits_come_before_those_with():
    found = recommend("Qwen3-8B", length="128k", gpus="8xH100-80GB")
    made = configured_choice("axolotl", found, model="Qwen3-8B")
    assert made.emitted.logits_bytes is None
    assert made.emitted.values["liger_fused_linear_cross_entropy"] is True
    shared = [each for each in found.candidates if each.cell.layout.ulysses_degree > 1]
    alone = msgspec.structs.replace(found, candidates=tuple(shared))
    roomy = configured_choice("ms-swift", alone, model="Qwen3-8B")
    assert roomy.emitted.logits_bytes == 10 * 151_936 * 131_072 // 4, "half of them lacks room"

"""What is emitted for areal, trl, torchtitan and accelerate: names of their packages, and what they
cannot express.
"""

import ast
import json
import re
import shlex
from functools import cache
from pathlib import Path

import msgspec
import pytest
import yaml
from trainers import recorded

from highwater.errors import UsageError
from highwater.model.model import load_model
from highwater.model.model_place import catalog_names
from highwater.nouns.codec import from_json, to_json
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout
from highwater.nouns.objective import GENERATIONS
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.nouns.trainer import OURS
from highwater.recommendation.recommend import recommend
from highwater.trainers import accelerate as accelerate_file
from highwater.trainers import areal as areal_file
from highwater.trainers import torchtitan as torchtitan_file
from highwater.trainers.accelerate import accelerate
from highwater.trainers.emitted import Emitted, nested
from highwater.trainers.targets import TARGETS, configured
from highwater.trainers.torchtitan import FLAVORS, torchtitan
from highwater.trainers.trl import words as trl_file
from highwater.trainers.trl.words import trl

ROOT = Path(__file__).parents[2]
FILES = {
    "areal": areal_file,
    "trl": trl_file,
    "torchtitan": torchtitan_file,
    "accelerate": accelerate_file,
}
TYPES = {"int": int, "bool": bool, "str": str, "float": float}


OF_OURS = ("trl",)
"""Targets whose configuration is made of our engine's recommendations here, which have settings
that theirs have not: a prediction of its own has words for everything."""


def goal(
    target: str = "trl", length: int | str = "128k", **changes
) -> tuple[Recommendation, Candidate]:
    rollout = (
        {"rollout_gpus": 2, "gpus": "6xH200-141GB"}
        if target == "areal"
        else {"gpus": "4xH200-141GB"}
    )
    words = {
        "model": "Qwen3-4B",
        "length": length,
        "trainer": OURS if target in OF_OURS else TARGETS[target].predicted_for,
        "allocator": "expandable",
    }
    found = recommended(json.dumps(words | rollout | changes))
    assert found.chosen is not None
    return found, found.chosen


@cache
def recommended(words: str) -> Recommendation:
    """Asked once: a recommendation for Trinity-RFT's trainer takes seconds."""
    return recommend(**json.loads(words))


def rung(found: Recommendation, *, degree: int, offload: bool) -> Candidate:
    return next(
        each
        for each in found.candidates
        if (each.cell.layout.ulysses_degree, each.cell.settings.offload, each.is_lowered)
        == (degree, offload, False)
    )


def is_a(value: object, kind: str) -> bool:
    """Whether a value is of one of the types that an annotation names."""
    names = re.findall(r"\w+", kind)
    return type(value) in [TYPES.get(name) for name in names] or (
        "Literal" in names and value in names
    )


@pytest.mark.parametrize("target", FILES)
@pytest.mark.parametrize("length", ["16k", "128k"])
def test_every_name_and_type_is_one_of_the_trainers_own(target, length):
    known = recorded(target, FILES[target].VERSION)
    found, _ = goal(target, length)
    for candidate in found.candidates:
        for name, value in TARGETS[target].emit(found, candidate).values.items():
            section, _, field = name.partition(".")
            if target == "trl":
                launched = name == "accelerate_config" or section == "env"
                assert (
                    launched
                    or section in ("model_init_kwargs",)
                    or is_a(value, known[f"sft.{section}"])
                ), name
            elif ".env_vars." in name:
                assert known[name.partition(".env_vars.")[0] + ".env_vars"] == "dict[str, str]"
            elif name in ("compute_environment", "distributed_type"):
                assert name in known
            else:
                assert is_a(value, known[name]), (name, field)


@pytest.mark.parametrize(
    ("objective", "command"), [("grpo", "grpo"), ("rw", "reward"), ("dpo", "dpo")]
)
def test_trls_other_commands_have_their_own_names(objective, command):
    known = recorded("trl", trl_file.VERSION)
    found, chosen = goal(objective=objective, length="16k", ulysses=[1])
    emitted = trl(found, chosen)
    assert emitted.command.startswith(f"trl {command} --config trl.yaml")
    for name, value in emitted.values.items():
        section = name.partition(".")[0]
        assert section in ("accelerate_config", "env") or is_a(
            value, known[f"{command}.{section}"]
        ), name
    rows = chosen.cell.settings.sequences_per_micro_batch // (1 if objective == "grpo" else 2)
    assert emitted.values["per_device_train_batch_size"] == rows


@pytest.mark.parametrize(
    ("objective", "command"), [("sft", "sft"), ("rw", "reward"), ("grpo", "grpo"), ("dpo", "dpo")]
)
def test_adapters_are_named_as_trl_names_them(objective, command):
    known = recorded("trl", trl_file.VERSION)
    asked = {"lora": 16, "lora_targets": "q_proj,v_proj", "objective": objective}
    values = trl(*goal(length="16k", ulysses=[1], **asked)).values
    expected = {
        "use_peft": True,
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.0,
        "lora_target_modules.0": "q_proj",
        "lora_target_modules.1": "v_proj",
        "dtype": "bfloat16",
    }
    if objective == "rw":
        expected |= {"lora_task_type": "SEQ_CLS", "lora_modules_to_save.0": "score"}
    assert expected.items() <= values.items()
    for name, value in expected.items():
        kind = known[f"{command}.{name.partition('.')[0]}"]
        assert is_a(value, kind), (name, kind)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer": "adamw-bf16"}, "TRL has no adamw-bf16"),
        ({"optimizer": "adamw-bf16", "ulysses": [2]}, "TRL has no adamw-bf16"),
        (
            {"optimizer": "adamw-8bit", "ulysses": [2], "model": "gemma-2-2b", "length": "8k"},
            "flat shards",
        ),
        (
            {"optimizer": "adamw-8bit", "parameters": "bf16", "micro_batches": 1},
            "parameters in bf16",
        ),
    ],
)
def test_optimizers_that_trl_does_not_have_are_refused_with_hints_that_work(changes, said):
    asked = {"length": "16k", "ulysses": [1]} | changes
    with pytest.raises(UsageError, match=said) as refused:
        trl(*goal(**asked))
    for verb, way in re.findall("(use|leave) `(.+?)`", refused.value.hint):
        if verb == "use":
            assert way == "--ulysses 1"
            assert trl(*goal(**asked | {"ulysses": [1]}))
        else:
            left_out = [flag.removeprefix("--") for flag in way.split()[::2]]
            kept = {name: value for name, value in asked.items() if name not in left_out}
            assert trl(*goal(**kept))


def test_the_reference_of_trls_dpo_takes_no_memory_while_it_trains():
    found, chosen = goal(objective="dpo", length="16k", ulysses=[1])
    emitted = trl(found, chosen)
    assert emitted.values["precompute_ref_log_probs"] is True
    assert emitted.values["max_length"] == found.length_tokens
    assert "# precompute_ref_log_probs: " in emitted.text


@pytest.mark.parametrize("entropy", ["none", "full", "chunked"])
def test_grpo_has_entropy_in_trls_loss_where_it_was_predicted_so(entropy):
    values = trl(*goal(objective="grpo", length="16k", ulysses=[1], entropy=entropy)).values
    expected = None if entropy == "none" else Hyperparameters().entropy_coefficient
    assert values.get("entropy_coef") == expected


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 8])
def test_a_generation_batch_of_grpo_is_whole_groups(gpus):
    found, chosen = goal(objective="grpo", length="4k", ulysses=[1], gpus=f"{gpus}xH200-141GB")
    values = trl(found, chosen).values
    assert (
        values["per_device_train_batch_size"]
        * gpus
        * values["gradient_accumulation_steps"]
        % GENERATIONS
        == 0
    )


@pytest.mark.parametrize("objective", ["sft", "grpo"])
def test_one_micro_batch_a_step_is_named_as_the_trainer_does(objective):
    one = {"length": "4k", "ulysses": [1], "micro_batches": 1}
    found, chosen = goal(objective=objective, **one)
    values, known = trl(found, chosen).values, recorded("trl", trl_file.VERSION)
    assert values["gradient_accumulation_steps"] == 1
    if objective == "grpo":
        batch = values["per_device_train_batch_size"] * chosen.cell.layout.gpus
        assert batch * values["steps_per_generation"] % GENERATIONS == 0
        assert "grpo.steps_per_generation" in known
        return
    of_titan = torchtitan(found, chosen).values
    assert of_titan["training.global_batch_size"] == 4 * of_titan["training.local_batch_size"]
    assert is_a(4, recorded("torchtitan", torchtitan_file.VERSION)["training.global_batch_size"])
    assert "gradients are not added up" in accelerate(found, chosen).text
    for target in ("trl", "torchtitan", "accelerate"):
        configured(target, found, chosen, model="Qwen3-4B")
    several = goal(objective=objective, **one | {"micro_batches": 2})
    assert "gradient_accumulation_steps" not in trl(*several).values
    assert "training.global_batch_size" not in torchtitan(*several).values


def test_grpo_with_gpus_set_aside_generates_there():
    found, chosen = goal(objective="grpo", length="16k", ulysses=[1], rollout_gpus=2)
    emitted = trl(found, chosen)
    assert (emitted.values["use_vllm"], emitted.values["vllm_mode"]) == (True, "server")
    (served,) = re.findall("trl vllm-serve (.*)", emitted.text)
    assert served.split()[:4] == ["--data_parallel_size", "2", "--max_model_len", "16384"]
    assert "num_processes: 2" in emitted.beside["accelerate.yaml"]


def test_everything_that_the_program_for_torchtitan_imports_is_there():
    known = recorded("torchtitan", torchtitan_file.VERSION)
    found, chosen = goal("torchtitan", loss="chunked")
    for path in (None, "/models/mine"):
        tree = ast.parse(torchtitan(found, chosen, model_path=path).text)
        imports = [
            node
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torchtitan")
        ]
        assert len(imports) >= 6
        for node in imports:
            assert {f"{node.module}:{alias.name}" for alias in node.names} <= set(known), (
                ast.unparse(node)
            )
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert {"TrainingConfig", "ParallelismConfig", "FullAC.Config"} <= calls
    for name in (node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)):
        sections = ("training", "parallelism", "trainer")
        assert any(f"{section}.{name}" in known for section in sections) or name in (
            "hf_model",
            "lr",
        ), name


def test_the_models_of_the_catalog_are_torchtitans_own_where_it_has_them():
    known = recorded("torchtitan", torchtitan_file.VERSION)
    assert set(FLAVORS) <= set(catalog_names())
    assert all(f"flavor:{family}:{flavor}" in known for family, flavor in FLAVORS.values())
    found, chosen = goal("torchtitan", model="Llama-3.1-8B", length="64k")
    imported = {
        str(node.module)
        for node in ast.walk(ast.parse(torchtitan(found, chosen).text))
        if isinstance(node, ast.ImportFrom)
    }
    assert "torchtitan.models.llama3" in imported


def test_the_text_says_what_the_values_say():
    for target in ("areal", "trl", "accelerate"):
        found, chosen = goal(target)
        emitted = TARGETS[target].emit(found, chosen)
        assert yaml.safe_load(emitted.text) == nested(emitted.values), target


@pytest.mark.parametrize("target", FILES)
def test_the_variables_of_the_allocator_go_by_both_names(target):
    both = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    found, chosen = goal(target)
    assert chosen.cell.settings.allocator == "expandable"
    emitted = TARGETS[target].emit(found, chosen)
    if target == "areal":  # its rollout is not told: only the actor's workers are
        document = yaml.safe_load(emitted.text)
        assert document["actor"]["scheduling_spec"][0]["env_vars"] == both
        assert emitted.environment == {}
    else:
        assert emitted.environment == both
        assert all(name in emitted.text for name in both)
    found, chosen = goal(target, "16k", allocator="native")
    assert "ALLOC_CONF" not in TARGETS[target].emit(found, chosen).text


WINDOWED = {"model": "gemma-2-2b", "length": "8k"}
"""A model with windows, which torch's context parallelism refuses."""


def test_where_trl_recomputes_is_where_it_may():
    for changes, degree, ours in (({}, 1, False), ({}, 2, False), (WINDOWED, 2, True)):
        found, _ = goal(**changes)
        emitted = trl(found, rung(found, degree=degree, offload=False))
        launched = yaml.safe_load(emitted.beside["accelerate.yaml"])
        assert emitted.values["gradient_checkpointing"] is ours
        assert (
            launched.get("fsdp_config", {}).get("fsdp_activation_checkpointing", False) is not ours
        )
    found, _ = goal(recompute="none", length="4k")
    emitted = trl(found, rung(found, degree=1, offload=False))
    assert emitted.values["gradient_checkpointing"] is False
    launched = yaml.safe_load(emitted.beside["accelerate.yaml"])
    assert launched["fsdp_config"]["fsdp_activation_checkpointing"] is False


@pytest.mark.parametrize("offload", [False, True])
def test_what_was_predicted_by_heads_is_fsdp2s_where_a_ring_can_be(offload):
    found, _ = goal(length="16k")
    emitted = trl(found, rung(found, degree=4, offload=offload))
    launched = yaml.safe_load(emitted.beside["accelerate.yaml"])
    mesh = launched["parallelism_config"]
    assert launched["distributed_type"] == "FSDP"
    assert launched["fsdp_config"]["fsdp_version"] == 2
    assert launched["fsdp_config"]["fsdp_offload_params"] is offload
    assert (mesh["parallelism_config_dp_shard_size"], mesh["parallelism_config_cp_size"]) == (1, 4)
    assert "deepspeed_config" not in launched
    assert emitted.values["pad_to_multiple_of"] == 8
    assert emitted.values["attn_implementation"] == "sdpa"
    assert emitted.values["packing"] is False


@pytest.mark.parametrize("model", ["Mistral-7B-v0.1", "gemma-2-2b"])
@pytest.mark.parametrize("ulysses", [1, 2])
def test_a_ring_of_a_model_with_windows_is_refused(model, ulysses):
    layout = Layout(gpus=4, ulysses_degree=ulysses, ring_degree=2)
    shape = load_model(model).shape
    said = accelerate_file.layout_obstacle(layout, shape, accelerate_file.WORDS)
    assert said is not None
    assert f"{shape.model_type} has others" in said
    whole = load_model("Qwen3-4B").shape
    assert accelerate_file.layout_obstacle(layout, whole, accelerate_file.WORDS) is None


def test_heads_are_deepspeeds_to_share_where_layers_have_windows():
    found, _ = goal(**WINDOWED)
    emitted = trl(found, rung(found, degree=2, offload=False))
    launched = yaml.safe_load(emitted.beside["accelerate.yaml"])
    assert launched["deepspeed_config"]["zero_stage"] == 3
    assert launched["parallelism_config"]["parallelism_config_sp_size"] == 2
    assert emitted.values["pad_to_multiple_of"] == 2
    assert emitted.values["attn_implementation"] == "flash_attention_2"


def test_accelerate_has_both_fsdps():
    for strategy, version, reshard in (("fsdp", 1, "FULL_SHARD"), ("fsdp2", 2, True)):
        found, _ = goal("accelerate", "16k", strategy=strategy)
        config = yaml.safe_load(accelerate(found, rung(found, degree=1, offload=False)).text)[
            "fsdp_config"
        ]
        assert (config["fsdp_version"], config["fsdp_reshard_after_forward"]) == (version, reshard)


@pytest.mark.parametrize(
    ("target", "changes", "said"),
    [
        ("accelerate", {"degree": 1}, ("the token budget of 131072 a GPU", "the objective sft")),
        (
            "accelerate",
            {"degree": 2},
            ("1 x 131072 tokens, over 2 GPUs", "2 GPUs pass keys and values round a ring"),
        ),
        (
            "accelerate",
            {"degree": 2, "model": "gemma-2-2b", "length": "8k"},
            ("1 x 8192 tokens, over 2 GPUs", "recomputation with DeepSpeed", "ZeRO-3"),
        ),
        ("trl", {"degree": 1}, ("whole logits",)),
        (
            "trl",
            {"degree": 2},
            ("whole logits", "packed sequences with a ring", "Ulysses with fsdp2"),
        ),
        (
            "trl",
            {"degree": 2, "model": "gemma-2-2b", "length": "8k"},
            ("whole logits", "packed sequences with Ulysses", "Ulysses with fsdp2: it is DeepSp"),
        ),
        ("torchtitan", {"degree": 1}, ("YaRN's attention factor",)),
        (
            "torchtitan",
            {"degree": 2},
            ("Ulysses: 2 GPUs share each sequence by context parallelism",),
        ),
        (
            "torchtitan",
            {"degree": 1, "recompute": "all-but-attention"},
            ("--recompute all-but-attention",),
        ),
        ("accelerate", {"degree": 1, "mlp_tiles": 8}, ("--mlp-tiles 8",)),
        ("torchtitan", {"degree": 1, "strategy": "fsdp"}, ("FSDP1",)),
        ("areal", {"degree": 2}, ("FSDP1",)),
    ],
)
def test_what_a_trainer_cannot_express_is_said(target, changes, said):
    degree = changes.pop("degree")
    found, _ = goal(target, **changes)
    emitted = TARGETS[target].emit(found, rung(found, degree=degree, offload=False))
    for each in said:
        assert any(each in sentence for sentence in emitted.cannot), each
    lines = [line for line in emitted.text.splitlines() if " cannot express " in line]
    assert [line.partition(" cannot express ")[2] for line in lines] == list(emitted.cannot)


@pytest.mark.parametrize(
    ("target", "changes", "said"),
    [
        ("trl", {"objective": "ppo"}, "TRL trains sft, grpo, rw, dpo, not ppo"),
        ("trl", {"objective": "dpo", "ulysses": [2]}, "in `trl sft` alone, not in `trl dpo`"),
        ("torchtitan", {"objective": "dpo"}, "torchtitan trains sft, not dpo"),
        ("trl", {"objective": "grpo", "ulysses": [2]}, "in `trl sft` alone, not in `trl grpo`"),
        ("torchtitan", {"objective": "grpo"}, "torchtitan trains sft, not grpo"),
        ("areal", {"rollout_gpus": 0}, "none are set aside"),
    ],
)
def test_what_a_trainer_does_not_train_is_refused_with_a_hint_that_works(target, changes, said):
    with pytest.raises(UsageError, match=said) as refused:
        TARGETS[target].emit(*goal(target, "16k", **changes))
    words = shlex.split(re.findall("`(.+?)`", refused.value.hint)[0])
    flag = words[0].removeprefix("--").replace("-", "_")
    value = (
        [int(words[1])]
        if flag == "ulysses"
        else int(words[1])
        if flag == "rollout_gpus"
        else words[1]
    )
    assert TARGETS[target].emit(*goal(target, "16k", **changes | {flag: value}))


@pytest.mark.parametrize("target", ["trinity", "verl", "areal"])
@pytest.mark.parametrize(
    ("words", "changes"),
    [("--ring 2", {"ring_degree": 2}), ("--copies 2", {"replicate_degree": 2})],
)
def test_a_layout_that_a_trainer_has_no_words_for_is_refused_by_name(target, words, changes):
    found, chosen = goal(target, "16k")
    layout = msgspec.structs.replace(chosen.cell.layout, ulysses_degree=1, **changes)
    other = msgspec.structs.replace(
        chosen, cell=msgspec.structs.replace(chosen.cell, layout=layout)
    )
    with pytest.raises(UsageError, match=f"has no words for {words}"):
        configured(target, found, other, model="Qwen3-4B")


@pytest.mark.parametrize(
    ("target", "changes", "said"),
    [
        ("trl", WINDOWED | {"ulysses": [2], "copies": [2]}, "ZeRO-3 has no copies"),
        ("accelerate", {"ulysses": [2], "copies": [2]}, "no copies of one ring"),
        ("accelerate", {"ring": [4], "copies": [2]}, "inside a copy, of 2 GPUs, not among 4"),
        ("accelerate", {"ring": [2], "copies": [2]}, "no copies of one ring"),
        ("torchtitan", {"ring": [4], "copies": [2]}, "inside a copy, of 2 GPUs, not among 4"),
        ("trl", {"ring": [2], "objective": "dpo"}, "in `trl sft` alone, not in `trl dpo`"),
    ],
)
def test_a_layout_that_a_mesh_cannot_have_is_refused_with_a_hint_that_works(target, changes, said):
    changes = {"ulysses": [1], "length": "16k"} | changes
    with pytest.raises(UsageError, match=said) as refused:
        TARGETS[target].emit(*goal(target, **changes))
    words = shlex.split(re.findall("`(.+?)`", refused.value.hint)[0])
    for flag, degree in zip(words[::2], words[1::2], strict=True):
        changes |= {flag.removeprefix("--"): [int(degree)]}
    assert TARGETS[target].emit(*goal(target, **changes))


@pytest.mark.parametrize("target", ["trinity", "verl", "areal"])
def test_a_setting_that_only_the_engine_has_is_refused_with_the_flag_to_leave_out(target):
    found, chosen = goal(target, "16k")
    settings = msgspec.structs.replace(chosen.cell.settings, mlp_tiles=4)
    other = msgspec.structs.replace(
        chosen, cell=msgspec.structs.replace(chosen.cell, settings=settings)
    )
    with pytest.raises(UsageError, match="--mlp-tiles 4") as refused:
        configured(target, found, other, model="Qwen3-4B")
    assert refused.value.hint == "leave `--mlp-tiles 4` out"


@pytest.mark.parametrize("target", FILES)
def test_whose_prediction_it_is_stands_in_the_heading(target):
    found, chosen = goal(target)
    heading = TARGETS[target].emit(found, chosen).text.partition("start")[0]
    whose = (
        "Trinity-RFT's trainer, which is verl's actor"
        if target == "areal"
        else "highwater's own engine"
    )
    assert f"predicted for {whose}" in heading
    assert heading.startswith(("# Not predicted for this trainer: ", "# No: "))
    measured = msgspec.structs.replace(chosen, source="measured", found_in="studies/mine.jsonl")
    heading = TARGETS[target].emit(found, measured).text
    assert f"measured for {whose}" in heading
    assert "(in studies/mine.jsonl)" in heading
    assert found.accuracy not in heading


@pytest.mark.parametrize("target", FILES)
@pytest.mark.parametrize(
    "path", ["/models/mine", 'it\'s "q" #1: a=b, ${oc.env:HOME} \\ ü', "- x", "yes", "\u2028x"]
)
def test_a_path_is_a_path(target, path):
    found, chosen = goal(target)
    text = TARGETS[target].emit(found, chosen, model_path=path).text
    if target == "torchtitan":
        keywords = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.keyword)]
        assert [ast.literal_eval(node.value) for node in keywords if node.arg == "hf_model"] == [
            path
        ]
    elif target == "trl":
        assert yaml.safe_load(text)["model_name_or_path"] == path
    elif target == "areal":
        assert yaml.safe_load(text)["actor"]["path"] == path.replace("${", "\\${")
    elif path.isprintable():
        assert f"the script loads {path} in float32" in text


@pytest.mark.parametrize("target", FILES)
def test_no_name_of_a_model_ends_a_comment_of_the_others(target):
    found, chosen = goal(target)
    for end in ("\n", "\r", "\x0b", "\u2028", "\x85"):
        emitted = TARGETS[target].emit(
            msgspec.structs.replace(found, model_name=f"a{end}import os"), chosen
        )
        assert not any(
            line.startswith("import os")
            for line in emitted.text.split("\nfrom ")[0].splitlines()[:-1]
        )
        assert from_json(to_json(emitted), Emitted) == emitted


def test_versions_are_those_that_are_installed_to_be_tested_with():
    for target, file in FILES.items():
        pins = (ROOT / "tests" / "emit" / "requirements" / f"{target}.txt").read_text().splitlines()
        assert f"{target}=={file.VERSION}" in pins

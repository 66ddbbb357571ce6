"""What each trainer's configuration has that no other's has."""

import ast
import json
import re
import shlex
import subprocess
from typing import Any

import pytest
import yaml
from emitting import emitted, goal, has_words_for, recorded, rung
from hypothesis import given, settings
from hypothesis import strategies as st

import highwater
from highwater.errors import UsageError
from highwater.model.model import load_model
from highwater.model.model_place import catalog_names
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout
from highwater.nouns.objective import GENERATIONS
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.pages.prediction_tables import prediction_answer
from highwater.trainers import accelerate as accelerate_file
from highwater.trainers import ms_swift as ms_swift_file
from highwater.trainers import torchtitan as torchtitan_file
from highwater.trainers.accelerate import accelerate
from highwater.trainers.emitted import nested
from highwater.trainers.targets import TARGETS, configured, refuse_unknown_settings
from highwater.trainers.torchtitan import FLAVORS, torchtitan
from highwater.trainers.trinity import trinity
from highwater.trainers.trl import words as trl_file
from highwater.trainers.trl.words import trl
from highwater.trainers.verl import verl
from places import examples

WINDOWED = {"model": "gemma-2-2b", "length": "8k"}
"""A model with windows, which torch's context parallelism refuses."""
PATH = "actor_rollout_ref.model.path"
PATHS = [
    ("/models/mine", '"/models/mine"', "/models/mine"),
    ("ep=3,a b", '"ep=3,a b"', "ep=3,a b"),
    ("${oc.env:HOME}", r'"\${oc.env:HOME}"', r"\${oc.env:HOME}"),
    ("it's", '"it\'s"', "it's"),
    ('say "a"', r'"say \"a\""', 'say "a"'),
    ("a\\b\\", r'"a\b\\"', "a\\b\\"),
    ("\\${x}", r'"\\\${x}"', r"\\\${x}"),
]
"""A path, as Hydra 1.3.2 reads it, and as OmegaConf 2.3.1 does: both gave back the path."""


def read_by_hydra(quoted: str) -> str:
    """A quoted value: a quote within has an odd number of backslashes before it, half meant."""
    quote, within = quoted[0], quoted[1:-1]
    assert quote in "\"'"
    assert quoted[-1] == quote
    ends = re.findall(rf"(\\*){quote}", within)
    assert all(len(backslashes) % 2 for backslashes in ends), quoted
    assert len(re.findall(r"\\*\Z", within)[0]) % 2 == 0, quoted
    return re.sub(
        rf"(\\+)({quote}|\Z)", lambda found: found[1][: len(found[1]) // 2] + found[2], within
    )


def read_by_omegaconf(text: str) -> str:
    """Text without an interpolation; backslashes count before ``${``."""
    assert all(len(slashes) % 2 for slashes in re.findall(r"(\\*)\$\{", text)), "an interpolation"
    return re.sub(r"(\\+)\$\{", lambda found: found[1][: len(found[1]) // 2] + "${", text)


def rungs() -> list[tuple[Recommendation, Candidate]]:
    found, _ = goal("trinity", "64k")
    return [(found, candidate) for candidate in found.candidates]


def test_the_yaml_says_what_the_values_say_and_what_was_recommended():
    found, chosen = goal("trinity", "64k", rollout_gpus=2)
    emitted = trinity(found, chosen, model_path="/models/mine")
    document = yaml.safe_load(emitted.text)
    assert (document, document["mode"]) == (nested(emitted.values), "both")
    assert document["cluster"] == {"node_num": 1, "gpu_per_node": 4}
    assert document["explorer"]["rollout_model"] == {"engine_num": 2, "tensor_parallel_size": 1}
    assert document["model"]["model_path"] == "/models/mine"
    assert document["model"]["max_model_len"] == 65_536
    yarn = {"rope_type": "yarn", "factor": 1.6, "original_max_position_embeddings": 40_960}
    assert document["model"]["rope_scaling"] == yarn
    trainer = document["trainer"]
    assert trainer["ulysses_sequence_parallel_size"] == chosen.cell.layout.ulysses_degree
    assert trainer["max_token_len_per_gpu"] == chosen.token_budget_tokens


@pytest.mark.parametrize("emit", [trinity, verl])
@pytest.mark.parametrize("query", [{}, {"offload": True}, {"offload": True, "allocator": "native"}])
def test_offload_is_fsdp2s_policy(emit, query):
    """Asked for or offered by the ladder, and as it was predicted: no states stay on the GPU."""
    found, _ = goal("trinity", "64k", **{"allocator": None} | query)
    for candidate in found.candidates:
        values, chosen = emit(found, candidate).values, candidate.cell.settings
        strategy, policy = (
            next(v for n, v in values.items() if n.endswith(end))
            for end in ("strategy", "offload_policy")
        )
        assert (strategy, policy) == (("fsdp2", True) if chosen.offload else ("fsdp", False))
        assert strategy == chosen.strategy
    assert not any("FSDP1" in note or "--strategy" in note for note in found.notes)


@settings(max_examples=examples(30), deadline=None)
@given(
    st.deferred(lambda: st.sampled_from(rungs())),  # no collection waits for them
    st.one_of(st.none(), st.text(st.characters(exclude_categories=["C"]), min_size=1)),
)
def test_a_shell_reads_the_script_of_verl_as_the_values_say(rung, path):
    emitted = verl(*rung, model_path=path)
    command = emitted.text[emitted.text.index("python3 -m") :]
    shown = command.replace("python3 -m verl.trainer.main_ppo", r"printf '%s\0'", 1)
    words = ["bash", "-c", shown]
    variables = {"MODEL_PATH": "/models/mine"}
    done = subprocess.run(words, capture_output=True, env=variables, check=True)
    words, values = done.stdout.decode().split("\0")[:-1], dict(emitted.values)
    if values[PATH] == "$MODEL_PATH":
        values[PATH] = "/models/mine"
    said = dict(word.split("=", 1) for word in words)
    assert list(said) == list(values)
    assert read_by_omegaconf(read_by_hydra(said.pop(PATH))) == values.pop(PATH)
    assert said == {name: str(value) for name, value in values.items()}


@pytest.mark.parametrize(("path", "quoted", "written"), PATHS, ids=lambda each: each)
def test_a_path_is_a_path_whatever_hydra_and_omegaconf_make_of_it(path, quoted, written):
    command = verl(*goal("verl", "64k"), model_path=path).command
    (word,) = [word for word in shlex.split(command) if word.startswith(PATH)]
    assert word == f"{PATH}={quoted}"
    document = yaml.safe_load(trinity(*goal("trinity", "64k"), model_path=path).text)
    assert document["model"]["model_path"] == written
    assert read_by_omegaconf(read_by_hydra(quoted)) == read_by_omegaconf(written) == path


def test_a_path_that_nobody_named_comes_from_the_environment():
    assert """ actor_rollout_ref.model.path="'$MODEL_PATH'" """ in emitted("verl").text
    assert yaml.safe_load(emitted("trinity").text)["model"]["model_path"] == "${oc.env:MODEL_PATH}"


@pytest.mark.parametrize("emit", [trinity, verl])
def test_the_block_for_the_models_config_is_the_recommended_one_and_every_figure_is_labelled(emit):
    found, chosen = goal("trinity", "64k")
    emitted = emit(found, chosen)
    block = next(line for line in emitted.text.splitlines() if line.startswith("# {"))
    rope = {"rope_parameters": found.yarn.rope_parameters}
    assert json.loads(block.removeprefix("# ")) == rope | {"max_position_embeddings": 65_536}
    assert "predicted" in emitted.text


@pytest.mark.parametrize(
    ("objective", "command"), [("sft", "sft"), ("rw", "reward"), ("grpo", "grpo"), ("dpo", "dpo")]
)
def test_trls_commands_have_their_own_names_and_adapters(objective, command):
    found, chosen = goal(objective=objective, length="16k", ulysses=[1])
    made = trl(found, chosen)
    assert made.command.startswith(f"trl {command} --config trl.yaml")
    assert all(has_words_for("trl", *item, command) for item in made.values.items())
    if objective != "sft":
        rows = chosen.cell.settings.sequences_per_micro_batch // (1 if objective == "grpo" else 2)
        assert made.values["per_device_train_batch_size"] == rows
    values = emitted("trl", lora=16, lora_targets="q_proj,v_proj", objective=objective).values
    expected = {"use_peft": True, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.0}
    expected |= {"lora_target_modules.0": "q_proj", "lora_target_modules.1": "v_proj"}
    expected["dtype"] = "bfloat16"
    if objective == "rw":
        expected |= {"lora_task_type": "SEQ_CLS", "lora_modules_to_save.0": "score"}
    assert expected.items() <= values.items()
    assert all(has_words_for("trl", *item, command) for item in expected.items())


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
    rows = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
    assert rows * gpus % GENERATIONS == 0


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
    assert has_words_for("torchtitan", "training.global_batch_size", 4)
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


def test_grpo_with_vllm_on_the_same_gpus_is_told_in_trls_own_words():
    asked = {"rollout": "vllm", "gpu_memory_utilization": 0.4, "sleep_level": 2}
    found, chosen = goal("trl", objective="grpo", length="16k", trainer="trl", **asked)
    emitted = configured("trl", found, chosen, model="Qwen3-4B")
    told = {name: value for name, value in emitted.values.items() if "vllm" in name}
    assert told == {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.4,
        "vllm_max_model_length": 16_384,
        "vllm_tensor_parallel_size": 1,
        "vllm_enable_sleep_mode": True,
    }
    assert {f"grpo.{name}" for name in told} <= {*recorded("trl", trl_file.VERSION)}
    assert "its sleep mode does not start" in emitted.text
    with pytest.raises(UsageError, match="no words for --sleep-level 2"):
        refuse_unknown_settings("verl", asked, "highwater")


@pytest.mark.parametrize("target", ["trl", "axolotl", "ms-swift", "accelerate"])
def test_attention_sinks_are_trained_by_an_attention_that_their_class_takes(target):
    """Which those are is read from the class by tests/numeric/test_configs_as_their_classes.py."""
    asked = {"model": "gpt-oss-20b", "length": "8k", "lora": 16, "ulysses": [1]}
    found, chosen = goal(target, **asked)
    text = configured(target, found, chosen, model="gpt-oss-20b").text
    assert "flex_attention" in text
    assert not re.search("attn_impl.*flash_attention_2", text)
    usual = configured(target, *goal(target, length="8k"), model="Qwen3-4B").text
    assert "flex_attention" not in usual
    with pytest.raises(UsageError, match="sinks"):
        accelerate(*goal("accelerate", **asked | {"ulysses": [2]}))


def test_a_step_of_grpo_says_of_how_many_sequences_and_what_generates():
    asked: dict[str, Any] = {"gpus": "1xH100-80GB", "objective": "grpo", "trainer": "trl"}
    said = prediction_answer(highwater.predict("Qwen3-4B", **asked))
    assert "TRL's own default is 8 sequences" in said
    assert "Generation by transformers ends it" in said
    eight = highwater.predict("Qwen3-4B", **asked, sequences_per_micro_batch=8)
    assert ", micro-batch 8: " in prediction_answer(eight)


def test_everything_that_the_program_for_torchtitan_imports_is_there():
    known = recorded("torchtitan", torchtitan_file.VERSION)
    found, chosen = goal("torchtitan", loss="chunked")
    for path in (None, "/models/mine"):
        tree = ast.parse(torchtitan(found, chosen, model_path=path).text)
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        imports = [node for node in imports if str(node.module).startswith("torchtitan")]
        assert len(imports) >= 6
        for node in imports:
            names = {f"{node.module}:{alias.name}" for alias in node.names}
            assert names <= set(known), ast.unparse(node)
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert {"TrainingConfig", "ParallelismConfig", "FullAC.Config"} <= calls
    names = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
    for name in names - {"hf_model", "lr"}:
        sections = ("training", "parallelism", "trainer")
        assert any(f"{section}.{name}" in known for section in sections), name


def test_the_models_of_the_catalog_are_torchtitans_own_where_it_has_them():
    known = recorded("torchtitan", torchtitan_file.VERSION)
    assert set(FLAVORS) <= set(catalog_names())
    assert all(f"flavor:{family}:{flavor}" in known for family, flavor in FLAVORS.values())
    found, chosen = goal("torchtitan", model="Llama-3.1-8B", length="64k")
    nodes = ast.walk(ast.parse(torchtitan(found, chosen).text))
    imported = {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert "torchtitan.models.llama3" in imported


def test_where_trl_recomputes_is_where_it_may():
    for changes, degree, ours in (({}, 1, False), ({}, 2, False), (WINDOWED, 2, True)):
        found, _ = goal(**changes)
        emitted = trl(found, rung(found, degree=degree))
        launched = yaml.safe_load(emitted.beside["accelerate.yaml"])
        assert emitted.values["gradient_checkpointing"] is ours
        by_fsdp = launched.get("fsdp_config", {}).get("fsdp_activation_checkpointing", False)
        assert by_fsdp is not ours
    found, _ = goal(recompute="none", length="4k")
    emitted = trl(found, rung(found, degree=1))
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
    assert f"{shape.model_type} has others" in said
    whole = load_model("Qwen3-4B").shape
    assert accelerate_file.layout_obstacle(layout, whole, accelerate_file.WORDS) is None


def test_heads_are_shared_as_windows_and_key_heads_have_it():
    found, _ = goal(**WINDOWED)
    emitted = trl(found, rung(found, degree=2))
    launched = yaml.safe_load(emitted.beside["accelerate.yaml"])
    assert launched["deepspeed_config"]["zero_stage"] == 3
    assert launched["parallelism_config"]["parallelism_config_sp_size"] == 2
    assert emitted.values["pad_to_multiple_of"] == 2
    assert emitted.values["attn_implementation"] == "flash_attention_2"
    asked = {"gpus": "8xH200-141GB", "model": "Qwen2.5-7B"}
    made = TARGETS["ms-swift"].emit(*goal("ms-swift", "16k", ulysses=[4], ring=[2], **asked))
    assert made.values["sequence_parallel_size"] == 8
    assert made.cannot == ()
    other = TARGETS["ms-swift"].emit(*goal("ms-swift", "16k", ulysses=[2], ring=[4], **asked))
    (said,) = other.cannot
    assert said.startswith("Ulysses 2, ring 4: 4 GPUs share heads, and 2 such groups pass")


def test_accelerate_has_both_fsdps_and_ms_swift_names_of_its_own():
    for strategy, version, reshard in (("fsdp", 1, "FULL_SHARD"), ("fsdp2", 2, True)):
        found, _ = goal("accelerate", "16k", strategy=strategy)
        config = yaml.safe_load(accelerate(found, rung(found, degree=1)).text)["fsdp_config"]
        assert (config["fsdp_version"], config["fsdp_reshard_after_forward"]) == (version, reshard)
    known = recorded("ms-swift", ms_swift_file.VERSION)
    for offload in (False, True):
        found, _ = goal("ms-swift", "16k")
        made = TARGETS["ms-swift"].emit(found, rung(found, degree=1, offload=offload))
        sharding = json.loads(made.beside["fsdp.json"])
        assert sharding["fsdp"].split()[2:] == ["offload"] * offload
        for name, value in sharding["fsdp_config"].items():
            assert type(value).__name__ == known[f"fsdp_config.{name}"]

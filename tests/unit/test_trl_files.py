"""A trial as TRL's configuration."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from foreign_trials import trainer_of

from highwater.errors import HighwaterError, MachineError, UsageError
from highwater.model.model import load_model
from highwater.model.rope import yarn
from highwater.nouns.trial import TrialSpec
from highwater.trainers.accelerate import FILE
from highwater.trainers.files import FinetunerTrial, TrialPlace
from highwater.trainers.foreign import OwnFile, TrialFiles
from highwater.trainers.logs import steps_of
from highwater.trainers.trl import trial as trl
from highwater.trials.foreign_trial import check_foreign, python_of, versions_there
from tiny_models import write_model
from trial_specs import trial_of

LENGTH = 16384
PLACE = TrialPlace(Path("/models/one"), Path("/trial"), Path("/trial/output"))


def trial(model: str = "Qwen3-4B", **fields: Any) -> TrialSpec:
    return trial_of(model, **{"loss": "chunked", "length_tokens": LENGTH, **fields})


def files(spec: TrialSpec, *, has_flash: bool = False, **base: Any) -> TrialFiles:
    model = load_model(spec.model_directory)
    scaled = yarn(model, length_tokens=spec.length_tokens)
    launched = FinetunerTrial(spec, model.shape, PLACE, scaled, has_flash)
    launcher = base.pop("launcher", {})
    return trl.trial_files(launched, OwnFile(config=base, launcher=launcher, source="base.yaml"))


def test_a_trial_has_its_length_batch_steps_data_and_output():
    spec = trial(sequences_per_micro_batch=3, micro_batches=4, steps=5)
    own = {"max_length": LENGTH, "per_device_train_batch_size": 3, "max_steps": 5}
    own |= {"gradient_accumulation_steps": 4, "model_name_or_path": "/models/one"}
    own |= {"datasets": [{"path": "json", "data_files": "/trial/documents.jsonl"}]}
    own |= {"output_dir": "/trial/output", "accelerate_config": "/trial/accelerate.yaml"}
    own |= {"save_strategy": "no", "report_to": "none"}
    config = files(spec).config
    assert {name: config[name] for name in own} == own
    assert trl.batch_of(spec, {}).sequences == 12


def test_flash_attention_is_asked_for_where_the_trainer_has_it():
    with_flash, without = files(trial(), has_flash=True).config, files(trial()).config
    assert with_flash["attn_implementation"] == "flash_attention_2"
    assert with_flash["packing"] is True
    assert without["attn_implementation"] == "sdpa"
    assert "packing" not in without


def test_what_is_the_trials_own_is_said_and_the_batch_does_not_shrink_where_memory_runs_out():
    base = {"max_length": 2048, "max_steps": 2, "dataset_name": "org/name", "packing": True}
    found = files(trial(), **base)
    assert found.config["max_length"] == LENGTH
    assert found.config["packing"] is True
    assert "dataset_name" not in found.config
    assert found.notes == (
        "the trial's own in base.yaml: max_length",
        "left out of base.yaml, the data and the reports being the trial's: dataset_name",
    )
    assert files(trial(), auto_find_batch_size=True).config["auto_find_batch_size"] is False


@pytest.mark.parametrize("name", ["deepspeed", "fsdp", "use_vllm", "parallelism_config"])
def test_what_a_trial_cannot_take_over_is_refused_by_name(name):
    with pytest.raises(UsageError, match=f"base.yaml has {name}"):
        files(trial(), **{name: "true"})


@pytest.mark.parametrize(
    ("settings", "base", "by_trl", "by_fsdp"),
    [
        ({}, {"gradient_checkpointing": True}, True, False),
        ({}, {"activation_checkpointing": True}, None, False),  # its new name
        ({}, {}, False, True),
        ({"recompute": "none"}, {"gradient_checkpointing": True}, False, False),
    ],
)
def test_one_of_both_recomputes(settings, base, by_trl, by_fsdp):
    found = files(trial(**settings), **base)
    assert found.config.get("gradient_checkpointing") is by_trl
    assert found.beside[FILE]["fsdp_config"]["fsdp_activation_checkpointing"] is by_fsdp


def test_a_named_setting_is_the_trials_and_a_ring_is_accelerates():
    adapted = files(trial(lora=16), lora_r=64, use_peft=True).config
    assert (adapted["lora_r"], adapted["dtype"]) == (16, "bfloat16")
    assert files(trial(), lora_r=64, use_peft=True).config["lora_r"] == 64
    spec = trial(length_tokens=81920)
    found = files(spec, model_init_kwargs={"use_kernels": True}).config["model_init_kwargs"]
    assert found["rope_parameters"]["factor"] == 2.0
    assert found["use_kernels"] is True
    spec = trial(layout={"gpus": 2, "ring_degree": 2})
    found = files(spec, attn_implementation="flash_attention_2", packing=True)
    assert found.config["attn_implementation"] == "sdpa"
    assert found.config["packing"] is False
    assert found.config["pad_to_multiple_of"] == 4
    assert found.beside[FILE]["parallelism_config"]["parallelism_config_cp_size"] == 2
    assert trl.batch_of(spec, {}).sequences == 2, "both GPUs have one sequence together"


def test_the_users_launcher_stays_but_for_processes_and_shards():
    launcher = {"distributed_type": "FSDP", "num_processes": 8}
    launcher["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    launcher["fsdp_config"] = {"version": 1, "offload_params": True, "min_num_params": 5}
    found = files(trial(), launcher=launcher).beside[FILE]
    assert found["num_processes"] == 1
    assert found["dynamo_config"] == {"dynamo_backend": "INDUCTOR"}
    assert found["fsdp_config"]["fsdp_version"] == 2
    assert found["fsdp_config"]["fsdp_offload_params"] is True
    assert found["fsdp_config"]["fsdp_min_num_params"] == 5


def test_grpo_generates_so_many_tokens_and_no_fewer():
    spec = trial(objective="grpo")
    whole = files(spec).config
    assert whole["max_completion_length"] == LENGTH - trl.document_tokens(spec, {})
    assert whole["generation_kwargs"] == {"min_new_tokens": whole["max_completion_length"]}
    assert whole["gradient_accumulation_steps"] == whole["num_generations"] == 8
    named = {"max_completion_length": 1024, "generation_kwargs": {"top_k": 5}}
    part = files(spec, **named).config
    assert trl.document_tokens(spec, named) == LENGTH - 1024
    assert part["generation_kwargs"] == {"top_k": 5, "min_new_tokens": 1024}
    with pytest.raises(UsageError, match="leave none for a prompt"):
        files(spec, max_completion_length=LENGTH)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (trial(objective="dpo", sequences_per_micro_batch=2), "dpo"),
        (trial(layout={"gpus": 2, "ulysses_degree": 2}), "Ulysses"),
        (trial(layout={"gpus": 2, "ring_degree": 2}, strategy="fsdp"), "FSDP2's"),
        (trial(recompute="all-but-attention"), "whole layers"),
        (trial(offload="states"), "not alone"),
        (trial(optimizer="adamw-bf16"), "adamw-bf16"),
        (trial(layout={"gpus": 2, "ring_degree": 2}, length_tokens=4098), "4 pieces"),
        (trial(layout={"gpus": 2}, device="cpu", memory_budget_bytes=2**30), "nothing on the CPU"),
    ],
)
def test_what_trl_is_not_tried_with_is_refused_by_name(spec, said):
    with pytest.raises(UsageError, match=said):
        trl.check(spec, trainer_of("trl"), lambda _: False)


def steps(*told: tuple[str, str], length: int = 512, **shared: int) -> int:
    lines = (
        f" 50%|█ | 1/2\r{{'loss': '{loss}', 'grad_norm': '0.6', 'num_tokens': '{tokens}', "
        "'epoch': '0.25'}"
        for loss, tokens in told
    )
    return steps_of("\n".join(lines), step_tokens=length, **shared)


def test_steps_are_read_from_the_log_and_none_on_other_lengths_or_without_a_finite_loss():
    assert steps(("6.2", "512"), ("6.1", "1024")) == 2
    assert (steps(("6.2", "1.311e+05"), length=131072), steps(("6.2", "511"))) == (1, 0)
    assert steps(("6.2", "1.31e+05"), length=131072) == 0
    assert (steps(("6.2", "512"), ("6.1", "1023")), steps(("6.2", "1024"))) == (1, 0)
    assert (steps(("6.2", "1024"), shared_by=2), steps(("nan", "512"))) == (1, 0)
    assert steps(("6.2", "512"), ("inf", "1024")) == 1
    older = "{'loss': 6.2, 'grad_norm': 0.6, 'num_tokens': 512.0, 'epoch': 0.25}"
    end = "{'train_runtime': '0.1', 'train_loss': '6.254', 'epoch': '0.5'}"
    for line, count in ((older, 1), (end, 0), ("{'loss': '6.2', 'epoch': 1", 0)):
        assert steps_of(line, step_tokens=512) == count


def test_accelerates_file_is_read_beside_the_configuration(tmp_path):
    assert not trl.own_files(trainer_of("trl")).config
    own = tmp_path / "base.yaml"
    own.write_text("learning_rate: 1.0e-4\naccelerate_config: launch.yaml\n")
    (tmp_path / "launch.yaml").write_text("distributed_type: DEEPSPEED\n")
    base = trl.own_files(trainer_of("trl", own))
    assert base.config["learning_rate"] == 1e-4
    assert (base.launcher, base.source) == ({"distributed_type": "DEEPSPEED"}, "base.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1\n", "is no YAML"),
        ("a: !!int\n", "is no YAML"),
        ("a: &a [x, *a]\n", "its aliases repeat too much"),
        ("- a\n- b\n", "no named fields"),
        ("accelerate_config: fsdp2\n", "no file beside it"),
    ],
)
def test_what_is_no_configuration_is_refused(text, said, tmp_path):
    own = tmp_path / "base.yaml"
    own.write_text(text)
    with pytest.raises(UsageError, match=said):
        trl.own_files(trainer_of("trl", own))


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "trl"
    path.write_text(f"#!{sys.executable}\nprint(1)\n")
    path.chmod(0o755)
    return path


def test_the_python_of_a_program_is_in_its_first_line_and_has_its_versions(program, tmp_path):
    assert python_of(str(program)) == Path(sys.executable)
    program.write_text("#!/bin/sh\nexec trl\n")
    assert python_of(str(program)) is None
    assert python_of(str(tmp_path / "nowhere")) is None
    found = versions_there(Path(sys.executable), ("msgspec", "no-such-package"))
    assert list(found) == ["msgspec"]
    assert versions_there(tmp_path / "nowhere", ("msgspec",)) == {}


def checked(spec: TrialSpec, program: Path) -> tuple[str, ...]:
    foreign = trainer_of("trl", command=(str(program),))
    return check_foreign([msgspec.structs.replace(spec, foreign=foreign)])


def test_what_a_reader_should_know_is_said_before_the_first_trial(program, tmp_path, monkeypatch):
    spec = trial("Qwen3-0.6B", objective="grpo")
    said = "\n".join(checked(spec, program))
    for each in ("weights", "tokenizer", "sdpa", "8 micro-batches", "generated one by one"):
        assert each in said
    with pytest.raises(HighwaterError, match="not found"):
        checked(spec, tmp_path / "nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spec = trial(str(write_model(tmp_path / "huge", intermediate_size=10**9)))
    with pytest.raises(MachineError, match="has no weights here"):
        checked(spec, program)

"""A trial that accelerate launches."""

import json
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import pytest
import yaml

from highwater.errors import HighwaterError, UsageError
from highwater.model.model import load_model
from highwater.nouns.foreign_request import program_of
from highwater.nouns.plan import plan
from highwater.nouns.request import Request, request_from
from highwater.nouns.settings import Settings
from highwater.nouns.study import Question
from highwater.nouns.trial import Device, TrialSpec, unheard
from highwater.trainers.accelerate import launcher_file
from highwater.trainers.foreign import TRIALS, TrialFiles, TrialHome
from highwater.trials.foreign_trial import check_foreign
from highwater.trials.inputs import prepared_model
from highwater.trials.readiness import check_machine
from highwater.units import GIB
from places import machine_with
from tables import table
from trial_specs import trial_of

COMMAND = "train.py --model {model} --max-len {length} --steps {steps}"
MACHINE = machine_with(4)
DDP = {"distributed_type": "MULTI_GPU", "mixed_precision": "fp16"}


def asked(**changes: Any) -> Request:
    known = {"model": "Qwen3-0.6B", "trainer": "accelerate", "command": COMMAND}
    return request_from({**known, **changes}, keywords=True)


def question(**changes: Any) -> Question:
    return plan(asked(**changes), MACHINE).question


def trial(*, device: Device = "cuda", length: int = 8192, **fields: Any) -> TrialSpec:
    where = {"device": device, "memory_budget_bytes": GIB if device == "cpu" else None}
    return trial_of("Qwen3-0.6B", length_tokens=length, **where, **fields)


def written(spec: TrialSpec, **base: Any) -> TrialFiles:
    return launcher_file(spec, load_model(spec.model_directory).shape, base, source="own.yaml")


@pytest.mark.parametrize(
    ("typed", "said"), table("accelerate_trials", "what_is_no_launch_is_refused")
)
def test_what_is_no_launch_is_refused(typed, said):
    with pytest.raises(UsageError) as refused:
        question(command=typed)
    assert said in refused.value.problem
    assert refused.value.hint


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("loss", "chunked"), ("objective", "grpo"), ("optimizer", "adamw-8bit"), ("lora", 16)),
        *(("rope", "yarn"), ("mlp_tiles", 4)),
    ],
)
def test_what_belongs_in_the_script_is_refused_by_name(name, value):
    with pytest.raises(UsageError) as refused:
        asked(**{name: value})
    assert "say it in the command" in refused.value.hint


def test_the_layout_need_not_be_in_the_command():
    found = question(gpus=[1, 2, 4], copies=[1], ring=[1, 2], strategy="fsdp2")
    layouts = {(cell.layout.gpus, cell.layout.ring_degree) for cell in found.cells}
    assert layouts == {(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)}
    assert {cell.layout.gpus for cell in question().cells} == {1, 2, 4}


def test_a_file_says_processes_shards_and_a_free_port():
    values = written(trial(layout={"gpus": 4, "replicate_degree": 2}, offload=True)).config
    assert values["distributed_type"] == "FSDP"
    assert (values["num_processes"], values["num_machines"]) == (4, 1)
    assert values["main_process_port"] == 0
    fsdp = values["fsdp_config"]
    assert (fsdp["fsdp_version"], fsdp["fsdp_offload_params"]) == (2, True)
    assert fsdp["fsdp_activation_checkpointing"] is True
    assert values["parallelism_config"]["parallelism_config_dp_replicate_size"] == 2
    first = written(trial(strategy="fsdp", recompute="none"))
    assert first.config["fsdp_config"]["fsdp_version"] == 1
    assert first.config["fsdp_config"]["fsdp_activation_checkpointing"] is False
    assert first.notes == ()


def test_the_users_other_fields_stay():
    machine = {"num_processes": 8, "num_machines": 2, "main_process_ip": "10.0.0.1"}
    machine |= {"main_process_port": 1234, "gpu_ids": "0,1"}
    theirs = {"fsdp_version": 2, "reshard_after_forward": False, "offload_params": True}
    theirs |= {"activation_checkpointing": False}
    kept = {"mixed_precision": "fp16", "dynamo_config": {"dynamo_backend": "INDUCTOR"}}
    found = written(trial(), distributed_type="FSDP", **kept, **machine, fsdp_config=theirs)
    values, fsdp = found.config, found.config["fsdp_config"]
    assert kept.items() <= values.items()
    assert (values["num_processes"], values["gpu_ids"]) == (1, "all")
    assert "main_process_ip" not in values
    for name in ("reshard_after_forward", "activation_checkpointing", "offload_params"):
        assert fsdp[f"fsdp_{name}"] is theirs[name]
    assert found.notes == (
        "the trial's own in own.yaml: gpu_ids, main_process_ip, main_process_port, num_machines",
    )


def test_a_setting_that_is_named_is_the_trials():
    theirs = {"fsdp_version": 2, "fsdp_activation_checkpointing": True}
    found = written(trial(recompute="none", offload=True), fsdp_config=theirs)
    assert found.config["fsdp_config"]["fsdp_activation_checkpointing"] is False
    assert found.config["fsdp_config"]["fsdp_offload_params"] is True


def test_fsdp1_and_other_ways_to_share_in_the_users_file_are_told():
    theirs = {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_activation_checkpointing": False}
    found = written(trial(), distributed_type="FSDP", fsdp_config=theirs)
    assert found.config["fsdp_config"]["fsdp_version"] == 2
    assert any("--strategy fsdp`" in note for note in found.notes)
    assert not written(trial(strategy="fsdp"), fsdp_config=theirs).notes
    found = written(trial(layout={"gpus": 2}), **DDP)
    assert found.config["distributed_type"] == "MULTI_GPU"
    assert (found.config["mixed_precision"], found.config["num_processes"]) == ("fp16", 2)
    assert "fsdp_config" not in found.config
    assert found.notes == ("states are shared by own.yaml's MULTI_GPU, not by FSDP",)


@pytest.mark.parametrize(
    ("spec", "base", "said"),
    [
        (trial(recompute="none"), DDP, "--recompute is FSDP's"),
        (trial(offload=True), DDP, "--offload is FSDP's"),
        (trial(layout={"gpus": 2, "ring_degree": 2}), DDP, "--ring is FSDP's"),
        (trial(layout={"gpus": 2}), {"distributed_type": "NO"}, "one process"),
        (trial(), {"distributed_type": "XLA"}, "for XLA"),
        (trial(), {"compute_environment": "AMAZON_SAGEMAKER"}, "AMAZON_SAGEMAKER"),
        (trial(), {"parallelism_config": {"parallelism_config_tp_size": 2}}, "tp_size"),
        (trial(layout={"gpus": 2, "ulysses_degree": 2}), {}, "Ulysses is DeepSpeed's"),
        (trial(offload="states"), {}, "not alone"),
        (trial(recompute="all-but-attention"), {}, "whole layers"),
        (trial(layout={"gpus": 2}, device="cpu"), {}, "on the CPU"),
        (trial(layout={"gpus": 2, "ring_degree": 2}, strategy="fsdp"), {}, "ring is FSDP2's"),
        (trial(layout={"gpus": 2, "ring_degree": 2}, length=8190), {}, "4 pieces"),
    ],
)
def test_what_accelerate_cannot_be_told_is_refused(spec, base, said):
    with pytest.raises(UsageError) as refused:
        written(spec, **base)
    assert said in refused.value.problem
    assert refused.value.hint


def test_on_the_cpu_one_process_trains():
    theirs = {"mixed_precision": "bf16", "num_processes": 8, "distributed_type": "FSDP"}
    found = written(trial(device="cpu"), **theirs, fsdp_config={"fsdp_version": 2}, debug=True)
    ours = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "use_cpu": True}
    ours |= {"num_machines": 1, "num_processes": 1}
    assert found.config == ours | {"mixed_precision": "bf16", "debug": True}


def prepared(tmp_path: Path, **changes: Any) -> tuple[list[str], dict[str, Any]]:
    found = question(gpus=[1], allocator="native", **changes)
    spec = found.trial(found.cells[0], 8192)
    assert spec.foreign is not None
    home = TrialHome(tmp_path, lambda _: False, lambda _: prepared_model(spec, Event(), unheard))
    command = TRIALS["accelerate"].prepare(spec, spec.foreign, home)
    return list(command.words), yaml.safe_load((tmp_path / "accelerate.yaml").read_text())


def test_accelerate_is_started_with_the_trials_file_and_the_users_words(tmp_path):
    words, values = prepared(tmp_path, command="/a/accelerate launch t.py {length} {gpus}")
    file = str(tmp_path / "accelerate.yaml")
    assert words == ["/a/accelerate", "launch", "--config_file", file, "t.py", "8192", "1"]
    assert values["num_processes"] == 1


def test_a_directory_that_is_whole_is_opened_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    whole = tmp_path / "whole"
    whole.mkdir()
    shape = Path(load_model("Qwen3-0.6B").directory, "config.json")
    (whole / "config.json").write_bytes(shape.read_bytes())
    (whole / "tokenizer.json").write_text("{}")
    header = json.dumps({"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    (whole / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    words, _ = prepared(tmp_path, model=str(whole))
    assert str(whole) in words
    assert not (tmp_path / "cache").exists()


def test_notes_say_what_is_trained_and_who_recomputes():
    found = question(gpus=[1])
    said = check_foreign(found.trial(cell, 8192) for cell in found.cells)
    assert len(said) == len(set(said)) == 3
    for each in ("random ones", "token for each word", "`--recompute none`"):
        assert any(each in note for note in said)
    by_itself = question(gpus=[1], command="train.py {length}", recompute="none")
    assert check_foreign([by_itself.trial(by_itself.cells[0], 8192)]) == ()


def test_a_script_or_a_program_that_is_not_here_is_told_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "accelerate"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)

    def check(command: str) -> None:
        request = asked(command=command, log_dir=str(tmp_path), device="cpu")
        check_machine(request, MACHINE, Settings(), "cpu", gpus=1)

    with pytest.raises(HighwaterError, match=r"script train\.py is not a file"):
        check(f"{program} launch train.py {{length}}")
    (tmp_path / "train.py").touch()
    check(f"{program} launch train.py {{length}}")
    check(f"{program} launch -m package {{length}}")
    with pytest.raises(HighwaterError, match="program '/no/accelerate' is not found") as refused:
        check("/no/accelerate launch train.py {length}")
    assert "pip install accelerate" in refused.value.hint


def test_a_node_needs_the_program_that_starts_and_no_length():
    assert program_of(asked()) == "accelerate"
    assert program_of(asked(command="/a/accelerate launch t.py {length}")) == "/a/accelerate"
    trl = msgspec.structs.replace(asked(), trainer="trl", command="/a/bin/trl")
    assert program_of(trl) == "/a/bin/trl"

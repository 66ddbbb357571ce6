"""Requests for other trainers: what they are told, what they cannot be told; and what accelerate is
told, which launches a trial.
"""

import ast
import json
import shlex
import subprocess
import sys
from pathlib import Path
from threading import Event
from typing import Any, get_args

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from test_declared_settings import value_of

from highwater.cli.config import to_yaml
from highwater.cli.flags import request_of
from highwater.cli.grammar import parse
from highwater.errors import HighwaterError, UsageError
from highwater.memory.trainers import MEMORY
from highwater.model.model import load_model
from highwater.nouns import foreign_request, trainer
from highwater.nouns.foreign_request import program_of
from highwater.nouns.layout import Layout
from highwater.nouns.plan import plan, plan_trial
from highwater.nouns.request import DECLARED, Request, request_from
from highwater.nouns.settings import Settings
from highwater.nouns.study import Question
from highwater.nouns.trial import Device, TrialSpec, unheard
from highwater.pages.study_commands import find_words, try_words
from highwater.trainers.accelerate import launcher_file
from highwater.trainers.foreign import TRIALS, TrialFiles, TrialHome
from highwater.trainers.targets import TARGETS
from highwater.trials.foreign_trial import check_foreign
from highwater.trials.inputs import prepared_model
from highwater.trials.readiness import check_machine
from highwater.units import GIB
from places import ROOT, machine_with, question_of
from tables import table
from trial_specs import trial_of

COMMAND = "torchrun --nproc-per-node {gpus} train.py --len {length} --sp {ulysses} --steps {steps}"
ASKED: dict[str, Any] = {"model": "Qwen3-0.6B", "trainer": "command", "command": COMMAND}
MACHINE = machine_with(8)


def asked(**changes: Any) -> Request:
    return request_from({**ASKED, **changes}, keywords=True)


def question(**changes: Any) -> Question:
    return plan(asked(**changes), MACHINE).question


def command_trial(**changes: Any) -> TrialSpec:
    found = question(**changes)
    return found.trial(found.cells[0], 8192)


def test_the_rungs_of_another_trainer_are_the_allocators():
    cells = question(gpus=[1, 2], ulysses=[1, 2]).cells
    found = [(c.layout.gpus, c.layout.ulysses_degree, c.settings.allocator) for c in cells]
    layouts, allocators = ((1, 1), (2, 1), (2, 2)), ("native", "expandable")
    assert found == [(*layout, allocator) for layout in layouts for allocator in allocators]
    (only,) = question(gpus=[1], allocator="expandable").cells
    assert only.settings.label == "Env"


def test_a_trial_fills_the_placeholders_of_its_command(tmp_path):
    spec = command_trial(gpus=[4], ulysses=[2], steps=3)
    words = foreign_request.filled_command(spec.foreign.command, spec, tmp_path)
    assert shlex.join(words) == ("torchrun --nproc-per-node 4 train.py --len 8192 --sp 2 --steps 3")
    every = foreign_request.split_command(
        " ".join(f"--{name}={{{name}}}" for name in foreign_request.PLACEHOLDERS)
    )
    assert foreign_request.placeholders_of(every) == set(foreign_request.PLACEHOLDERS)
    filled = foreign_request.filled_command(every, spec, tmp_path)
    assert not any("{" in word for word in filled)
    assert f"--output={tmp_path}" in filled
    assert f"--model={spec.model_directory}" in filled
    assert foreign_request.filled_command(("{{a}}", "{length}"), spec, tmp_path) == ("{a}", "8192")


@pytest.mark.parametrize(
    ("command", "what"), table("foreign_requests", "a_command_that_cannot_be_filled_is_refused")
)
def test_a_command_that_cannot_be_filled_is_refused(command, what):
    with pytest.raises(UsageError) as refused:
        question(command=command)
    assert what in refused.value.hint


@given(st.text(max_size=40))
def test_no_command_is_too_odd_to_be_split_or_refused(text):
    try:
        words = foreign_request.split_command(text)
    except UsageError:
        return
    typed = trainer.ForeignTrainer(trainer="command", command=words).typed
    assert foreign_request.split_command(typed) == words, "what is shown is the same command again"


@pytest.mark.parametrize(
    ("named", "missing"),
    [
        ({"gpus": [1, 2], "command": "train {length}"}, "{gpus}"),
        ({"gpus": [4], "ulysses": [1, 2], "command": "train {length} {gpus}"}, "{ulysses}"),
        ({"gpus": [4], "ring": [1, 2], "command": "train {length}"}, "{ring}"),
    ],
)
def test_several_values_that_a_command_is_not_told_are_refused(named, missing):
    with pytest.raises(UsageError) as refused:
        question(**named)
    assert missing in refused.value.problem


def test_one_value_may_stand_in_the_command_itself():
    found = question(gpus=[4], ulysses=[2], command="train --nproc 4 --sp 2 {length}")
    assert {(c.layout.gpus, c.layout.ulysses_degree) for c in found.cells} == {(4, 2)}
    assert {c.layout.gpus for c in question(command="train {length}").cells} == {1}
    assert {c.layout.gpus for c in question().cells} == {1, 2, 4, 8}


@pytest.mark.parametrize("name", sorted(set(DECLARED) - trainer.FOREIGN["command"].settings))
def test_what_a_command_cannot_be_told_is_refused_by_name(name):
    row = DECLARED[name]
    with pytest.raises(UsageError) as refused:
        asked(**{name: value_of(row)})
    assert row.words in refused.value.problem
    assert refused.value.hint


@pytest.mark.parametrize("name", ["command", "trainer_config", "done_pattern"])
def test_what_is_said_of_another_trainer_says_nothing_of_this_engine(name):
    named = {"command": COMMAND, "trainer_config": "base.yaml", "done_pattern": "done"}
    request = request_from({"model": "Qwen3-0.6B", name: named[name]}, keywords=True)
    with pytest.raises(UsageError, match=DECLARED[name].words):
        plan(request, MACHINE)


@pytest.mark.parametrize(
    "changes", [{"command": None}, {"proof": "memory"}, {"done_pattern": "(unclosed"}]
)
def test_what_is_missing_or_cannot_be_is_refused_before_anything_starts(changes):
    with pytest.raises(HighwaterError):
        question(**changes)


def test_everything_that_an_outcome_depends_on_is_in_the_keys():
    known = command_trial()
    ours = question_of(gpus=[1], loss="full", allocator="native")
    others = (
        command_trial(command=f"{COMMAND} --more"),
        command_trial(done_pattern="done"),
        command_trial(done_pattern=""),
        ours.trial(ours.cells[0], 8192),
    )
    assert len({spec.key for spec in (known, *others)}) == 5
    assert question().key != question(command=f"{COMMAND} --more").key
    assert question().key == question().key


def test_a_configuration_is_known_by_its_content_wherever_it_lies(tmp_path):
    trainers, paths = [], [tmp_path / f"{name}.yaml" for name in "ab"]
    for path in paths:
        path.write_text("warmup: 3\n")
        trainers.append(
            foreign_request.foreign_of(msgspec.structs.replace(asked(), trainer_config=str(path)))
        )
    keys = {msgspec.structs.replace(command_trial(), foreign=foreign).key for foreign in trainers}
    assert len(keys) == 1
    assert trainers[0] is not None
    assert foreign_request.base_config(trainers[0]) == b"warmup: 3\n"


def test_a_question_and_a_trial_are_asked_again_by_what_a_report_or_a_file_says(tmp_path):
    named = {"gpus": [1, 2], "command": "python t.py --x 'a b' {{}} {length} {gpus}"}
    named["done_pattern"] = "step 2"
    found, file = question(**named), tmp_path / "study.yaml"
    file.write_text(to_yaml(asked(**named)))
    for words in (list(find_words(found))[1:], ["find", "--config", str(file)]):
        assert plan(request_of(parse(words)), MACHINE).question.key == found.key
    for cell in found.cells:
        spec = found.trial(cell, 8192)
        arguments = parse(list(try_words(spec, found.model))[1:])
        assert plan_trial(request_of(arguments), MACHINE, 8192).key == spec.key


SRC = ROOT / "src" / "highwater"


def test_every_trainer_and_target_has_each_part_that_the_registry_says():
    assert set(trainer.REGISTRY) == {trainer.OURS, *trainer.FOREIGN, *trainer.TRAINERS, *TARGETS}
    assert set(get_args(trainer.TriedTrainer)) == {trainer.OURS, *trainer.FOREIGN}
    for parts in (trainer.TRAINERS, MEMORY, trainer.FOREIGN, TRIALS, TARGETS):
        assert all(parts.values())
    traced = {path.stem.removesuffix("_step") for path in (SRC / "engine/tracer").glob("*_step.py")}
    traces = [name for name, traits in trainer.TRAINERS.items() if traits.traces != "none"]
    assert traced == {trainer.REGISTRY[name].trains_by or name for name in traces}
    assert {name for name, traits in trainer.TRAINERS.items() if traits.is_watched} <= set(
        trainer.FOREIGN
    )
    assert {row.predicted_for for row in TARGETS.values()} <= set(trainer.TRAINERS)
    assert {target for row in trainer.TRAINERS.values() for target in row.targets} <= set(TARGETS)


def test_a_trainers_module_is_imported_when_it_is_asked_for():
    asks = (
        "import sys; from highwater.memory.trainers import MEMORY; "
        "from highwater.trainers.targets import TARGETS; "
        "there = lambda: sorted(n for n in sys.modules if n.startswith('highwater.trainers.t')); "
        "print(there()); TARGETS['torchtitan']; print(there())"
    )
    said = subprocess.check_output([sys.executable, "-c", asks], text=True).splitlines()
    before, after = "'highwater.trainers.targets'", "'highwater.trainers.torchtitan'"
    assert said == [f"[{before}]", f"[{before}, {after}]"]


def test_nobody_compares_a_trainer_with_a_name():
    names = set(get_args(trainer.TrainerName))
    for path in SRC.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        compared = [node for node in nodes if isinstance(node, ast.Compare)]
        sides = [each for node in compared for each in (node.left, *node.comparators)]
        assert not {each.value for each in sides if isinstance(each, ast.Constant)} & names, path


def test_every_setting_of_a_rung_has_a_name_that_a_target_may_know():
    fields = {row.sets for row in DECLARED.values()}
    assert set(Settings.__struct_fields__) <= fields
    names = {*DECLARED, *Layout().degree_settings}
    assert all(row.knows <= names for row in TARGETS.values())


LAUNCHED = {
    "trainer": "accelerate",
    "command": "train.py --model {model} --max-len {length} --steps {steps}",
}
DDP = {"distributed_type": "MULTI_GPU", "mixed_precision": "fp16"}


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
        question(**LAUNCHED | {"command": typed})
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
        asked(**LAUNCHED, **{name: value})
    assert "say it in the command" in refused.value.hint


def test_the_layout_need_not_be_in_the_command():
    found = question(**LAUNCHED, gpus=[1, 2, 4], copies=[1], ring=[1, 2], strategy="fsdp2")
    layouts = {(cell.layout.gpus, cell.layout.ring_degree) for cell in found.cells}
    assert layouts == {(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)}
    assert {cell.layout.gpus for cell in question(**LAUNCHED).cells} == {1, 2, 4, 8}


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
    found = question(**LAUNCHED | changes, gpus=[1], allocator="native")
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
    found = question(**LAUNCHED, gpus=[1])
    said = check_foreign(found.trial(cell, 8192) for cell in found.cells)
    assert len(said) == len(set(said)) == 3
    for each in ("random ones", "token for each word", "`--recompute none`"):
        assert any(each in note for note in said)
    by_itself = question(**LAUNCHED | {"command": "train.py {length}"}, gpus=[1], recompute="none")
    assert check_foreign([by_itself.trial(by_itself.cells[0], 8192)]) == ()


def test_a_script_or_a_program_that_is_not_here_is_told_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "accelerate"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)

    def check(command: str) -> None:
        request = asked(**LAUNCHED | {"command": command}, log_dir=str(tmp_path), device="cpu")
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
    assert program_of(asked(**LAUNCHED)) == "accelerate"
    typed = LAUNCHED | {"command": "/a/accelerate launch t.py {length}"}
    assert program_of(asked(**typed)) == "/a/accelerate"
    trl = msgspec.structs.replace(asked(**LAUNCHED), trainer="trl", command="/a/bin/trl")
    assert program_of(trl) == "/a/bin/trl"

"""A trial as the YAML of LLaMA-Factory, Axolotl and ms-swift."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from emitting import recorded
from foreign_trials import trainer_of

from highwater.errors import HighwaterError, UsageError
from highwater.model.model import load_model
from highwater.model.rope import yarn
from highwater.nouns.plan import plan
from highwater.nouns.request import request_from
from highwater.nouns.trainer import BY_COMMAND, FOREIGN, PAGE
from highwater.nouns.trial import TrialSpec
from highwater.trainers import axolotl, llamafactory, ms_swift
from highwater.trainers.axolotl import AXOLOTL
from highwater.trainers.files import (
    DOCUMENTS,
    Finetuner,
    FinetunerTrial,
    TrialPlace,
    finetuner_base,
    trial_files,
)
from highwater.trainers.foreign import OwnFile, TrialFiles
from highwater.trainers.llamafactory import LLAMAFACTORY
from highwater.trainers.logs import steps_of
from highwater.trainers.ms_swift import MS_SWIFT
from highwater.trainers.targets import TARGETS
from highwater.trials.foreign_trial import check_foreign
from highwater.units import GIB
from places import machine_with
from trial_specs import trial_of

LENGTH = 16384
PLACE = TrialPlace(Path("/trial/Qwen3-4B"), Path("/trial"), Path("/trial/output"))
TRAINERS = (LLAMAFACTORY, AXOLOTL, MS_SWIFT)
MODULES = {"llamafactory": llamafactory, "axolotl": axolotl, "ms-swift": ms_swift}
BATCH, FLASH = "per_device_train_batch_size", "flash_attention_2"
WORDS = {
    "llamafactory": ("cutoff_len", BATCH, "optim", "lora_rank", "fa2"),
    "axolotl": ("sequence_len", "micro_batch_size", "optimizer", "lora_r", FLASH),
    "ms-swift": ("max_length", BATCH, "optim", "lora_rank", FLASH),
}
"""The fields of a length, of the sequences in a micro-batch, of the optimizer, and of adapters'
rank; and flash attention's name."""
PAIRS = {"objective": "rw", "sequences_per_micro_batch": 2}
EACH = pytest.mark.parametrize("trainer", TRAINERS, ids=lambda each: each.name)


def trial(model: str = "Qwen3-4B", **fields: Any) -> TrialSpec:
    return trial_of(model, **{"memory_budget_bytes": 80 * GIB, "length_tokens": LENGTH, **fields})


def launched(spec: TrialSpec, *, has_flash: bool = False) -> FinetunerTrial:
    model = load_model(spec.model_directory)
    scaled = yarn(model, length_tokens=spec.length_tokens)
    return FinetunerTrial(spec, model.shape, PLACE, scaled, has_flash)


def files(each: Finetuner, spec: TrialSpec, *, has_flash: bool = False, **base: Any) -> TrialFiles:
    return trial_files(each, launched(spec, has_flash=has_flash), OwnFile(base, "base.yaml"))


@EACH
def test_a_trial_has_its_length_batch_steps_data_and_output(trainer):
    config = files(trainer, trial(sequences_per_micro_batch=3, micro_batches=4, steps=5)).config
    length, rows, *_ = WORDS[trainer.name]
    assert (config[length], config[rows]) == (LENGTH, 3)
    assert (config["gradient_accumulation_steps"], config["max_steps"]) == (4, 5)
    assert str(PLACE.model_directory) in config.values()
    assert config["output_dir"] == "/trial/output"
    assert (config["save_strategy"], config["logging_steps"]) == ("no", 1)


@EACH
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("changes", [{}, {"lora": 8, "recompute": "none"}])
def test_every_field_of_a_trial_is_one_of_the_trainers_own(trainer, device, changes):
    known = recorded(trainer.name, MODULES[trainer.name].VERSION)
    config = files(trainer, trial(device=device, **changes)).config
    others = {"ENV", "predict_with_generate"}  # variables; transformers' Seq2SeqTrainingArguments
    assert not config.keys() - known.keys() - others


def test_the_data_are_described_as_each_trainer_wants_it():
    described = files(LLAMAFACTORY, trial()).beside["dataset_info.json"]
    config = files(LLAMAFACTORY, trial()).config
    assert described[config["dataset"]]["file_name"] == DOCUMENTS
    assert config["dataset_dir"] == "/trial"
    (dataset,) = files(AXOLOTL, trial()).config["datasets"]
    assert (dataset["path"], dataset["type"]) == (f"/trial/{DOCUMENTS}", "completion")
    assert files(MS_SWIFT, trial()).config["dataset"] == [f"/trial/{DOCUMENTS}"]


@EACH
def test_without_a_file_or_data_it_is_what_is_emitted(trainer):
    with_flash, without = (files(trainer, trial(), has_flash=has) for has in (True, False))
    assert with_flash.config[trainer.attention] == WORDS[trainer.name][-1]
    assert with_flash.config["learning_rate"] == 1e-5
    assert without.config[trainer.attention] == "sdpa"
    assert "attention is sdpa" in without.notes
    packing = {"llamafactory": "neat_packing", "axolotl": "sample_packing", "ms-swift": "packing"}
    assert with_flash.config[packing[trainer.name]] is True
    assert (packing[trainer.name] in without.config) is (trainer is AXOLOTL)
    name = "datasets" if trainer is AXOLOTL else "dataset"
    found = files(trainer, trial(), **{name: "mine", "resume_from_checkpoint": "/old", "seed": 1})
    assert "resume_from_checkpoint" not in found.config
    assert found.config[name] != "mine"
    assert any(f"{name}, resume_from_checkpoint" in note for note in found.notes)


@EACH
def test_the_users_fields_stay_but_where_a_setting_is_typed(trainer):
    length, rows, optimizer, rank, _ = WORDS[trainer.name]
    theirs = {"learning_rate": 3e-4, rank: 64, "seed": 7}
    found = files(trainer, trial(), **theirs, **{length: 512, rows: 9}, max_steps=500)
    assert theirs.items() <= found.config.items()
    assert (found.config[length], found.config[rows]) == (LENGTH, 1)
    own = ", ".join(sorted((length, rows, "max_steps")))
    assert f"the trial's own in base.yaml: {own}" in found.notes
    # a file with adapters' rank alone says nothing of what is tuned: the trainer's default
    absent = {"finetuning_type", "tuner_type", "adapter", trainer.attention, optimizer}
    assert not absent & found.config.keys()
    *_, optimizer, rank, _ = WORDS[trainer.name]
    base = {optimizer: "lion_8bit", rank: 64}
    config = files(trainer, trial(optimizer="adamw-8bit", lora=8), **base).config
    assert (config[optimizer], config[rank]) == ("adamw_torch_8bit", 8)
    assert files(trainer, trial(), **base).config[optimizer] == "lion_8bit"


def test_states_are_shared_by_what_is_emitted_for_the_layout():
    llama, axolotl, swift = (files(each, trial(layout={"gpus": 4})) for each in TRAINERS)
    launcher, section = llama.beside["accelerate.yaml"], axolotl.config["fsdp_config"]
    assert (launcher["num_processes"], launcher["main_process_port"]) == (4, 0)
    assert launcher["fsdp_config"]["fsdp_activation_checkpointing"] is False
    assert (section["activation_checkpointing"], section["offload_params"]) == (True, False)
    assert swift.config["fsdp"] == "/trial/fsdp.json"
    assert swift.config["ENV"]["NPROC_PER_NODE"] == 4
    assert swift.beside["fsdp.json"]["fsdp_config"]["activation_checkpointing"] is True
    assert files(AXOLOTL, trial(offload=True)).config["fsdp_config"]["offload_params"] is True


@pytest.mark.parametrize(
    ("base", "recompute", "expected"),
    [
        ({}, "layer", (False, True)),
        ({"gradient_checkpointing": True}, "layer", (True, False)),
        ({"gradient_checkpointing": False}, "layer", (False, True)),
        ({"gradient_checkpointing": True}, "none", (False, False)),
        ({}, "none", (False, False)),
    ],
)
def test_one_of_both_recomputes_never_both(base, recompute, expected):
    spec, own = trial(recompute=recompute), {"seed": 1, **base}
    axolotl, swift = (files(each, spec, **own) for each in (AXOLOTL, MS_SWIFT))
    sections = (axolotl.config["fsdp_config"], swift.beside["fsdp.json"]["fsdp_config"])
    for made, by_fsdp in zip((axolotl, swift), sections, strict=True):
        own = bool(made.config.get("gradient_checkpointing"))
        assert (own, by_fsdp["activation_checkpointing"]) == expected
    llama = files(LLAMAFACTORY, trial(recompute="none"), disable_gradient_checkpointing=False)
    assert llama.config["disable_gradient_checkpointing"] is True


def test_the_users_section_about_fsdp_stays_but_for_sharding_and_four_bits():
    section = {"state_dict_type": "FULL_STATE_DICT", "offload_params": True}
    section |= {"fsdp_transformer_layer_cls_to_wrap": "Qwen3DecoderLayer"}
    own = files(AXOLOTL, trial(), fsdp_config=section).config["fsdp_config"]
    assert own["transformer_layer_cls_to_wrap"] == "Qwen3DecoderLayer"
    assert own["state_dict_type"] == "SHARDED_STATE_DICT"
    assert own["offload_params"] is True
    own = files(AXOLOTL, trial(), load_in_4bit=True, adapter="qlora").config
    assert own["fsdp_config"]["cpu_ram_efficient_loading"] is False
    swift = files(MS_SWIFT, trial(), quant_bits=4)
    assert swift.beside["fsdp.json"]["fsdp_config"]["cpu_ram_efficient_loading"] is False
    llama = files(LLAMAFACTORY, trial(), quantization_bit=4).beside["accelerate.yaml"]
    assert llama["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] is False


@EACH
def test_on_the_cpu_nothing_is_sharded_and_the_trainer_recomputes(trainer):
    base = {"fsdp_version": 2} if trainer is AXOLOTL else {"seed": 1}
    found = files(trainer, trial(device="cpu"), **base)
    assert not [name for name in found.config if name.startswith(("fsdp", "dp_", "context_par"))]
    assert not {"accelerate.yaml", "fsdp.json"} & found.beside.keys()
    if trainer is LLAMAFACTORY:
        assert found.config["disable_gradient_checkpointing"] is False
    else:
        assert found.config["gradient_checkpointing"] is True
        none = files(trainer, trial(device="cpu", recompute="none")).config
        assert not none["gradient_checkpointing"]


def test_sequences_are_shared_as_each_trainer_shares_them():
    config = files(AXOLOTL, trial(layout={"gpus": 4, "ring_degree": 2}), has_flash=True).config
    assert (config["context_parallel_size"], config["dp_shard_size"]) == (2, 2)
    heads = trial(layout={"gpus": 4, "ulysses_degree": 4})
    assert files(MS_SWIFT, heads, has_flash=True).config["sequence_parallel_size"] == 4
    copies = trial(layout={"gpus": 4, "replicate_degree": 2})
    assert files(AXOLOTL, copies).config["dp_replicate_size"] == 2


@pytest.mark.parametrize(
    ("trainer", "spec", "said", "hint"),
    [
        (LLAMAFACTORY, {"layout": {"gpus": 2, "ring_degree": 2}}, "shares no", "--ring 1"),
        (AXOLOTL, {"layout": {"gpus": 2, "ulysses_degree": 2}}, "alone", "--ring 2"),
        (MS_SWIFT, {"layout": {"gpus": 4, "ring_degree": 4}}, "key heads", "--ulysses 4"),
        (MS_SWIFT, {"layout": {"gpus": 2, "replicate_degree": 2}}, "copies", "--copies 1"),
        (LLAMAFACTORY, {"length_tokens": 1021}, "multiple of 8 ", "--length 1024"),
        (AXOLOTL, {"length_tokens": 1000}, "multiple of 64 ", "--length 1024"),
        (MS_SWIFT, {"recompute": "all-but-attention"}, "whole layers", "--recompute layer"),
        (AXOLOTL, {"optimizer": "adamw-bf16"}, "no adamw-bf16", "leave"),
        (LLAMAFACTORY, PAIRS, "not for rw", "--objective sft"),
        (AXOLOTL, {"device": "cpu", "layout": {"gpus": 2}}, "one process", "--gpus 1"),
        (AXOLOTL, {"lora": 8, "lora_alpha": 4.5}, "whole number", "--lora-alpha 4"),
    ],
)
def test_what_a_trainer_cannot_express_is_refused_by_name(trainer, spec, said, hint):
    with pytest.raises(UsageError, match=said) as refused:
        files(trainer, trial(**spec))
    assert hint in str(refused.value.hint)


@pytest.mark.parametrize(
    ("trainer", "field", "value"),
    [
        (LLAMAFACTORY, "deepspeed", "zero3.json"),
        (LLAMAFACTORY, "stage", "dpo"),
        (LLAMAFACTORY, "fsdp", "full_shard"),
        (AXOLOTL, "rl", "dpo"),
        (AXOLOTL, "deepspeed", "zero3.json"),
        (AXOLOTL, "tensor_parallel_size", 2),
        (AXOLOTL, "use_ray", True),
        (MS_SWIFT, "deepspeed", "zero3"),
        (MS_SWIFT, "device_map", "auto"),
    ],
)
def test_a_field_that_a_trial_cannot_take_over_is_refused_by_name(trainer, field, value):
    with pytest.raises(UsageError, match=rf"base\.yaml has {field}") as refused:
        files(trainer, trial(), **{field: value})
    assert "leave" in str(refused.value.hint)


def test_a_degree_of_one_shares_nothing_and_stays():
    assert files(AXOLOTL, trial(), tensor_parallel_size=1).config["tensor_parallel_size"] == 1


def test_each_is_started_by_its_own_entry_point():
    here, there = trial(device="cpu"), trial(layout={"gpus": 2})

    def start(trainer: Finetuner, spec: TrialSpec, *program: str) -> tuple[str, ...]:
        return trainer.start(launched(spec), program or (trainer.program,))

    assert start(LLAMAFACTORY, here) == ("llamafactory-cli", "train", "/trial/llamafactory.yaml")
    assert start(LLAMAFACTORY, there)[:2] == ("accelerate", "launch")
    assert start(AXOLOTL, here)[:3] == ("axolotl", "train", "/trial/axolotl.yaml")
    assert "--nproc_per_node=2" in start(AXOLOTL, there)
    of_swift = ("swift", "sft", "/trial/ms-swift.yaml")
    assert start(MS_SWIFT, here) == start(MS_SWIFT, there) == of_swift
    assert MS_SWIFT.environment(launched(there)) == {"NPROC_PER_NODE": "2"}
    conda = ("conda", "run", "-n", "mine", "llamafactory-cli")
    assert start(LLAMAFACTORY, there, *conda)[:5] == (*conda[:4], "accelerate")


def test_ms_swift_has_the_rungs_variables_and_is_told_what_a_directory_is():
    own = {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync", "IMAGE_FACTOR": "28"}
    variables = files(MS_SWIFT, trial(), ENV=own).config["ENV"]
    assert variables == {"IMAGE_FACTOR": "28", "NPROC_PER_NODE": 1}
    note = "tells a model by its directory's name"
    own = trial(model_name="my-model")
    assert any(note in said for said in files(MS_SWIFT, own).notes)
    for quiet in (files(MS_SWIFT, own, model_type="qwen3"), files(MS_SWIFT, trial())):
        assert not any(note in said for said in quiet.notes)


def test_a_step_counts_where_the_trainer_saw_exactly_its_tokens():
    line = "{'loss': '11.9', 'epoch': '0.5', 'num_input_tokens_seen': %d}\n"
    text = line % 32768 + line % 65536
    counted = {"counted": "num_input_tokens_seen"}
    assert steps_of(text, step_tokens=32768, **counted) == 2
    assert steps_of(text, step_tokens=16384, shared_by=2, **counted) == 2
    assert steps_of(text, step_tokens=30000, **counted) == 0
    assert steps_of(line % 32768 * 2, step_tokens=32768, **counted) == 1


@EACH
def test_a_trainer_that_is_not_here_is_said_with_what_installs_it(trainer):
    foreign = trainer_of(trainer.name, command=("/no/such/program",))
    with pytest.raises(HighwaterError, match="is not found") as refused:
        check_foreign([msgspec.structs.replace(trial(), foreign=foreign)])
    assert f"pip install {trainer.package}" in str(refused.value.hint)
    assert f"/path/to/{trainer.program}" in str(refused.value.hint)


def test_a_file_that_is_none_of_its_is_refused(tmp_path):
    own = tmp_path / "base.yaml"
    own.write_text("- a list\n")
    with pytest.raises(UsageError, match="no named fields") as refused:
        finetuner_base(AXOLOTL, trainer_of("axolotl", own))
    assert "axolotl train" in str(refused.value.hint)
    own.write_text("seed: 3\n")
    assert finetuner_base(AXOLOTL, trainer_of("axolotl", own)) == OwnFile({"seed": 3}, "base.yaml")


def test_what_has_not_run_on_gpus_says_so_there_alone():
    for name, traits in FOREIGN.items():
        command = {"command": "train --len {length}"} if traits.is_typed else {}
        asked = {"model": "Qwen3-0.6B", "trainer": name, "gpus": [1], **command}
        notes = plan(request_from(asked, keywords=True), machine_with(8)).notes
        assert any("not been tried on GPUs" in note for note in notes) is not traits.has_run_on_gpus
        on_cpu = {**asked, "device": "cpu", "memory": "4GiB", "start_length": 512}
        on_cpu |= {"resolution": 512, "max_length": 2048}
        notes = plan(request_from(on_cpu, keywords=True), machine_with(8)).notes
        assert not any("not been tried on GPUs" in note for note in notes)
    untried = {name for name, traits in FOREIGN.items() if not traits.has_run_on_gpus}
    assert untried == {each.name for each in TRAINERS}


def test_every_trainer_that_is_emitted_is_ready_or_by_a_command_and_says_which():
    assert set(FOREIGN) | set(BY_COMMAND) == {*TARGETS, "command"}
    page = (Path(__file__).parents[2] / PAGE).read_text()
    for name, title in BY_COMMAND.items():
        with pytest.raises(UsageError, match=f"{title} is not ready") as refused:
            request_from({"model": "Qwen3-0.6B", "trainer": name})
        assert "`--trainer command`" in str(refused.value.hint)
        assert PAGE in str(refused.value.hint)
        assert f"**{title}**" in page

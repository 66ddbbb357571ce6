"""What a user's own file of a trainer says decides what is predicted of it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import highwater
from highwater.errors import UsageError
from highwater.memory.capacity import CellPrediction, Prediction
from highwater.memory.question import KEPT_REFERENCE
from highwater.nouns.settings import Settings
from highwater.nouns.trainer import TrainerName
from highwater.pages.prediction_tables import prediction_answer, recommendation_answer
from highwater.trainers.emitted import nested
from highwater.trainers.targets import configured
from highwater.trainers.user_file import FILE_WORDS, changes, model_in, settings_of
from tables import table

OWN = table("user_file", "own")
"""Files by trainer; those of the other tables are changed ones, of other trainers whole."""
AXOLOTL, LLAMAFACTORY, TRL, VERL = (OWN[n] for n in ("axolotl", "llamafactory", "trl", "verl"))
ROWS, BY_TOKENS = FILE_WORDS["verl"].rows, FILE_WORDS["verl"].by_tokens
MS_SWIFT = table("user_file", "zero3")
FSDP: dict[str, Any] = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}


def predicted(
    folder: Path, trainer: TrainerName, config: dict[str, Any], *, gpus: str = "1", **typed: Any
) -> Prediction:
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump(config))
    asked: dict[str, Any] = {"model": "Qwen3-8B", "trainer_config": str(path), **typed}
    return highwater.predict(gpus=f"{gpus}xH100-80GB", trainer=trainer, **asked)


def settings(found: Prediction) -> Settings:
    return found.cells[0].cell.settings


def test_axolotls_file_has_its_adapters_length_kernels_and_offload(tmp_path: Path):
    found = predicted(tmp_path, "axolotl", AXOLOTL)
    said = settings(found)
    assert (said.lora, said.lora_alpha, said.lora_base) == (32, 16, "nf4")
    assert (said.lora_targets, said.sequences_per_micro_batch) == ("all-linear", 2)
    assert {each.cell.settings.loss for each in found.cells} == {"full"}
    assert {each.cell.settings.activations for each in found.cells} == {"gpu"}
    assert found.length_tokens == 16_384
    kernels = ("rope", "rms_norm", "glu_activation", "fused_linear_cross_entropy")
    whole = {f"liger_{name}": True for name in kernels}
    found = predicted(tmp_path, "axolotl", AXOLOTL | whole | {"activation_offloading": True})
    assert (settings(found).loss, settings(found).activations) == ("chunked", "host")
    some = predicted(tmp_path, "axolotl", AXOLOTL | {"liger_rope": True})
    assert settings(some).loss == "full"
    assert any("takes more" in note for note in some.notes)


ALONE = AXOLOTL | {"liger_fused_linear_cross_entropy": True}
LAYERS = {f"liger_{name}": True for name in ("rope", "rms_norm", "glu_activation")}


@pytest.mark.parametrize(("how", "trainer", "changed", "kernels"), table("user_file", "kernels"))
def test_which_of_ligers_kernels_a_file_has_is_told_apart(
    tmp_path: Path, how: str, trainer: TrainerName, changed: Any, kernels: list[str]
):
    found = predicted(tmp_path, trainer, OWN.get(trainer, {}) | changed)
    assert [settings(found).loss, settings(found).liger] == kernels
    assert any("Cut Cross Entropy" in note for note in found.notes) == how.startswith("cut")


def test_a_typed_loss_leaves_the_files_kernels_aside(tmp_path: Path):
    assert settings(predicted(tmp_path, "axolotl", ALONE, loss="full")).liger == "all"


@pytest.mark.parametrize(("name", "optimizer", "gpus", "is_paged"), table("user_file", "paged"))
def test_paged_optimizers_are_read_by_their_names_in_transformers(
    tmp_path: Path, name: str, optimizer: str, gpus: str, is_paged: bool
):
    found = predicted(tmp_path, "axolotl", AXOLOTL | {"optimizer": name}, gpus=gpus)
    assert (settings(found).optimizer, settings(found).paged) == (optimizer, is_paged)
    assert any("never measured" in note for note in found.notes) == is_paged


@pytest.mark.parametrize("trainer", ["axolotl", "trl"])
def test_paged_moments_sharded_or_of_trl_are_on_the_gpu(tmp_path: Path, trainer: TrainerName):
    key = {"axolotl": "optimizer", "trl": "optim"}[trainer]
    config = {"axolotl": AXOLOTL | {"adapter": "lora", "load_in_4bit": False}, "trl": TRL}[trainer]
    config = config | {key: "paged_adamw_32bit", "fsdp_version": 2, "fsdp_config": {"a": 1}}
    found = predicted(tmp_path, trainer, config, gpus="2")
    assert not settings(found).paged
    assert any("on the GPU, which takes more" in note for note in found.notes)


def test_the_public_report_of_llamafactory_that_ran_out_is_predicted_from_its_file(tmp_path: Path):
    found = predicted(tmp_path, "llamafactory", LLAMAFACTORY, model="Llama-3.1-8B")
    said = settings(found)
    assert (said.lora, said.lora_targets, said.lora_base) == (16, "q_proj,v_proj", "nf4")
    assert found.length_tokens == 51_974
    assert found.answer is None
    fused = LLAMAFACTORY | {"enable_liger_kernel": True}
    assert predicted(tmp_path, "llamafactory", fused, model="Llama-3.1-8B").answer is not None


def test_ms_swifts_stage_3_is_deepspeeds_and_says_so(tmp_path: Path):
    found = predicted(tmp_path, "ms-swift", MS_SWIFT, gpus="4")
    assert settings(found).lora is None
    assert not settings(found).accumulates
    assert found.cells[0].cell.layout.shard_degree == 4
    assert settings(found).deepspeed == "zero3"
    usual = predicted(tmp_path, "ms-swift", {"max_length": 16384})  # its own default is LoRA
    assert settings(usual).lora == 8


def test_trls_file_has_length_and_rank_and_accelerates_how_all_is_shared(tmp_path: Path):
    alone = predicted(tmp_path, "trl", TRL, gpus="2")
    assert settings(alone).lora == 64
    assert (alone.length_tokens, alone.cells[0].cell.layout.replicate_degree) == (32_768, 2)
    (tmp_path / "launch.yaml").write_text(yaml.safe_dump(FSDP))
    zero = predicted(tmp_path, "trl", TRL | {"deepspeed": "zero3"}, gpus="2")
    assert any("taken as FSDP2" in note for note in zero.notes)
    assert {each.cell.layout.ring_degree for each in zero.cells} == {1}
    shared = predicted(tmp_path, "trl", TRL | {"accelerate_config": "launch.yaml"}, gpus="2")
    assert shared.cells[0].cell.layout.shard_degree == 2
    of_file: dict[str, Any] = {"gpus": "4", "length": "16k"}
    sharded = predicted(tmp_path, "accelerate", FSDP, **of_file)
    ddp = predicted(tmp_path, "accelerate", {"distributed_type": "MULTI_GPU"}, **of_file, lora=16)
    assert sharded.cells[0].cell.layout.shard_degree == 4
    assert ddp.cells[0].cell.layout.replicate_degree == 4
    assert any("the script all the rest" in note for note in sharded.notes)


@pytest.mark.parametrize("is_on_host", [True, False])
def test_activations_on_the_host_are_those_of_accelerates_file(tmp_path: Path, is_on_host: bool):
    own = {"fsdp_version": 2, "fsdp_activation_checkpointing_offload": is_on_host}
    config = {"distributed_type": "FSDP", "num_processes": 1, "fsdp_config": own}
    found = predicted(tmp_path, "accelerate", config, length="8k")
    assert {each.cell.settings.activations == "host" for each in found.cells} >= {is_on_host}
    if is_on_host:
        assert all(each.cell.settings.activations == "host" for each in found.cells)


def test_what_is_typed_goes_first_and_what_nobody_can_tell_is_named(tmp_path: Path):
    found = predicted(tmp_path, "axolotl", AXOLOTL, lora=8, length="8k")
    assert settings(found).lora == 8
    assert found.length_tokens == 8192
    assert predicted(tmp_path, "axolotl", AXOLOTL, max_length="1m").length_tokens is None
    found = predicted(tmp_path, "axolotl", AXOLOTL | {"neftune_noise_alpha": 5, "wandb_name": "x"})
    (said,) = (note for note in found.notes if "is not predicted" in note)
    assert said.endswith("of these is not predicted: neftune_noise_alpha")


@pytest.mark.parametrize("asked", table("user_file", "emitted"))
def test_a_file_that_was_emitted_is_read_as_it_was_meant(tmp_path: Path, asked: dict[str, Any]):
    """As a script of overrides, and as sections of YAML."""
    place: dict[str, Any] = {"gpus": "4xH100-80GB", "trainer": "verl", "host_memory": "900GiB"}
    found = highwater.recommend("Qwen3-8B", length="64k", prompt_tokens=512, **place, **asked)
    made = configured("verl", found, found.chosen, model="Qwen/Qwen3-8B")
    forms = (made.text, yaml.safe_dump(nested(made.values)))
    for name, text in zip(("verl.sh", "verl.yaml"), forms, strict=True):
        (tmp_path / name).write_text(text)
        read = settings_of("verl", tmp_path / name, gpus=4, typed={})
        assert model_in(tmp_path / name) == "Qwen/Qwen3-8B"
        assert (read.length_tokens, read.notes) == (65_536, ())
        assert read.settings["ulysses"] == [found.chosen.cell.layout.ulysses_degree]
        assert read.settings["token_budget"] == found.chosen.token_budget_tokens
        assert {name: read.settings[name] for name in asked} == asked
        assert read.changes_to(found.chosen.cell, 65_536) == ()


def test_verls_own_lengths_and_budget_say_how_far_it_trains(tmp_path: Path):
    asked: dict[str, Any] = {"gpus": "4", "model": "Qwen2.5-7B-Instruct"}
    within = predicted(tmp_path, "verl", VERL, **asked)
    assert (within.length_tokens, within.answer.cell.layout.ulysses_degree) == (16_384, 1)
    longer = predicted(tmp_path, "verl", VERL, **asked, length="32k")
    assert longer.answer is None
    assert any("holds 16,384 tokens" in note for note in longer.notes)
    (note,) = settings_of("verl", tmp_path / "own.yaml", gpus=2, typed={}).notes
    assert note == "own.yaml is for 4 GPUs, and 2 are asked about"
    assert predicted(tmp_path, "verl", VERL | {ROWS: 4}, **asked).cells == within.cells
    counted = predicted(tmp_path, "verl", VERL | {BY_TOKENS: False, ROWS: 4}, **asked)
    assert (settings(counted).sequences_per_micro_batch, counted.answer) == (4, None)
    read = settings_of("verl", tmp_path / "own.yaml", gpus=4, typed={})
    assert read.changes_to(within.answer.cell, 16_384) == (f"`{ROWS.split('.')[-1]}: 1`",)
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(VERL | {BY_TOKENS: None}))
    read = settings_of("verl", tmp_path / "own.yaml", gpus=4, typed={})
    assert read.required == ("`use_dynamic_bsz: true`",)


@pytest.mark.parametrize(("what", "trainer", "changed"), table("user_file", "refused"))
def test_what_nobody_predicts_is_refused_by_name(
    tmp_path: Path, what: str, trainer: TrainerName, changed: Any
):
    with pytest.raises(UsageError, match=what) as refused:
        predicted(tmp_path, trainer, OWN.get(trainer, {}) | changed)
    assert "`" in str(refused.value.hint)


@pytest.mark.parametrize(("how", "zero", "form", "bucket"), table("user_file", "deepspeed"))
def test_deepspeeds_own_file_decides_its_stage_and_what_is_on_the_host(
    tmp_path: Path, how: str, zero: Any, form: str, bucket: int | None
):
    if isinstance(zero, dict):
        (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero}))
        zero = "ds.json"
    found = predicted(tmp_path, "ms-swift", MS_SWIFT | {"deepspeed": zero}, gpus="4")
    assert (settings(found).deepspeed, settings(found).deepspeed_bucket) == (form, bucket)
    assert any("off its source" in note for note in found.notes)
    assert (sum(term.bytes for term in found.cells[0].footprint.host) > 0) == ("offload" in form)


def test_zero_2_beside_nf4_is_ddp_and_accelerates_own_fields_are_read(tmp_path: Path):
    found = predicted(tmp_path, "axolotl", AXOLOTL | {"deepspeed": "zero2"}, gpus="2")
    assert settings(found).deepspeed == "none"
    assert found.cells[0].cell.layout.replicate_degree == 2
    assert any("taken as DDP" in note for note in found.notes)
    found = predicted(tmp_path, "axolotl", AXOLOTL | {"fsdp_version": 2}, gpus="2")
    assert found.cells[0].cell.layout.shard_degree == 2
    own = {"zero_stage": 2, "offload_optimizer_device": "cpu", "offload_param_device": "none"}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    for section, form in ((own, "zero2-offload"), ({"deepspeed_config_file": "ds.json"}, "zero3")):
        config = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": section}
        found = predicted(tmp_path, "accelerate", config, gpus="2", length="8k")
        assert settings(found).deepspeed == form


@pytest.mark.parametrize("trainer", FILE_WORDS)
def test_a_file_that_is_not_there_is_said_to_be_so(tmp_path: Path, trainer: TrainerName):
    gone = {"trainer": trainer, "trainer_config": str(tmp_path / "gone.yaml")}
    with pytest.raises(UsageError, match="cannot be read"):
        highwater.predict("Qwen3-8B", gpus="1xH100-80GB", **gone)


DPO: dict[str, Any] = {"max_length": 8192, "per_device_train_batch_size": 2}
DPO |= {"gradient_checkpointing": True, "precompute_ref_log_probs": False}


def test_a_row_of_pairs_is_two_sequences(tmp_path: Path):
    found = predicted(tmp_path, "trl", DPO, objective="dpo")
    assert settings(found).sequences_per_micro_batch == 4
    assert settings(predicted(tmp_path, "trl", DPO)).sequences_per_micro_batch == 2
    before, after = (Settings(objective="dpo", sequences_per_micro_batch=n) for n in (4, 2))
    written = {"`per_device_train_batch_size: 1`": {"sequences_per_micro_batch": 2}}
    assert changes("trl", before, after) == written


def answers(path: Path, config: dict[str, Any], gpus: int, **told: Any) -> tuple[str, str]:
    """Answers of ``predict`` and of ``recommend`` on a file of TRL."""
    path.write_text(yaml.safe_dump(config))
    place: dict[str, Any] = {"gpus": f"{gpus}xA100-80GB", "trainer": "trl", **told}
    read, own = settings_of("trl", path, gpus=gpus, typed=told), {"trainer_config": str(path)}
    kept = read.kept | {"sequences_per_micro_batch": 2}
    far = [highwater.predict("Llama-3.1-8B", max_length="1m", **e, **place) for e in (own, kept)]
    found = highwater.predict("Llama-3.1-8B", **own, **place)
    assert not read.required or KEPT_REFERENCE in found.notes
    said = prediction_answer(found, read=read, longest=far[0], farthest=far[1])
    recommended = highwater.recommend("Llama-3.1-8B", length=None, **own, **place)
    return said, recommendation_answer(recommended)


@pytest.mark.parametrize(("config", "gpus", "told", "words"), table("user_file", "references"))
def test_a_reference_that_a_file_keeps_is_not_predicted_as_it_is_written(
    tmp_path: Path, config: dict[str, Any], gpus: int, told: dict[str, Any], words: list[str]
):
    """TRL's default keeps it: a file without a word of it has the answer of one that says false."""
    path, config = tmp_path / "own.yaml", table("user_file", "dpo") | config
    said = answers(path, config, gpus, **told)
    assert said == answers(path, {"precompute_ref_log_probs": False} | config, gpus, **told)
    assert all(each in "\n".join(said) for each in words)
    first = said[0].splitlines()[0]
    assert ("as written" in first, len(first.split()) <= 30) == (True, True)
    assert said[1].startswith("Yes") == ("; as written" in first)


def test_what_a_file_does_not_shard_or_offload_is_not_taken_as_if_it_did(tmp_path: Path):
    alone = predicted(tmp_path, "trl", DPO, objective="dpo", gpus="4")
    assert alone.answer is None, "each GPU has a copy"
    assert {each.cell.settings.offload for each in alone.cells} == {False}
    assert any("shards nothing; FSDP from elsewhere is `--copies 1`" in e for e in alone.notes)
    shared = predicted(tmp_path, "trl", DPO, objective="dpo", gpus="4", copies=1)
    assert shared.answer is not None
    assert not any("shards nothing" in note for note in shared.notes)
    (technique,) = (
        each
        for each in highwater.recommend(
            "Qwen3-8B",
            length=None,
            gpus="4xH100-80GB",
            trainer="trl",
            objective="dpo",
            trainer_config=str(tmp_path / "own.yaml"),
        ).alternatives
        if each.flags == ("--copies", "1")
    )
    assert technique.flags == ("--copies", "1")


WITHOUT_NF4 = AXOLOTL | {"adapter": "lora", "load_in_4bit": False, "micro_batch_size": 4}
FUSED = {**LAYERS, "liger_fused_linear_cross_entropy": True}
LONG_PAIRS = TRL | DPO | {"max_length": 32_768, "per_device_train_batch_size": 4}
TOO_LARGE: dict[str, tuple[TrainerName, dict[str, Any], str, int]] = {
    "in its environment too": ("axolotl", WITHOUT_NF4, "1xA100-40GB", 3),
    "in nothing else": ("axolotl", WITHOUT_NF4 | FUSED, "1xL40S", 1),
    "in pairs": ("trl", LONG_PAIRS, "1xA100-80GB", 1),
    "in other words": (
        "llamafactory",
        LLAMAFACTORY | {"per_device_train_batch_size": 8},
        "1xA100-40GB",
        2,
    ),
}


def written(config: dict[str, Any], words: str) -> dict[str, Any]:
    """A file with a change, as its words say it."""
    keys = re.findall(r"(?<=`)(\w+): (\w+)(?=`)", words)
    keys += [(name, "true") for name in re.findall(r"liger_\w+", words)]
    return config | {name: yaml.safe_load(value) for name, value in keys}


@pytest.mark.parametrize("how", TOO_LARGE)
def test_a_file_that_does_not_fit_is_told_the_fewest_changes_the_largest_first(
    tmp_path: Path, how: str
):
    """Written into files of their own, each frees what is said, and none can stay out."""
    trainer, config, gpus, count = TOO_LARGE[how]
    path = tmp_path / "own.yaml"
    asked: dict[str, Any] = {"gpus": gpus, "trainer": trainer, "trainer_config": str(path)}
    asked |= {"objective": "dpo"} if how == "in pairs" else {}

    def of(*said: str) -> CellPrediction:
        changed, allocator = config, "native"
        for words in said:
            changed = written(changed, words)
            allocator = "expandable" if "environment" in words else allocator
        path.write_text(yaml.safe_dump(changed))
        (found,) = highwater.predict("Qwen3-8B", allocator=allocator, **asked).cells
        return found

    as_it_is = of()
    found = highwater.recommend("Qwen3-8B", length=None, **asked)
    assert (found.as_written.cell, found.own_file) == (as_it_is.cell, "own.yaml")
    assert found.as_written.headroom_bytes == as_it_is.headroom_bytes < 0
    words, frees = zip(*((each.words, each.frees_bytes) for each in found.changes), strict=True)
    assert len(words) == count
    assert frees == tuple(sorted(frees, reverse=True))
    for each, freed in zip(words, frees, strict=True):
        assert of(each).headroom_bytes - as_it_is.headroom_bytes == freed
        assert not of(*(other for other in words if other != each)).capacity_tokens
    changed = of(*words)
    assert (changed.cell, changed.headroom_bytes) == (
        found.chosen.cell,
        found.chosen.headroom_bytes,
    )
    assert changed.capacity_tokens


@pytest.mark.parametrize("trainer", ["axolotl", "verl"])
def test_the_longest_length_with_changes_trains_where_they_are_written(
    tmp_path: Path, trainer: TrainerName
):
    config, path = {"axolotl": WITHOUT_NF4, "verl": VERL}[trainer], tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(config))
    read, place = settings_of(trainer, path, gpus=4, typed={}), {"gpus": "4xA100-80GB"}
    alone: dict[str, Any] = {"trainer": trainer, "sequences_per_micro_batch": 1, **place}
    best = highwater.predict("Qwen3-8B", max_length="1m", **{**read.kept, **alone}).answer
    said = " ".join(read.changes_to(best.cell, best.reach_tokens))
    names = {name.rpartition(".")[2]: name for name in FILE_WORDS[trainer].words}
    own = {names.get(name, name): value for name, value in written({}, said).items()}
    path.write_text(yaml.safe_dump(config | own))
    place |= {"allocator": "expandable" if trainer == "verl" or "environment" in said else "native"}
    asked: dict[str, Any] = {"trainer": trainer, "trainer_config": str(path), **place}
    found = highwater.predict("Qwen3-8B", length=best.reach_tokens, **asked).answer
    assert (found.cell.layout, found.headroom_bytes) == (best.cell.layout, best.headroom_bytes)
    assert highwater.predict("Qwen3-8B", max_length="1m", **asked).answer.reach_tokens >= (
        best.reach_tokens
    )


def test_a_file_that_fits_is_recommended_as_it_is(tmp_path: Path):
    """In an environment that the file does not say, as it is predicted."""
    path, place = tmp_path / "own.yaml", {"gpus": "1xH100-80GB", "trainer": "axolotl"}
    config = AXOLOTL | {"liger_fused_linear_cross_entropy": True, "micro_batch_size": 2}
    path.write_text(yaml.safe_dump(config))
    found = highwater.recommend("Qwen3-8B", length=None, trainer_config=str(path), **place)
    assert (found.as_written, found.changes) == (None, ())
    assert found.chosen.cell == predicted(tmp_path, "axolotl", config).answer.cell


def test_of_a_file_that_fits_if_only_just_both_commands_say_what_is_left(tmp_path: Path):
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(WITHOUT_NF4 | FUSED | {"micro_batch_size": 1, "lora_r": 64}))
    asked: dict[str, Any] = {"gpus": "1xL40S", "trainer": "axolotl", "length": 13_000}
    asked |= {"model": "Qwen2.5-14B-Instruct", "trainer_config": str(path)}
    first, said = (
        prediction_answer(highwater.predict(**asked)),
        recommendation_answer(highwater.recommend(**asked)),
    )
    (left,) = re.findall(r"Likely: .* peak [\d.]+ GiB, ([\d.]+ [GM]iB left)\.", first)
    assert said.startswith(f"Not surely as own.yaml is written, {left}: change to `activation_")


@pytest.mark.parametrize("trainer", [each for each in FILE_WORDS if FILE_WORDS[each].length])
def test_every_trainer_has_a_word_for_a_chunked_loss(trainer: TrainerName):
    before, after = Settings(loss="full"), Settings(loss="chunked")
    ((words, changed),) = changes(trainer, before, after).items()
    assert words.startswith(f"`{FILE_WORDS[trainer].fused[-1]}: true`")
    assert changed == {"loss": "chunked"}
    assert changes(trainer, before, before) == {}
    offloaded = changes(trainer, before, Settings(offload=True))
    assert offloaded == {"all states in host memory": {"offload": True}}

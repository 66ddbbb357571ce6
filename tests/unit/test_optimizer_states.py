"""Bytes that an optimizer keeps, and what it cannot be combined with."""

import pytest

from highwater.api.prediction import predict
from highwater.errors import MachineError, UsageError
from highwater.memory.formula.formula import footprint
from highwater.memory.formula.layers import Step
from highwater.memory.snapshot.attribution import LineRules
from highwater.memory.snapshot.snapshot import Frame
from highwater.model.footprint import checkpoint_bytes, device_state_bytes, gradient_bytes
from highwater.model.layer_kind import Matrices
from highwater.model.model import ModelShape, load_model
from highwater.nouns.declaration import words_of
from highwater.nouns.layout import Layout
from highwater.nouns.objective import LEAST_QUANTIZED, OPTIMIZERS, QUANTIZED_BLOCK, TABLE_BYTES
from highwater.nouns.settings import Settings
from highwater.pages.recommendation_tables import costs
from highwater.recommendation.recommend import recommend
from highwater.trials import probe

EIGHT_BITS = OPTIMIZERS["adamw-8bit"]


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return load_model("Llama-3.1-8B").shape


@pytest.mark.parametrize(
    ("optimizer", "per_parameter"), [("adamw", 16), ("adamw-8bit", 10.03125), ("adamw-bf16", 12)]
)
@pytest.mark.parametrize("shards", [1, 8])
def test_states_take_the_bytes_a_parameter_that_the_help_says(
    shape, optimizer, per_parameter, shards
):
    """But for the tables of each matrix, and norms, which 8 bits leave in float32."""
    states = device_state_bytes(shape, Settings(optimizer=optimizer), device="cuda", shards=shards)
    assert states / shape.parameters == pytest.approx(per_parameter, rel=2e-4)


@pytest.mark.parametrize(
    ("numbers", "is_quantized"),
    [
        (LEAST_QUANTIZED, True),
        (LEAST_QUANTIZED - QUANTIZED_BLOCK, False),
        (LEAST_QUANTIZED + QUANTIZED_BLOCK, True),
        (LEAST_QUANTIZED + QUANTIZED_BLOCK - 1, False),
    ],
)
def test_a_shard_has_8_bits_where_blocks_divide_it_and_there_are_enough(numbers, is_quantized):
    in_bits = 2 * (numbers + numbers // 64 + TABLE_BYTES)
    assert EIGHT_BITS.moments_bytes(numbers) == (in_bits if is_quantized else 8 * numbers)


def test_shards_that_are_too_small_keep_float32_moments(shape):
    """Then the states are those of AdamW in float32."""
    narrow = Settings(optimizer="adamw-8bit")
    tiny = load_model("tiny").shape
    of_many = device_state_bytes(tiny, narrow, device="cuda", shards=4096)
    assert of_many == device_state_bytes(tiny, Settings(), device="cuda", shards=4096)
    assert device_state_bytes(tiny, narrow, device="cuda") < of_many


def test_a_prediction_has_what_the_moments_save(shape):
    wide, narrow = (
        footprint(Step(shape, Settings(optimizer=optimizer), Layout(gpus=8), length_tokens=8192))
        for optimizer in ("adamw", "adamw-bf16")
    )
    saved = wide.allocated_bytes - narrow.allocated_bytes
    assert saved == pytest.approx(4 * shape.parameters / 8, abs=8)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradients_of_one_micro_batch_come_late_with_every_optimizer(shape, optimizer):
    states = device_state_bytes(shape, Settings(optimizer=optimizer), device="cuda")
    one = Settings(optimizer=optimizer, accumulates=False)
    (loss, *_) = footprint(Step(shape, one, Layout(), length_tokens=8192)).phases
    found = {term.name: term.bytes for term in loss.terms}
    assert found["states"] == states - 4 * shape.parameters


@pytest.mark.parametrize(
    ("optimizer", "per_parameter"), [("adamw", 12), ("adamw-8bit", 6.03125), ("adamw-bf16", 8)]
)
def test_a_checkpoint_has_weights_and_moments(shape, optimizer, per_parameter):
    saves = Settings(optimizer=optimizer, checkpoint="sharded")
    saved = checkpoint_bytes(shape, saves, "cuda").sharded_bytes
    assert saved / shape.parameters == pytest.approx(per_parameter, rel=2e-4)


@pytest.mark.parametrize(
    ("optimizer", "per_parameter"), [("adamw-8bit", 6.03125), ("adamw-bf16", 8)]
)
def test_parameters_in_bf16_take_half_and_so_do_their_gradients(shape, optimizer, per_parameter):
    narrow = Settings(
        optimizer=optimizer, parameters="bf16", accumulates=False, checkpoint="sharded"
    )
    states = device_state_bytes(shape, narrow, device="cuda", shards=8)
    assert states / shape.parameters == pytest.approx(per_parameter, rel=3e-4)
    assert gradient_bytes(shape, narrow) == 2 * shape.parameters
    saved = checkpoint_bytes(shape, narrow, "cuda").sharded_bytes
    assert saved / shape.parameters == pytest.approx(per_parameter - 2, rel=3e-4)


BF16 = {"parameters": "bf16"}
WORKS = {"optimizer": "adamw-8bit", "micro_batches": 1}


@pytest.mark.parametrize(
    ("asked", "words", "hint"),
    [
        ({"micro_batches": 1}, "adamw rounds to the nearest", {"optimizer": "adamw-8bit"}),
        ({"optimizer": "adamw-bf16"}, "added up in bf16", {"micro_batches": 1}),
        (WORKS | {"offload": True}, "`--offload` on the host", {"offload": False}),
        (WORKS | {"strategy": "fsdp"}, "FSDP1 flat ones", {"strategy": "fsdp2"}),
        (WORKS | {"copies": [2]}, "2 copies of parameters in bf16", {"parameters": "float32"}),
    ],
)
def test_what_parameters_in_bf16_are_not_trained_with_is_refused_by_name(asked, words, hint):
    with pytest.raises(UsageError, match=words) as refused:
        predict("Qwen3-0.6B", gpus="2xH100-80GB", **BF16, **asked)
    typed = {name: value for name, value in hint.items() if value is not False}
    assert not typed or " ".join(words_of(typed)) in str(refused.value.hint)
    assert predict("Qwen3-0.6B", gpus="2xH100-80GB", **{**BF16, **asked, **hint}).cells


@pytest.mark.parametrize(
    "frame",
    [
        Frame("/opt/highwater/engine/low_bit.py", 100, "_zeros"),
        Frame("/opt/highwater/engine/host_states.py", 100, "_stream"),
        Frame("/opt/site-packages/torchao/optim/subclass_8bit.py", 112, "zeros"),
        Frame("/opt/site-packages/torch/optim/adamw.py", 90, "_init_group"),
    ],
)
def test_a_snapshot_tells_moments_by_the_file_that_makes_them(frame):
    assert LineRules().category(frame) == "optimizer_states"


def test_a_missing_package_is_said_before_anything_starts(monkeypatch):
    monkeypatch.setattr(probe, "find_spec", lambda _: None)
    probe.refuse_missing_package(Settings())
    with pytest.raises(MachineError, match="adamw-8bit needs torchao") as refused:
        probe.refuse_missing_package(Settings(optimizer="adamw-8bit"))
    assert "--optimizer adamw`" in str(refused.value.hint)


@pytest.mark.parametrize("asked", OPTIMIZERS)
def test_an_optimizer_is_recommended_only_where_it_is_asked_for(asked):
    here = {"length": "64k", "gpus": "4xH20-96GB"}
    found, by_default = (recommend("Qwen3-8B", **here, **it) for it in ({"optimizer": asked}, {}))
    assert {each.cell.settings.optimizer for each in found.candidates} == {asked}
    assert {each.cell.settings.optimizer for each in by_default.candidates} == {"adamw"}
    lossy = asked != "adamw"
    rounded = {"updates that are rounded: lossy" in costs(each, found) for each in found.candidates}
    assert rounded == {lossy}
    assert any(f"{asked} is lossy" in note for note in found.notes) is lossy
    is_offloaded = {each.cell.settings.offload for each in found.candidates}
    assert is_offloaded == ({False, "states", True} if asked == "adamw" else {False})


MIXTRAL = load_model("Mixtral-8x7B-v0.1").shape
EXPERTS = 32 * 8 * 3 * 4096 * 14336
ROUTERS = 32 * 8 * 4096


def test_rows_that_divide_are_shared_evenly_and_others_as_the_first_gpu_has_them():
    sixty = Matrices(number=2, rows=60, row_size=10)
    assert [sixty.beyond_even(shards) for shards in (1, 4, 8, 64)] == [0, 0, 80, 80]


def test_sixteen_gpus_of_eight_experts_keep_a_whole_expert_each_or_none():
    settings = Settings()
    on_eight, on_sixteen = (
        device_state_bytes(MIXTRAL, settings, device="cuda", shards=shards) for shards in (8, 16)
    )
    assert on_eight == 16 * MIXTRAL.parameters
    assert on_sixteen == on_eight + 16 * (EXPERTS + ROUTERS)
    assert gradient_bytes(MIXTRAL, settings, shards=16) == on_sixteen // 4


def test_fsdp1_shares_what_it_makes_one_tensor_of():
    settings = Settings(strategy="fsdp")
    states = device_state_bytes(MIXTRAL, settings, device="cuda", shards=16)
    assert states == 16 * MIXTRAL.parameters


def test_a_layer_is_gathered_and_reduced_with_what_fills_it_up():
    def term(name: str, gpus: int) -> int:
        found = footprint(Step(MIXTRAL, Settings(), Layout(gpus=gpus), length_tokens=4096))
        (phase,) = (each for each in found.phases if each.name == "backward of a layer")
        return next(each.bytes for each in phase.terms if each.name == name)

    in_a_layer = (EXPERTS + ROUTERS) // 32
    gathered, reduced = "layers, gathered", "gradient reduction"
    assert term(gathered, 16) - term(gathered, 8) == 2 * 2 * in_a_layer
    assert term(reduced, 16) - term(reduced, 8) == 4 * in_a_layer

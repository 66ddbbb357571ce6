"""Bytes that an optimizer keeps, and where: on the GPU, or on the host by ``--offload states``."""

import re
import shlex
from typing import Any

import msgspec
import pytest

from highwater.api.prediction import predict
from highwater.api.search import find, run_trial
from highwater.cli.flags import typed_values
from highwater.cli.grammar import parse
from highwater.errors import MachineError, UsageError
from highwater.memory.formula.formula import upper_footprint
from highwater.memory.formula.layers import Step
from highwater.memory.snapshot.attribution import LineRules
from highwater.memory.snapshot.snapshot import Frame
from highwater.model.held_bytes import (
    checkpoint_bytes,
    device_state_bytes,
    gradient_bytes,
    host_state_bytes,
    pinned_state_bytes,
    staged_gradient_bytes,
    update_bytes,
)
from highwater.model.layer_kind import Matrices
from highwater.model.model import ModelShape, load_model
from highwater.nouns import objective
from highwater.nouns.cells import simplicity
from highwater.nouns.codec import from_json, to_json
from highwater.nouns.declaration import words_of
from highwater.nouns.layout import Layout
from highwater.nouns.plan_notes import offload_notes
from highwater.nouns.request import request_from
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell
from highwater.nouns.trial import Outcome
from highwater.pages.recommendation_tables import costs
from highwater.recommendation.recommend import recommend
from highwater.trials import probe
from highwater.units import GIB

EIGHT_BITS = objective.OPTIMIZERS["adamw-8bit"]


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return load_model("Llama-3.1-8B").shape


@pytest.mark.parametrize(
    ("optimizer", "per_parameter"), [("adamw", 16), ("adamw-8bit", 10.03125), ("adamw-bf16", 12)]
)
@pytest.mark.parametrize("shards", [1, 8])
def test_states_take_the_bytes_that_the_help_says(shape, optimizer, per_parameter, shards):
    """But for the tables of each matrix, and norms, which 8 bits leave in float32."""
    states = device_state_bytes(shape, Settings(optimizer=optimizer), device="cuda", shards=shards)
    assert states / shape.parameters == pytest.approx(per_parameter, rel=2e-4)


@pytest.mark.parametrize(
    ("numbers", "is_quantized"),
    [
        (objective.LEAST_QUANTIZED, True),
        (objective.LEAST_QUANTIZED - objective.QUANTIZED_BLOCK, False),
        (objective.LEAST_QUANTIZED + objective.QUANTIZED_BLOCK, True),
        (objective.LEAST_QUANTIZED + objective.QUANTIZED_BLOCK - 1, False),
    ],
)
def test_a_shard_has_8_bits_where_blocks_divide_it_and_there_are_enough(numbers, is_quantized):
    in_bits = 2 * (numbers + numbers // 64 + objective.TABLE_BYTES)
    assert EIGHT_BITS.moments_bytes(numbers) == (in_bits if is_quantized else 8 * numbers)


@pytest.mark.parametrize("optimizer", objective.OPTIMIZERS)
def test_gradients_of_one_micro_batch_come_late_with_every_optimizer(shape, optimizer):
    states = device_state_bytes(shape, Settings(optimizer=optimizer), device="cuda")
    one = Settings(optimizer=optimizer, accumulates=False)
    (loss, *_) = upper_footprint(Step(shape, one, Layout(), length_tokens=8192)).phases
    found = {term.name: term.bytes for term in loss.terms}
    assert found["states"] == states - 4 * shape.parameters


@pytest.mark.parametrize(
    ("optimizer", "per_parameter"), [("adamw", 12), ("adamw-8bit", 6.03125), ("adamw-bf16", 8)]
)
def test_a_checkpoint_has_weights_and_moments(shape, optimizer, per_parameter):
    saves = Settings(optimizer=optimizer, checkpoint="sharded")
    saved = checkpoint_bytes(shape, saves, "cuda").sharded_bytes
    assert saved / shape.parameters == pytest.approx(per_parameter, rel=2e-4)


@pytest.mark.parametrize(("optimizer", "bytes_each"), [("adamw-8bit", 6.03125), ("adamw-bf16", 8)])
def test_parameters_in_bf16_take_half_and_so_do_their_gradients(shape, optimizer, bytes_each):
    rung = Settings(optimizer=optimizer, parameters="bf16", accumulates=False, checkpoint="sharded")
    states = device_state_bytes(shape, rung, device="cuda", shards=8)
    assert states / shape.parameters == pytest.approx(bytes_each, rel=3e-4)
    assert gradient_bytes(shape, rung) == 2 * shape.parameters
    saved = checkpoint_bytes(shape, rung, "cuda").sharded_bytes
    assert saved / shape.parameters == pytest.approx(bytes_each - 2, rel=3e-4)


BF16 = {"parameters": "bf16"}
WORKS = {"optimizer": "adamw-8bit"}


@pytest.mark.parametrize(
    ("asked", "words", "hint"),
    [
        ({"micro_batches": 1}, "adamw rounds to the nearest", {"optimizer": "adamw-8bit"}),
        (WORKS | {"micro_batches": 2}, "added up in bf16", {"micro_batches": 1}),
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
    cells = predict("Qwen3-0.6B", gpus="2xH100-80GB", **{**BF16, **asked, **hint}).cells
    is_one = "float32" not in hint.values()  # the usual number beside parameters in bf16
    assert {cell.cell.settings.accumulates for cell in cells} == {not is_one}


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


@pytest.mark.parametrize("asked", objective.OPTIMIZERS)
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


def test_rows_are_shared_evenly_or_as_the_first_gpu_has_them_and_fsdp1_shares_all():
    sixty = Matrices(number=2, rows=60, row_size=10)
    assert [sixty.beyond_even(shards) for shards in (1, 4, 8, 64)] == [0, 0, 80, 80]
    settings, on = Settings(), {"device": "cuda"}
    on_eight, on_sixteen = (device_state_bytes(MIXTRAL, settings, shards=n, **on) for n in (8, 16))
    assert on_eight == 16 * MIXTRAL.parameters
    assert on_sixteen == on_eight + 16 * (EXPERTS + ROUTERS)
    assert gradient_bytes(MIXTRAL, settings, shards=16) == on_sixteen // 4
    states = device_state_bytes(MIXTRAL, Settings(strategy="fsdp"), device="cuda", shards=16)
    assert states == 16 * MIXTRAL.parameters


def test_a_layer_is_gathered_and_reduced_with_what_fills_it_up():
    def term(name: str, gpus: int) -> int:
        found = upper_footprint(Step(MIXTRAL, Settings(), Layout(gpus=gpus), length_tokens=4096))
        (phase,) = (each for each in found.phases if each.name == "backward of a layer")
        return next(each.bytes for each in phase.terms if each.name == name)

    in_a_layer = (EXPERTS + ROUTERS) // 32
    gathered, reduced = "layers, gathered", "gradient reduction"
    assert term(gathered, 16) - term(gathered, 8) == 2 * 2 * in_a_layer
    assert term(reduced, 16) - term(reduced, 8) == 4 * in_a_layer


STATES = Settings(offload="states")
MODEL = "Qwen3-0.6B"


@pytest.mark.parametrize(
    ("offload", "model", "states", "label", "slug"),
    [
        (False, False, False, "vanilla", "vanilla"),
        ("states", False, True, "Offload-states", "offload-states"),
        (True, True, False, "Offload", "offload"),
    ],
)
def test_states_are_never_taken_for_the_whole_model(offload, model, states, label, slug):
    settings = Settings(offload=offload)
    assert (settings.offloads_model, settings.offloads_states) == (model, states)
    assert (settings.label, settings.slug) == (label, slug)
    assert from_json(to_json(settings), Settings) == settings
    assert msgspec.structs.replace(settings, accumulates=False).keeps_gradients is model


@pytest.mark.parametrize(
    ("words", "offload"),
    [
        *((f"{MODEL}", False), (f"{MODEL} --offload", True), (f"--offload {MODEL}", True)),
        *((f"{MODEL} --offload states", "states"), (f"--offload states {MODEL}", "states")),
        *((f"--offload=states {MODEL}", "states"), (f"--offload --loss full {MODEL}", True)),
        *((f"{MODEL} --offload true", True), (f"--offload false {MODEL}", False)),
        ("--offload ./states", True),
    ],
)
@pytest.mark.parametrize("command", ["find", "try --length 4k", "predict", "recommend --length 4k"])
def test_a_flag_that_may_stand_alone_leaves_the_model_alone(command, words, offload):
    typed = typed_values(parse(shlex.split(f"{command} {words}")))
    assert request_from(typed).settings.offload == offload
    assert typed["model"] == ("./states" if "./" in words else MODEL)


def test_a_gpu_keeps_all_but_the_moments_which_the_host_pins(shape):
    layout = Layout(gpus=8)
    here, states, model = (
        device_state_bytes(shape, Settings(offload=each), device="cuda")
        for each in (False, "states", True)
    )
    assert (here, states, model) == (16 * shape.parameters, 8 * shape.parameters, 0)
    pinned = pinned_state_bytes(shape, STATES, layout=layout)
    assert 8 * shape.parameters * 0.99 < pinned < 2 * 8 * shape.parameters
    assert host_state_bytes(shape, STATES, layout=layout) == pinned
    assert staged_gradient_bytes(shape, STATES, layout=layout) == 0
    critic = Settings(offload="states", objective="ppo", critic=True)
    assert pinned_state_bytes(shape, critic, layout=layout) == 2 * pinned
    grpo = Settings(offload="states", objective="grpo")
    reference = pinned_state_bytes(shape, Settings(objective="grpo"), layout=layout)
    assert pinned_state_bytes(shape, grpo, layout=layout) == pinned + reference
    copies = Layout(gpus=8, replicate_degree=2)
    assert pinned_state_bytes(shape, STATES, layout=copies) == pytest.approx(2 * pinned, rel=0.1)


def test_on_the_cpu_nothing_is_elsewhere_and_an_update_takes_two_buffers(shape):
    assert device_state_bytes(shape, STATES, device="cpu") == 16 * shape.parameters
    (note,) = offload_notes(STATES, "cpu")
    assert "changes nothing" in note
    assert offload_notes(STATES, "cuda") == ()
    assert update_bytes(shape, STATES, shards=1) == 2 * 2 * 4 * objective.STREAMED
    tiny = load_model("tiny").shape
    rows = -(-tiny.vocab_size // 8)
    assert update_bytes(tiny, STATES, shards=8) == 2 * 2 * 4 * rows * tiny.hidden_size
    assert update_bytes(shape, Settings(), shards=1) == 0
    assert update_bytes(shape, Settings(offload=True), shards=1) == 0


def test_adapters_alone_have_moments(shape):
    lora, layout = Settings(offload="states", lora=16), Layout(gpus=1)
    here = device_state_bytes(shape, Settings(lora=16), device="cuda")
    frozen = 2 * shape.parameters
    assert device_state_bytes(shape, lora, device="cuda") - frozen == (here - frozen) // 2
    assert pinned_state_bytes(shape, lora, layout=layout) < 2 * (here - frozen)


@pytest.mark.parametrize("accumulates", [True, False])
def test_a_prediction_has_less_on_the_gpu_and_more_on_the_host(shape, accumulates):
    eight = Layout(gpus=8)
    here, there = (
        upper_footprint(Step(shape, Settings(offload=each, accumulates=accumulates), eight, 8192))
        for each in (False, "states")
    )
    assert here.allocated_bytes - there.allocated_bytes == shape.parameters
    assert there.phases[-1].name == "update"
    pinned = pinned_state_bytes(shape, STATES, layout=eight)
    assert there.host_bytes - here.host_bytes == pinned


def test_states_lie_between_no_offload_and_all_of_it():
    cells = [Cell(layout=Layout(), settings=Settings(offload=each)) for each in (True, "states")]
    none = Cell(layout=Layout(gpus=4, ulysses_degree=4), settings=Settings())
    assert sorted([*cells, none], key=simplicity) == [none, *reversed(cells)]
    asked = {"length": "32k", "gpus": "1xH200-141GB", "activations": "gpu"}
    found = recommend("Qwen3-8B", **asked)
    assert found.chosen.cell.settings.offloads_states
    assert any("moments in host memory" in cost for cost in costs(found.chosen, found))
    kept = recommend("Qwen3-8B", **asked, host_memory="60GiB")
    assert not any(each.fits and each.cell.settings.offload for each in kept.candidates)


def test_a_search_offloads_only_where_it_is_asked_to():
    def offloads(**asked: Any) -> list[object]:
        cells = predict(MODEL, gpus="1xH100-80GB", **asked).cells
        return [each.cell.settings.offload for each in cells]

    assert set(offloads(offload="states")) == {"states"}
    on_host = [False, False, "states", "states", True, True]  # and each again with activations so
    assert offloads() == [False, *on_host, *on_host]


def test_a_search_tries_no_more_than_the_host_memory_that_is_named():
    asked: dict[str, Any] = {"gpus": [1], "device": "cuda", "memory": "24GiB", "dry_run": True}
    free, bound = (find(MODEL, **asked, host_memory=each) for each in (None, "20GiB"))
    assert bound.question.cells != free.question.cells
    assert free.question.key != bound.question.key
    predicted = predict(MODEL, gpus=1, gpu_memory="24GiB", host_memory="20GiB").cells
    known = {each.cell: each for each in predicted}
    for answer in bound.answers:
        assert answer.capacity_tokens == known[answer.cell].capacity_tokens
        assert known[answer.cell].footprint.host_needed_bytes <= 20 * GIB
    assert {answer.limit for answer in bound.answers} == {"memory", "host_memory"}


@pytest.mark.usefixtures("forks")
def test_a_trial_that_takes_more_host_memory_than_is_named_does_not_start():
    on_cpu: dict[str, Any] = {"device": "cpu", "memory": "1GiB"}
    with pytest.raises(MachineError, match=r"1\.00 GiB is more than this machine's memory, 512"):
        run_trial("tiny", 256, **on_cpu, host_memory="512MiB")
    with pytest.raises(UsageError, match=r"of host memory, and 1\.10 GiB is named") as refused:
        run_trial("tiny", 256, **on_cpu, host_memory="1.1GiB")
    size = re.findall(r"--host-memory (\S+)`", refused.value.hint)[0]
    assert run_trial("tiny", 256, **on_cpu, host_memory=size).outcome is Outcome.FIT

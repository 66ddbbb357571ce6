"""``--offload states``: how it is named, what it is not taken for, what it keeps where, and what it
is refused with.
"""

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
from highwater.memory.formula.formula import footprint
from highwater.memory.formula.layers import Step
from highwater.model.footprint import (
    device_state_bytes,
    host_state_bytes,
    pinned_state_bytes,
    staged_gradient_bytes,
    update_bytes,
)
from highwater.model.model import ModelShape, load_model
from highwater.nouns.cells import simplicity
from highwater.nouns.codec import from_json, to_json
from highwater.nouns.layout import Layout
from highwater.nouns.objective import STREAMED
from highwater.nouns.plan_notes import offload_notes
from highwater.nouns.request import request_from, setting_flags
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell
from highwater.nouns.trial import Outcome
from highwater.pages.recommendation_tables import costs
from highwater.recommendation.recommend import recommend
from highwater.units import GIB

STATES = Settings(offload="states")
MODEL = "Qwen3-0.6B"


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return load_model("Llama-3.1-8B").shape


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
    one = msgspec.structs.replace(settings, accumulates=False)
    assert one.keeps_gradients is model


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


@pytest.mark.parametrize("offload", [False, True, "states"])
def test_a_file_and_python_name_it_as_the_flags_do(offload):
    asked = {"model": MODEL, "offload": offload}
    of_a_file = request_from(asked, config_file="study.yaml")
    assert request_from(asked, keywords=True) == of_a_file
    assert of_a_file.settings.offload == offload
    flags = setting_flags(of_a_file.settings)
    again = request_from(typed_values(parse(["find", MODEL, *flags])))
    assert again.settings.offload == offload


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


def test_on_the_cpu_nothing_is_elsewhere(shape):
    assert device_state_bytes(shape, STATES, device="cpu") == 16 * shape.parameters
    (note,) = offload_notes(STATES, "cpu")
    assert "changes nothing" in note
    assert offload_notes(STATES, "cuda") == ()


def test_an_update_takes_two_buffers_of_both_moments(shape):
    assert update_bytes(shape, STATES, shards=1) == 2 * 2 * 4 * STREAMED
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
        footprint(Step(shape, Settings(offload=each, accumulates=accumulates), eight, 8192))
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
    assert found.chosen is not None
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
        taken = known[answer.cell].footprint.host_needed_bytes
        assert taken <= 20 * GIB
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

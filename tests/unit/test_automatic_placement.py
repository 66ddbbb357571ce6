"""``--activations auto``: the fastest placement that fits, as trying both on paper says."""

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

import highwater
from highwater.api.training import prepare_training
from highwater.memory.capacity import CellPrediction
from highwater.memory.question import placed
from highwater.nouns.cells import simplicity
from highwater.nouns.codec import to_json
from highwater.nouns.hardware import Machine
from highwater.nouns.plan import alone, plan
from highwater.nouns.request import request_from
from highwater.nouns.study import Cell
from highwater.nouns.training import TrainingRequest, training_request_from
from highwater.recommendation.training_settings import chosen_trial, named_settings
from highwater.store.directory import TrainingFolder
from highwater.trials.training_ranks import own_folder
from highwater.units import GIB
from places import NO_GPU, machine_with
from tiny_models import WIDE_HEADS, write_model
from trial_specs import training_of

QUESTIONS = 20
ASKED = TrainingRequest(data=("data.jsonl",), length=16_384, steps=4, output="run")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    sizes = {"num_hidden_layers": 8, "max_position_embeddings": 1_000_000}
    return str(write_model(tmp_path / "tiny", WIDE_HEADS, **sizes))


def with_host(machine: Machine, host_bytes: int) -> Machine:
    return msgspec.structs.replace(
        machine, host_memory_total_bytes=host_bytes, host_memory_available_bytes=host_bytes
    )


def test_auto_is_the_fastest_of_both_placements_that_fit(model: str):
    """Random questions; that both fit, one or none is by prediction of each by itself."""
    chance, seen = random.Random(48), set[str]()
    kinds = (
        (model, 1, (2, 8), (8192, 32_768, 131_072, 524_288)),
        ("Qwen3-0.6B", 8, (12, 32), (4096,)),  # so short that copies are late
    )
    for _ in range(QUESTIONS):
        name, sequences, sizes, lengths = chance.choice(kinds)
        gpus, length = chance.choice((1, 2, 4)), chance.choice(lengths)
        memory, host = round(chance.uniform(*sizes) * GIB), chance.choice((4, 64)) * GIB
        named = {
            "sequences_per_micro_batch": sequences,
            "loss": chance.choice(("full", "chunked")),
            "allocator": chance.choice(("native", "expandable")),
            "recompute": chance.choice(("layer", "all-but-attention")),
            "ulysses": [chance.choice([each for each in (1, 2) if gpus % each == 0])],
        }
        machine = with_host(machine_with(gpus, memory_total_bytes=memory), host)
        asked = {"model": name, "device": "cuda", "gpus": [gpus], "dry_run": True, **named}
        request = request_from({**asked, "activations": "auto"}, keywords=True)
        chosen = placed(plan(alone(request, length), machine).question, machine)
        where = {"gpus": f"{gpus}xH200-141GB", "gpu_memory": memory, "host_memory": host}
        usual = {**where, "length": length, "offload": False, **named}
        both: list[CellPrediction] = []
        for placement in ("gpu", "host"):
            both += (found := highwater.predict(name, **usual, activations=placement)).cells
            assert [each.cell for each in found.cells] == [chosen.changed(activations=placement)]
        fits = [each for each in both if each.capacity_tokens]
        times = {each.cell: each.step.time_s for each in fits if each.step}
        fastest = [cell for cell, time_s in times.items() if time_s == min(times.values())]
        assert not fits or chosen == fastest[0]
        seen |= {"unlike times"} if len({*times.values()}) > 1 else set()
        seen.add(chosen.settings.activations if fits else "nothing")
    assert seen == {"gpu", "host", "nothing", "unlike times"}


def test_what_auto_leaves_open_is_what_leaving_it_away_does():
    asked: dict[str, Any] = {"model": "Qwen3-8B", "gpus": "4xH100-80GB"}
    for more in ({}, {"recompute": "none"}, {"offload": "states", "loss": "chunked"}):
        usual = highwater.predict(**asked, **more)
        assert usual == highwater.predict(**asked, **more, activations="auto")
    usual = highwater.recommend(**asked, length="256k")
    assert usual == highwater.recommend(**asked, length="256k", activations="auto")


def searched(**named: object) -> tuple[Cell, ...]:
    asked = {"model": "Qwen3-8B", "gpus": [2], "ulysses": [1, 2], "dry_run": True, **named}
    usual = {"device": "cuda", "memory": "80GiB"}
    return plan(request_from({**usual, **asked}, keywords=True), NO_GPU).question.cells


def test_a_search_of_named_degrees_tries_both_the_simplest_first():
    on_gpu, both = searched(), searched(activations="auto")
    assert both[: len(on_gpu)] == on_gpu
    on_host = both[len(on_gpu) :]
    assert {cell.settings.activations for cell in on_host} == {"host"}
    assert {cell.settings.allocator for cell in on_host} == {"expandable"}
    assert list(both) == sorted(both, key=lambda cell: simplicity(cell)[:3])
    assert searched(activations="auto", recompute="none") == searched(recompute="none")
    on_the_cpu = {"device": "cpu", "memory": "8GiB"}
    assert searched(activations="auto", **on_the_cpu) == searched(**on_the_cpu)


@pytest.mark.parametrize(("memory", "placement"), [("138GiB", "gpu"), ("75GiB", "host")])
def test_a_training_takes_what_fits_and_goes_on_with_it(memory, placement, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    machine = with_host(machine_with(1), 500 * GIB)
    named = {"model": "Qwen3-4B", "memory": memory, "loss": "chunked", "activations": "auto"}
    request = request_from(named, keywords=True)
    assert named_settings(request) == ("loss",), "auto names no placement"
    chosen = chosen_trial(request, msgspec.structs.replace(ASKED, length=65_536), machine).spec
    assert (chosen.settings.activations, chosen.settings.loss) == (placement, "chunked")
    assert '"auto"' not in to_json(chosen.settings).replace('"rope":"auto"', "")


@pytest.mark.usefixtures("forks")
def test_a_training_is_told_its_placement(model: str, tmp_path: Path):
    (tmp_path / "data.jsonl").write_text('{"text": "one two three four five six seven"}\n')
    words = {"data": ["data.jsonl"], "length": 64, "steps": 2, "output": "run"}
    named = {"model": model, "device": "cpu", "loss": "full", "activations": "auto"}
    with own_folder(tmp_path / "run"):
        prepared = prepare_training(request_from(named), training_request_from(words))
    assert "`--activations auto` is `--activations gpu` here" in prepared.notes
    recorded = json.loads(to_json(prepared.spec))["trial"]["settings"]
    assert recorded.get("activations", "gpu") == "gpu"


@pytest.mark.usefixtures("model")
def test_a_training_goes_on_with_the_placement_that_it_began_with(tmp_path: Path):
    (tmp_path / "run").mkdir()
    machine = with_host(machine_with(1), 500 * GIB)
    named = {"model": "Qwen3-4B", "memory": "138GiB", "loss": "chunked"}

    def chosen(activations: str):
        request = request_from({**named, "activations": activations}, keywords=True)
        return chosen_trial(request, ASKED, machine).spec

    assert chosen("auto").settings.activations == "gpu"
    TrainingFolder(ASKED.output).keep(training_of(chosen("host")))
    assert chosen("auto").settings.activations == "host"

"""Placement on a Ray cluster: which nodes a search runs on, and which of them holds a trial."""

import socket
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.errors import MachineError, UsageError
from highwater.nouns.layout import Layout
from highwater.nouns.request import request_from
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell
from highwater.nouns.trial import refused
from highwater.trials.inputs import ModelFiles, model_files
from highwater.trials.ray_job import Demand, Needs, Node, loss_reason, read_node
from highwater.trials.ray_runner import Placement, choose, cluster_at, demand_of
from highwater.units import GIB
from places import H200, machine_with, question_of
from tiny_models import write_model

QUESTION = question_of(gpus=[1, 2, 4])
L4 = "NVIDIA L4"
ANYTHING = Needs(on_gpus=False, model=ModelFiles(directory="model", sizes={}))


def node(name: str, *, gpus: int = 0, kind: str = H200.name, **fields: Any) -> Node:
    versions = {"torch": fields.pop("torch", "2.13.0")}
    machine = msgspec.structs.replace(machine_with(gpus, name=kind), versions=versions)
    usual = {"cpus": 8.0, "memory_bytes": 64 * GIB, "problem": None}
    seen = None if fields.get("problem") else machine
    return Node(**{"node_id": name, "gpus": gpus, "machine": seen, **usual, **fields})


def demand(gpus: int = 1, *, whole_node: bool = False, memory_bytes: int = GIB) -> Demand:
    kept = {"memory_bytes": memory_bytes, "whole_node": whole_node}
    return Demand(gpus=gpus, cpus=float(gpus or 1), **kept)


def names(nodes: tuple[Node, ...]) -> list[str]:
    return [node.node_id for node in nodes]


def test_gpus_of_another_kind_are_kept_apart_and_the_kind_has_as_many_as_asked():
    nodes = [node("a", gpus=2), node("b", gpus=8, kind=L4), node("c", gpus=8), node("d")]
    chosen = choose(nodes, None, None)
    assert names(chosen.nodes) == ["a", "c"]
    assert len(chosen.machine.gpus) == 8
    assert any("with L4" in note and "left out" in note for note in chosen.notes)
    assert any(note == "node d is left out: it has no GPU" for note in chosen.notes)
    nodes = [*(node(f"a{number}", gpus=2) for number in range(9)), node("b", gpus=4, kind=L4)]
    assert names(choose(nodes, "cuda", [1, 4]).nodes) == ["b"]
    assert len(choose(nodes, "cuda", [1, 2]).nodes) == 9
    with pytest.raises(UsageError, match=r"8 GPUs are asked for.* has 4 at the most") as refused:
        choose(nodes[-1:], "cuda", [2, 8])
    assert refused.value.hint == "use `--gpus 2`"


def test_what_no_cluster_can_hold_is_refused():
    chosen = choose([node("a"), node("b", torch="2.12.0"), node("c")], "cpu", None)
    assert names(chosen.nodes) == ["a", "c"]
    assert any("torch 2.12.0 left out" in note for note in chosen.notes)
    placement = Placement([node("a", gpus=1)])
    with pytest.raises(MachineError, match=r"a trial takes 2 GPUs, and no node"):
        placement.take(demand(2))
    with pytest.raises(MachineError, match=r"65\.00 GiB of host memory"):
        placement.take(demand(1, memory_bytes=65 * GIB))
    placement.nodes = ()
    with pytest.raises(MachineError, match=r"no node of the Ray cluster is left"):
        placement.take(demand(1))


def test_gpus_that_cannot_be_used_do_not_make_it_a_question_to_the_cpu():
    """Where no node is left, each says what it lacks."""
    nodes = [node("a", gpus=8, problem="torch is built without CUDA"), node("b")]
    with pytest.raises(MachineError, match=r"built without CUDA.*node b is left out: it has no"):
        choose(nodes, None, None)
    assert names(choose(nodes, "cpu", None).nodes) == ["b"]
    nodes = [node("a", problem="torch is not installed"), node("b", cpus=0)]
    with pytest.raises(MachineError, match=r"torch is not installed.*Ray hands out no CPU"):
        choose(nodes, "cpu", None)


def test_small_trials_share_a_node_and_move_where_one_fails():
    placement = Placement([node("a", gpus=4), node("b", gpus=4)])
    firsts = [placement.take(demand(1)).first for _ in range(3)]
    assert len(set(firsts)) == 1
    wide = placement.take(demand(4))
    assert wide.first != firsts[0]
    assert wide.any_of == (wide.first,)
    assert placement.has_room(demand(1))
    assert not placement.has_room(demand(2))
    nodes = [node("a", gpus=1), node("b", gpus=1)]
    assert Placement(nodes).take(demand(), avoided=frozenset("a")).any_of == ("b",)
    assert Placement(nodes[:1]).take(demand(), avoided=frozenset("a")).any_of == ("a",)


def test_a_trial_on_the_cpu_or_with_states_on_the_host_has_a_node_of_its_own():
    placement = Placement([node("a", cpus=4), node("b", cpus=16)])
    alone = demand(0, whole_node=True)
    wanted = [placement.take(alone) for _ in range(2)]
    assert [(each.first, each.demand.cpus) for each in wanted] == [("a", 4.0), ("b", 16.0)]
    assert not placement.has_room(alone)
    placement.leave(wanted[0])
    assert placement.has_room(alone)
    cell = Cell(layout=Layout(gpus=2), settings=Settings(offload=True))
    offloads = demand_of(QUESTION.trial(cell, 4096))
    assert offloads.whole_node
    placement = Placement([node("a", gpus=8, memory_bytes=512 * GIB)])
    assert placement.take(offloads).demand.gpus == 8
    assert not placement.has_room(demand(1))


@given(
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    asked=st.lists(st.tuples(st.integers(1, 8), st.booleans()), max_size=20),
)
def test_no_node_has_more_trials_than_it_holds(sizes, asked):
    nodes = {f"n{number}": size for number, size in enumerate(sizes)}
    placement = Placement([node(name, gpus=size) for name, size in nodes.items()])
    taken = dict.fromkeys(nodes, 0)
    for gpus, whole_node in asked:
        wanted = demand(gpus, whole_node=whole_node)
        if gpus <= max(sizes) and placement.has_room(wanted):
            place = placement.take(wanted)
            assert place.first in place.any_of
            taken[place.first] += place.demand.gpus
    assert all(taken[name] <= size for name, size in nodes.items())


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "head", "head:", ":6379", "head:x"])
def test_what_is_no_address_of_a_head_is_refused(address):
    with pytest.raises(UsageError, match="HOST:PORT") as refused:
        cluster_at(address, ANYTHING)
    assert "`--address 10.0.0.1:6379`" in refused.value.hint


def test_an_address_means_ray_and_is_answered_at_once():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(MachineError, match=f"no Ray cluster answers at {address}") as refused:
            cluster_at(address, ANYTHING)
    assert "`ray start --head`" in refused.value.hint
    assert not request_from({"model": "tiny"}).on_ray
    assert request_from({"model": "tiny", "runner": "ray"}).on_ray
    assert request_from({"model": "tiny", "address": "head:6379"}).on_ray
    with pytest.raises(UsageError, match="trials run on this machine"):
        request_from({"model": "tiny", "address": "head:6379", "runner": "local"})
    with pytest.raises(UsageError, match="joins no cluster"):
        request_from({"model": "tiny", "runner": "ray", "dry_run": True})


def test_a_small_model_is_sent_and_opened_from_what_was_sent(tmp_path):
    files = model_files(write_model(tmp_path / "model"))
    assert files.missing() is None
    placed = files.placed(tmp_path / "there")
    assert placed == tmp_path / "there"
    assert (placed / "config.json").read_bytes() == (tmp_path / "model/config.json").read_bytes()


def test_a_large_one_is_a_shared_path_whose_files_are_the_same(tmp_path):
    directory = write_model(tmp_path / "model")
    with (directory / "model.safetensors").open("wb") as weights:
        weights.truncate(33 * 2**20)
    files = model_files(directory)
    assert files.contents is None
    assert files.missing() is None
    assert files.placed(tmp_path / "there") == directory
    with (directory / "model.safetensors").open("ab") as weights:
        weights.write(b"more")
    assert "model.safetensors is another file" in (files.missing() or "")
    (directory / "config.json").unlink()
    assert files.missing() == f"it has no {directory / 'config.json'}"


def test_what_a_node_lacks_is_named(tmp_path):
    model = model_files(write_model(tmp_path / "model"))
    needs = Needs(on_gpus=True, model=model, data_module="nowhere_to_be_found.batches")
    assert read_node(0, needs)[1] == "it has no module nowhere_to_be_found.batches"
    foreign = Needs(on_gpus=False, model=model, is_engine=False, program="no-such-trainer")
    assert "'no-such-trainer' is not found" in (read_node(0, foreign)[1] or "")
    _, problem = read_node(8, Needs(on_gpus=True, model=model))
    assert "Ray hands out 8 GPUs" in (problem or "")


@pytest.mark.parametrize("kind", [UsageError, MachineError])
def test_a_refusal_crosses_processes_as_what_it_was(kind):
    error = refused(kind("no", hint="yes")).error()
    assert type(error) is kind
    assert (error.problem, error.hint) == ("no", "yes")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "Ray killed 1 worker(s) based on the killing policy\nTop 10 memory users: PID\n"
            "2845\t1.51\t/usr/bin/python --token=hunter2\nTo adjust the kill threshold, set the "
            "environment variable `RAY_memory_usage_threshold` when starting Ray.",
            "the node's memory was full, and Ray's memory monitor ended what ran there",
        ),
        (
            "The actor died unexpectedly before finishing this task.\n\tclass_name: TrialOnNode\n"
            "The actor is dead because its worker process has died. Worker exit detail: End of "
            "file. Some common causes include: (1) the process was killed by the OOM killer",
            "The actor is dead because its worker process has died. Worker exit detail: End of "
            "file.",
        ),
    ],
)
def test_the_reason_of_a_loss_is_one_line_and_names_nobody_elses_processes(said, reason):
    assert loss_reason(RuntimeError(said)) == reason

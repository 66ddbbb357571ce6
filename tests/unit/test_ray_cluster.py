"""Joining a Ray cluster, as far as it can be tried without one; what of a model is sent to it."""

import socket

import pytest

from highwater.errors import MachineError, UsageError
from highwater.nouns.request import request_from
from highwater.trials.inputs import model_files
from highwater.trials.ray_driver import loss_reason
from highwater.trials.ray_node import Needs, Refusal, read_node
from highwater.trials.ray_runner import RayCluster
from tiny_models import write_model


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "head", "head:", ":6379", "head:x"])
def test_what_is_no_address_of_a_head_is_refused(address):
    with pytest.raises(UsageError, match="HOST:PORT") as refused:
        RayCluster(address)
    assert "`--address 10.0.0.1:6379`" in refused.value.hint


def test_a_port_where_nobody_listens_is_said_at_once():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(MachineError, match=f"no Ray cluster answers at {address}") as refused:
            RayCluster(address)
    assert "`ray start --head`" in refused.value.hint


def test_an_address_alone_means_ray_and_contradicts_a_runner_of_this_machine():
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


def test_what_a_node_lacks_is_named(
    tmp_path,
):
    model = model_files(write_model(tmp_path / "model"))
    needs = Needs(on_gpus=True, model=model, data_module="nowhere_to_be_found.batches")
    assert read_node(0, needs).problem == "it has no module nowhere_to_be_found.batches"
    foreign = Needs(on_gpus=False, model=model, is_engine=False, program="no-such-trainer")
    assert "'no-such-trainer' is not found" in (read_node(0, foreign).problem or "")
    reading = read_node(8, Needs(on_gpus=True, model=model))
    assert "Ray hands out 8 GPUs" in (reading.problem or "")


@pytest.mark.parametrize("kind", [UsageError, MachineError])
def test_a_refusal_crosses_processes_as_what_it_was(kind):
    error = Refusal(kind.__name__, "no", "yes").error()
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

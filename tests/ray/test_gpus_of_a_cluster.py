"""GPUs that Ray hands out, as its bookkeeping has them: each trial has its own, on one node."""

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_cluster import NODE_BYTES, LocalCluster, local_cluster
from processes import wait_until
from told_gpus import GO

from highwater.nouns.layout import Layout
from highwater.nouns.request import request_from
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell
from highwater.nouns.trial import Launch, TrialSpec
from highwater.trials.inputs import model_files
from highwater.trials.ray_job import Needs, Node
from highwater.trials.ray_runner import RayRunner, cluster_at
from places import machine_with, question_of
from runner_contract import ENDS_S
from tiny_models import write_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

QUESTION = question_of(gpus=[1, 2, 4])


@pytest.fixture(scope="module")
def gpu_nodes(mark: str) -> Iterator[LocalCluster]:
    with local_cluster("4:4", "4:4") as cluster:
        yield cluster


@pytest.fixture
def runner(gpu_nodes: LocalCluster, tmp_path: Path) -> Iterator[RayRunner]:
    needs = Needs(on_gpus=False, model=model_files(write_model(tmp_path / "model")))
    cluster = cluster_at(gpu_nodes.address, needs)
    ids = [node.node_id for node in cluster.read_nodes() if node.gpus]
    nodes = tuple(
        Node(node_id=each, cpus=4, gpus=4, memory_bytes=NODE_BYTES, machine=machine_with(4))
        for each in ids
    )
    request = request_from({"model": str(tmp_path / "model")}, keywords=True)
    logs, told = tmp_path / "logs", "told_gpus:told"
    runner = RayRunner(cluster, nodes, request, log_directory=logs, launched_by=told)
    go = Path(os.environ["FAULTS"], GO)
    yield runner
    runner.close()
    go.unlink(missing_ok=True)


def trial(number: int, gpus: int, **changes: object) -> TrialSpec:
    cell = Cell(layout=Layout(gpus=gpus), settings=Settings(**changes))
    return QUESTION.trial(cell, 4096 + number)


def test_each_trial_has_gpus_of_its_own_and_small_ones_share_a_node(runner: RayRunner) -> None:
    futures, held = [], []
    for number, gpus in enumerate((1, 1, 2, 4)):
        spec = trial(number, gpus)
        assert runner.has_room(spec)
        futures.append(runner.submit(Launch(spec=spec), on_phase=held.append))
    assert not runner.has_room(trial(9, 1))
    assert wait_until(lambda: held.count("held") >= 4, within_s=ENDS_S)
    Path(os.environ["FAULTS"], GO).touch()
    taken: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)
    for future in futures:
        node, _, gpus = future.result(timeout=ENDS_S).reason.partition(":")
        taken[node].append(tuple(gpus.split(",")))
    assert sorted(sorted(map(len, gpus)) for gpus in taken.values()) == [[1, 1, 2], [4]]
    for gpus in taken.values():
        assert sorted(gpu for each in gpus for gpu in each) == ["0", "1", "2", "3"]


def test_states_in_host_memory_have_a_node_to_themselves(runner: RayRunner) -> None:
    Path(os.environ["FAULTS"], GO).touch()
    result = runner.submit(Launch(spec=trial(0, 2, offload="states"))).result(timeout=ENDS_S)
    assert len(result.reason.partition(":")[2].split(",")) == 2

"""The runner of a Ray cluster: what every runner does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from conftest import (
    GONE_S,
    commands_under,
    holder_of_the_trial,
    node_of,
    paused,
    processes_of_trials,
    runner_on,
    trial,
)
from local_cluster import LocalCluster
from processes import wait_until

from highwater.errors import MachineError
from highwater.nouns.trial import Launch, Outcome, TrialSpec
from highwater.trials.ray_runner import RayRunner
from highwater.units import GIB
from runner_contract import ENDS_S, RunnerContract

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("trials")]
_HOLD_ALL_NODES = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False)
groups = [ray.util.placement_group([{"CPU": 1}]) for _ in range(3)]
ray.get([group.ready() for group in groups])
print("held", flush=True)
sys.stdin.read()
"""


class TestRayRunner(RunnerContract):
    @pytest.fixture(autouse=True)
    def directory(self, model: Path) -> None:
        self.model = model

    def fitting(self, number: int) -> TrialSpec:
        return trial(self.model, 32 * (number + 1))

    def too_long(self) -> TrialSpec:
        return trial(self.model, 8192)

    def crashing(self) -> TrialSpec:
        return trial(self.model, 48, "faulty_batches:leaving_with_1")

    def endless(self) -> TrialSpec:
        return trial(self.model, 56, "faulty_batches:hanging")


def test_a_killed_trial_is_moved(runner: RayRunner, model: Path, pause: Path, mark: str) -> None:
    spec, found = paused(model, pause), []
    for attempt in (1, 2):
        future = runner.submit(Launch(spec=spec, attempt=attempt))
        assert wait_until(pause.with_name("hangs").exists, within_s=ENDS_S)
        holder = holder_of_the_trial(mark)
        found.append(node_of(holder).pid)
        holder.kill()
        result = future.result(timeout=GONE_S)
        assert result.outcome is Outcome.CRASHED
        assert result.reason.startswith("Ray lost the trial on node ")
        assert wait_until(lambda: processes_of_trials(mark) == [], within_s=GONE_S)
        pause.with_name("hangs").unlink()
    assert found[0] != found[1]


def test_a_trial_waits_for_the_cluster(runner: RayRunner, nodes: LocalCluster, model: Path) -> None:
    told: list[str] = []
    words = (sys.executable, "-c", _HOLD_ALL_NODES, nodes.address)
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        while "held" not in other.stdout.readline():
            assert other.poll() is None
        future = runner.submit(Launch(spec=trial(model, 32)), on_phase=told.append)
        assert wait_until(lambda: len(told) > 2, within_s=GONE_S)
        assert set(told) == {"waiting for its place on a node"}
    assert future.result(timeout=ENDS_S).outcome is Outcome.FIT


def test_a_trial_too_large_for_every_node_is_refused(runner: RayRunner, model: Path) -> None:
    spec = msgspec.structs.replace(trial(model, 32), memory_budget_bytes=64 * GIB)
    with pytest.raises(MachineError, match="of host memory, and no node") as refused:
        runner.submit(Launch(spec=spec)).result(timeout=GONE_S)
    assert "`ray status`" in refused.value.hint


def test_when_the_process_that_drives_ray_dies_the_trial_ends_and_the_search_hears_of_it(
    nodes: LocalCluster, model: Path, pause: Path, mark: str, tmp_path: Path
) -> None:
    future = runner_on(nodes, model, tmp_path).submit(Launch(spec=paused(model, pause)))
    assert wait_until(pause.with_name("hangs").exists, within_s=ENDS_S)
    # The youngest is the job itself, not its reaper.
    drivers = (
        pid for pid, words in commands_under(mark).items() if "highwater.trials.ray_runner" in words
    )
    os.kill(max(drivers, key=lambda pid: psutil.Process(pid).create_time()), signal.SIGKILL)
    with pytest.raises(MachineError, match="connection to the Ray cluster was lost"):
        future.result(timeout=GONE_S)
    assert wait_until(lambda: processes_of_trials(mark) == [], within_s=GONE_S)


LOST_S = 90
"""Bound on the time until Ray knows that a node is gone."""


def test_a_trial_whose_node_is_killed_says_nothing_and_is_tried_on_another(
    runner: RayRunner, nodes: LocalCluster, model: Path, pause: Path, mark: str
) -> None:
    spec = paused(model, pause)
    future = runner.submit(Launch(spec=spec))
    assert wait_until(pause.with_name("hangs").exists, within_s=ENDS_S)
    node_of(holder_of_the_trial(mark)).kill()
    result = future.result(timeout=LOST_S)
    assert result.outcome is Outcome.CRASHED
    assert not result.outcome.tells
    assert result.reason.endswith("of the Ray cluster was lost")
    assert result.log_path is not None
    assert result.reason in Path(result.log_path).read_text()
    assert wait_until(lambda: processes_of_trials(mark) == [], within_s=GONE_S)
    pause.unlink()
    again = runner.submit(Launch(spec=spec, attempt=2)).result(timeout=ENDS_S)
    assert (again.outcome, again.attempt) == (Outcome.FIT, 2)
    assert again.log_path != result.log_path
    nodes.add("1")

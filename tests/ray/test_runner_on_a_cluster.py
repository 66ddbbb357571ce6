"""The runner of a Ray cluster: what every runner does, and what becomes of trials whose node, or
whose process on it, is killed.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest
from conftest import GONE_S, commands_under, processes_of_trials
from local_cluster import LocalCluster
from places import write_model
from processes import wait_until

from highwater.errors import MachineError
from highwater.run.engine_trial import EngineLauncher
from highwater.run.model_files import model_files
from highwater.run.ray_cluster import RayCluster
from highwater.run.ray_node import Needs
from highwater.run.ray_placement import choose
from highwater.run.ray_runner import RayRunner
from highwater.spec.layout import Layout
from highwater.spec.model import load_model
from highwater.spec.protocols import Launch
from highwater.spec.settings import Settings
from highwater.spec.trial import Outcome, TrialSpec
from highwater.units import GIB
from runner_contract import ENDS_S, RunnerContract

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("trials")]

TRIAL_S = 200.0
VOCABULARY = 60_000
"""So many that the logits of 8192 tokens do not fit where those of a few do."""
LOST_S = 90
"""Bound on the time until Ray knows that a node is gone."""
_HOLD_ALL_NODES = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False)
groups = [ray.util.placement_group([{"CPU": 1}]) for _ in range(3)]
ray.get([group.ready() for group in groups])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def cluster(nodes: LocalCluster) -> Iterator[RayCluster]:
    cluster = RayCluster(nodes.address)
    yield cluster
    cluster.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny", vocab_size=VOCABULARY, num_hidden_layers=1)


@pytest.fixture
def runner(cluster: RayCluster, model: Path, tmp_path: Path) -> Iterator[RayRunner]:
    runner = runner_on(cluster, model, tmp_path)
    yield runner
    runner.close()


def runner_on(cluster: RayCluster, model: Path, folder: Path) -> RayRunner:
    needs = Needs(on_gpus=False, model=model_files(model), data_module="faulty_batches")
    return RayRunner(
        cluster,
        choose(cluster.read_nodes(needs), "cpu", None).nodes,
        partial(EngineLauncher, timeout_s=TRIAL_S),
        needs,
        log_directory=folder / "logs",
    )


def trial(directory: Path, length_tokens: int, data: str | None = None) -> TrialSpec:
    model = load_model(str(directory))
    return TrialSpec(
        model_name=model.name,
        model_directory=model.directory,
        config_digest=model.config_digest,
        device="cpu",
        layout=Layout(),
        settings=Settings(),
        length_tokens=length_tokens,
        memory_budget_bytes=GIB,
        data=data,
    )


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


@pytest.fixture
def pause(mark: str) -> Iterator[Path]:
    """The file in which a length stands whose trial waits, and while it does ``hangs`` is there."""
    path = Path(os.environ["FAULTS"], "pause")
    yield path
    for left in (path, path.with_name("hangs")):
        left.unlink(missing_ok=True)


def paused(model: Path, pause: Path, length_tokens: int = 64) -> TrialSpec:
    pause.write_text(str(length_tokens))
    return trial(model, length_tokens, "faulty_batches:paused")


def holder_of_the_trial(mark: str) -> psutil.Process:
    """The process in which Ray holds the only trial, on whichever node."""
    (pid,) = (pid for pid, words in commands_under(mark).items() if "TrialOnNode" in words)
    return psutil.Process(pid)


def node_of(holder: psutil.Process) -> psutil.Process:
    """What Ray runs on the node of such a process."""
    node = holder.parent()
    assert node is not None
    return node


def test_a_trial_whose_node_is_killed_says_nothing_and_is_tried_on_another(
    runner: RayRunner, nodes: LocalCluster, model: Path, pause: Path, mark: str
) -> None:
    spec = paused(model, pause)
    future = runner.submit(Launch(spec=spec))
    assert wait_until(pause.with_name("hangs").exists, within_s=ENDS_S)
    node = node_of(holder_of_the_trial(mark))
    node.kill()
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
    nodes.add(1)


def test_a_trial_whose_process_is_killed_says_nothing_and_is_tried_on_another_node(
    runner: RayRunner, model: Path, pause: Path, mark: str
) -> None:
    spec, found = paused(model, pause), []
    for attempt in (1, 2):
        future = runner.submit(Launch(spec=spec, attempt=attempt))
        assert wait_until(pause.with_name("hangs").exists, within_s=ENDS_S)
        holder = holder_of_the_trial(mark)
        found.append(node_of(holder).pid)
        holder.kill()
        result = future.result(timeout=LOST_S)
        assert result.outcome is Outcome.CRASHED
        assert result.reason.startswith("Ray lost the trial on node ")
        assert wait_until(lambda: processes_of_trials(mark) == [], within_s=GONE_S)
        pause.with_name("hangs").unlink()
    assert found[0] != found[1]


def test_a_trial_waits_for_what_others_have_of_the_cluster(
    runner: RayRunner, nodes: LocalCluster, model: Path
) -> None:
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
    cluster = RayCluster(nodes.address)
    own = runner_on(cluster, model, tmp_path)
    future = own.submit(Launch(spec=paused(model, pause)))
    assert wait_until(pause.with_name("hangs").exists, within_s=ENDS_S)
    # The youngest is this test's: others' clusters were joined before.
    driver = max(
        pid for pid, words in commands_under(mark).items() if "highwater.run.ray_driver" in words
    )
    os.kill(driver, signal.SIGKILL)
    with pytest.raises(MachineError, match="connection to the Ray cluster was lost"):
        future.result(timeout=GONE_S)
    assert wait_until(lambda: processes_of_trials(mark) == [], within_s=GONE_S)
    cluster.close()

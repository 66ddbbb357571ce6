"""The runner of a Ray cluster: what every runner does, and what becomes of trials whose node, or
whose process on it, is killed.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from local_cluster import LocalCluster
from places import write_model

from highwater.run.engine_trial import EngineLauncher
from highwater.run.model_files import model_files
from highwater.run.ray_cluster import RayCluster
from highwater.run.ray_node import Needs
from highwater.run.ray_placement import choose
from highwater.run.ray_runner import RayRunner
from highwater.spec.layout import Layout
from highwater.spec.model import load_model
from highwater.spec.settings import Settings
from highwater.spec.trial import TrialSpec
from highwater.units import GIB
from runner_contract import RunnerContract

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("trials")]

TRIAL_S = 200.0
VOCABULARY = 60_000
"""So many that the logits of 8192 tokens do not fit where those of a few do."""


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
    needs = Needs(on_gpus=False, model=model_files(model), data_module="faulty_batches")
    runner = RayRunner(
        cluster,
        choose(cluster.read_nodes(needs), "cpu", None).nodes,
        partial(EngineLauncher, timeout_s=TRIAL_S),
        needs,
        log_directory=tmp_path / "logs",
    )
    yield runner
    runner.close()


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

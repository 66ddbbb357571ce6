"""A Ray cluster of three nodes on this machine, a runner on it, and the processes of its trials."""

import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from highwater.nouns.request import request_from
from highwater.nouns.trial import TrialSpec
from highwater.trials.inputs import model_files
from highwater.trials.ray_job import Needs
from highwater.trials.ray_runner import RayRunner, choose, cluster_at
from highwater.units import GIB
from tiny_models import write_model
from trial_specs import trial_of

FAULTS = Path(__file__).parents[1] / "faults"
sys.path.append(str(FAULTS))

from local_cluster import ON_LOOPBACK, LocalCluster, local_cluster
from processes import MARK, marked, wait_until

GONE_S = 30
"""Bound on the time until what was ended is gone."""
AGENTS_S = 60
"""Seconds that Ray's agents of a node that was killed may take to notice it."""


@pytest.fixture(scope="module")
def mark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The mark of all that a module's tests start, without GPUs; of that nothing is left."""
    mark, folder = uuid.uuid4().hex, tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            MARK: mark,
            "FAULTS": str(folder),
            "TMPDIR": str(folder),
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": f"{FAULTS}:{Path(__file__).parent}",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            **ON_LOOPBACK,
        }.items():
            patch.setenv(name, value)
        yield mark
        wait_until(lambda: marked(mark) == [], within_s=GONE_S + AGENTS_S)
        assert commands_under(mark) == {}


@pytest.fixture(scope="module")
def nodes(mark: str) -> Iterator[LocalCluster]:
    with local_cluster("1", "1", "1") as cluster:
        yield cluster


@pytest.fixture
def trials(mark: str) -> Iterator[None]:
    """Of a test's trials no process is left, on whichever node."""
    yield
    assert wait_until(lambda: processes_of_trials(mark) == [], within_s=GONE_S)


def processes_of_trials(mark: str) -> list[str]:
    """The commands of what runs trials, of all that was started under the mark."""
    of_trials = ("highwater.trials.reaper", "highwater.engine", "TrialOnNode", "time.sleep(600)")
    found = commands_under(mark).values()
    return [words for words in found if any(part in words for part in of_trials)]


def commands_under(mark: str) -> dict[int, str]:
    found: dict[int, str] = {}
    for pid in marked(mark):
        with suppress(OSError):  # ended meanwhile
            words = Path("/proc", str(pid), "cmdline").read_bytes()
            found[pid] = words.replace(b"\0", b" ").decode(errors="replace")
    return found


TRIAL_S = 200.0
VOCABULARY = 60_000
"""So many that the logits of 8192 tokens do not fit where those of a few do."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny", vocab_size=VOCABULARY, num_hidden_layers=1)


@pytest.fixture
def runner(nodes: LocalCluster, model: Path, tmp_path: Path) -> Iterator[RayRunner]:
    runner = runner_on(nodes, model, tmp_path)
    yield runner
    runner.close()


def runner_on(nodes: LocalCluster, model: Path, folder: Path) -> RayRunner:
    needs = Needs(on_gpus=False, model=model_files(model), data_module="faulty_batches")
    cluster = cluster_at(nodes.address, needs)
    return RayRunner(
        cluster,
        choose(cluster.read_nodes(), "cpu", None).nodes,
        request_from({"model": str(model), "timeout": TRIAL_S}, keywords=True),
        log_directory=folder / "logs",
    )


def trial(directory: Path, length_tokens: int, data: str | None = None) -> TrialSpec:
    return trial_of(
        directory, device="cpu", length_tokens=length_tokens, memory_budget_bytes=GIB, data=data
    )


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
    found: list[int] = []

    def is_found() -> bool:
        """Whether there is one: Ray renames it at each call, and has no name for it in between."""
        found[:] = (pid for pid, words in commands_under(mark).items() if "TrialOnNode" in words)
        return len(found) == 1

    assert wait_until(is_found, within_s=GONE_S), found
    return psutil.Process(found[0])


def node_of(holder: psutil.Process) -> psutil.Process:
    node = holder.parent()
    assert node is not None
    return node

"""A Ray cluster of three nodes on this machine, and the processes of its trials."""

import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

FAULTS = Path(__file__).parents[1] / "faults"
sys.path += [str(FAULTS), str(FAULTS.parent / "unit")]

from local_cluster import ON_LOOPBACK, LocalCluster, local_cluster
from processes import MARK, marked, wait_until

GONE_S = 30
"""Bound on the time until what was ended is gone."""
AGENTS_S = 60
"""Seconds that Ray's agents of a node that was killed may take to notice it."""


@pytest.fixture(scope="module")
def mark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The mark of all that a module's tests start, in an environment without GPUs, which finds
    ``faulty_batches``; of that nothing is left.
    """
    mark, folder = uuid.uuid4().hex, tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            MARK: mark,
            "FAULTS": str(folder),
            "TMPDIR": str(folder),
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(FAULTS),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            **ON_LOOPBACK,
        }.items():
            patch.setenv(name, value)
        yield mark
        wait_until(lambda: marked(mark) == [], within_s=GONE_S + AGENTS_S)
        assert commands_under(mark) == {}


@pytest.fixture(scope="module")
def nodes(mark: str) -> Iterator[LocalCluster]:
    """Three nodes of one CPU each, besides the head."""
    with local_cluster(1, 1, 1) as cluster:
        yield cluster


@pytest.fixture
def trials(mark: str) -> Iterator[None]:
    """Of a test's trials no process is left, on whichever node."""
    yield
    assert wait_until(lambda: processes_of_trials(mark) == [], within_s=GONE_S)


def processes_of_trials(mark: str) -> list[str]:
    """The commands of what runs trials, of all that was started under the mark."""
    of_trials = ("highwater.run.reaper", "highwater.train", "TrialOnNode", "time.sleep(600)")
    found = commands_under(mark).values()
    return [words for words in found if any(part in words for part in of_trials)]


def commands_under(mark: str) -> dict[int, str]:
    """The commands of all that was started under the mark, by process id."""
    found: dict[int, str] = {}
    for pid in marked(mark):
        with suppress(OSError):  # ended meanwhile
            words = Path("/proc", str(pid), "cmdline").read_bytes()
            found[pid] = words.replace(b"\0", b" ").decode(errors="replace")
    return found

"""What lies in the working directory is not run, as a library of ours or by ``--data``."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)

TRAPS = (
    *("psutil", "msgspec", "random", "signal", "torch", "transformers", "triton", "flash_attn"),
    "sitecustomize",
)
"""Modules that our processes import, or would if they were there."""
TRIAL = (
    *("highwater", "try", "tiny", "--length", "32", "--device", "cpu", "--memory", "1GiB"),
    *("--log-dir", "logs"),
)
OWN = """
import random

def good(*, length_tokens, **_):
    assert random.random() < 1, "the library's own"
    while True:
        yield [list(range(length_tokens))]
"""


@pytest.fixture
def forks() -> None:
    """None: what is forked has imported everything by then."""


@pytest.fixture
def sprung(mark: str, tiny: Path, tmp_path: Path) -> Path:
    """The file where each trap in the working directory writes that it was run."""
    sprung = tmp_path / "sprung"
    trap = f"open({str(sprung)!r}, 'a').write(__name__ + '\\n')\n"
    for name in TRAPS:
        (tmp_path / f"{name}.py").write_text(trap)
    (tmp_path / "highwater").mkdir()
    (tmp_path / "highwater" / "__init__.py").write_text(trap)
    return sprung


def done(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def test_a_trial_runs_nothing_that_lies_in_the_working_directory(sprung):
    tried = done(*TRIAL)
    assert tried.returncode == 0, tried.stderr
    assert not sprung.exists(), sprung.read_text()


def test_a_trace_runs_nothing_that_lies_in_the_working_directory(sprung):
    words = "highwater predict tiny --gpus 1xH200-141GB --length 64 --loss full --allocator native"
    predicted = done(*words.split(), "--exact", XDG_CACHE_HOME="cache")
    assert predicted.returncode == 0, predicted.stderr
    assert not sprung.exists(), sprung.read_text()


def test_batches_of_the_working_directory_are_found_after_every_library(sprung):
    Path("own.py").write_text(OWN)
    tried = done(*TRIAL, "--data", "own:good")
    assert tried.returncode == 0, tried.stderr
    assert not set(sprung.read_text().split() if sprung.exists() else []) & {
        *("psutil", "msgspec", "random", "signal", "torch", "transformers", "highwater")
    }

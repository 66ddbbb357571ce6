"""What is typed, and what stands in files that are named, never crashes a command: it is refused by
name, with a hint.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BIN, SIMULATED, refusal

from tables import deep

HOSTILE = Path(__file__).with_name("hostile.py")
LEAST_FLAGS, LEAST_VALUES = 300, 80
"""Flags and arguments of twelve commands, and the values, of which each has one or all."""
UNPRIVILEGED = (
    ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
)
"""Root passes every lock; without these two of its rights it is a user like others."""


def fuzzed(directory: Path, *which: str) -> dict[str, object]:
    """What ``hostile.py`` found."""
    words = [*UNPRIVILEGED, sys.executable, str(HOSTILE), *which]
    environment = {**os.environ, "PYTHONPATH": f"{HOSTILE.parent}:{HOSTILE.parents[1]}"}
    done = subprocess.run(
        words,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    (directory / "locked").chmod(0o700)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("which", [(), *deep(("every",))])
def test_no_hostile_value_of_any_flag_crashes_a_command(which, tmp_path, record_property):
    found = fuzzed(tmp_path, *which)
    record_property(
        "counted", f"{found['cases']:,} hostile commands, by exit code: {found['codes']}"
    )
    assert found["faults"] == []
    assert int(str(found["cases"])) > LEAST_FLAGS * (LEAST_VALUES if which else 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("predict", "locked/tiny", "--gpus", "A100-80GB"), "Permission denied"),
        (("show", "locked/study.jsonl"), "locked/study.jsonl cannot be read: Permission denied"),
        (("show", "--log-dir", "locked/logs"), "Permission denied"),
        (("find", "Qwen3-0.6B", *SIMULATED, "--study", "locked/study.jsonl"), "Permission denied"),
        (
            ("find", "--config", "locked/study.yaml"),
            "locked/study.yaml cannot be read: Permission denied",
        ),
        (
            ("guide", "locked/table.csv"),
            "the table locked/table.csv cannot be read: Permission denied",
        ),
        (
            ("guide", "--predict", "Qwen3-0.6B", "--gpus", "A100-80GB", "-o", "locked/guide.md"),
            "Permission denied",
        ),
        (
            ("find", "tiny", "--device", "cpu", "--memory", "2GiB", "--log-dir", "locked/logs"),
            "Permission denied",
        ),
    ],
)
def test_a_folder_without_rights_is_refused_by_name(tmp_path, tiny, words, said):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o000)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [*UNPRIVILEGED, str(BIN / "highwater"), *words]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    locked.chmod(0o700)
    problem, _ = refusal(done, 2)
    assert said in problem
    assert "locked" in problem
    assert list(locked.iterdir()) == []

"""What is typed, and what stands in files that are named, never crashes a command."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import SIMULATED, refusal

from tables import deep

HOSTILE = Path(__file__).with_name("hostile.py")
LEAST_FLAGS, LEAST_VALUES = 300, 80
"""Flags and arguments of twelve commands, and the values, of which each has one or all."""
UNPRIVILEGED = (
    ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
)
"""Root passes every lock; without these two of its rights it is a user like others."""


def by_hostile(directory: Path, *which: str) -> Any:
    done = subprocess.run(
        [*UNPRIVILEGED, sys.executable, str(HOSTILE), *which],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": f"{HOSTILE.parent}:{HOSTILE.parents[1]}"},
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
    found = by_hostile(tmp_path, *which)
    record_property(
        "counted", f"{found['cases']:,} hostile commands, by exit code: {found['codes']}"
    )
    assert found["faults"] == []
    assert int(str(found["cases"])) > LEAST_FLAGS * (LEAST_VALUES if which else 1)


LOCKED = {
    "predict locked/tiny --gpus A100-80GB": "",
    "show locked/study.jsonl": "locked/study.jsonl cannot be read: ",
    "show --log-dir locked/logs": "",
    f"find Qwen3-0.6B {' '.join(SIMULATED)} --study locked/study.jsonl": "",
    "find --config locked/study.yaml": "locked/study.yaml cannot be read: ",
    "guide locked/table.csv": "the table locked/table.csv cannot be read: ",
    "guide --predict Qwen3-0.6B --gpus A100-80GB -o locked/guide.md": "",
    "find tiny --device cpu --memory 2GiB --log-dir locked/logs": "",
}
"""Commands that name something in a folder without rights, and how the problem is told."""


def test_a_folder_without_rights_is_refused_by_name(tmp_path):
    found = by_hostile(tmp_path, json.dumps([words.split() for words in LOCKED]))
    for (code, answer, talk), (words, said) in zip(found, LOCKED.items(), strict=True):
        problem, _ = refusal(subprocess.CompletedProcess(words, code, answer, talk), 2)
        assert f"{said}Permission denied" in problem, words
        assert "locked" in problem
    assert [path.name for path in (tmp_path / "locked").iterdir()] == ["config.json"]

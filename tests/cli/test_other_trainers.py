"""``--trainer command``: a search of somebody else's training script, from the command line."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from conftest import following

SCRIPT = """
import sys

length, steps = map(int, sys.argv[1:])
for step in range(1, steps + 1):
    kept = b"x" * (6000 * length)
    print(f"step {step}/{steps} loss {kept[0] / step:.3f}", flush=True)
"""
CPU = ("--device", "cpu", "--memory", "1GiB", "--timeout", "120s")
LENGTHS = ("--start-length", "32k", "--resolution", "64k", "--max-length", "256k")


@pytest.fixture
def command(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = f"{shlex.quote(sys.executable)} train.py {{length}} {{steps}}"
    return ("--trainer", "command", "--command", words)


def test_a_search_of_a_script_finds_its_capacity_and_goes_on(highwater, tmp_path, command):
    words = ("find", "Qwen3-0.6B", *command, *CPU, *LENGTHS, "--study", "study.jsonl")
    done = highwater(*words)
    assert done.returncode == 0, done.stderr
    assert "by your command, measured" in done.stdout
    assert "data segment, sampled" in done.stdout
    study = json.loads(highwater("show", "study.jsonl", "--as", "json").stdout)
    (answer,) = study["answers"]
    assert answer["limit"] == "memory"
    assert answer["capacity_tokens"] >= 32_768
    assert answer["does_not_fit_tokens"] == answer["capacity_tokens"] + 65_536
    again = highwater(*words)
    assert again.returncode == 0
    assert "finished trials are not run again" in again.stderr
    assert "trying" not in again.stderr
    assert again.stdout == done.stdout
    report = highwater("report", "study.jsonl")
    assert report.returncode == 0
    assert "train.py {length} {steps}" in report.stdout
    other = highwater(*words[:-1], "study.jsonl", "--done-pattern", "step 2/2")
    assert other.returncode == 2, "another proof is another question"
    assert len(list((tmp_path / "logs").rglob("*.log"))) == len(study["trials"])
    assert not list((tmp_path / "logs").rglob("highwater-*"))


def test_one_trial_says_what_it_was_and_offers_the_search(highwater, command):
    done = highwater("try", "Qwen3-0.6B", "--length", "4k", *command, *CPU)
    assert done.returncode == 0, done.stderr
    assert "2 steps seen in the log" in done.stdout
    assert "train.py {length} {steps}" in done.stdout
    assert following(done) == ["find", "Qwen3-0.6B", *command, *CPU]

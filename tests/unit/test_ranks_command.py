"""``python -m highwater.engine.ranks``: every rank is numbered and meets by one file; the first
that fails ends the others.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from highwater.nouns.environment import STORE_VARIABLE

SAYS = f"""
import json, os, pathlib, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "{STORE_VARIABLE}")
said = [os.environ[name] for name in names]
store = pathlib.Path(said[-1])
said.append(oct(store.parent.stat().st_mode & 0o777))
pathlib.Path(sys.argv[1], said[0]).write_text(json.dumps([said, sys.argv[2:]]))
"""
FAILS = """
import os, pathlib, sys, time
if os.environ["RANK"] == "1":
    while not pathlib.Path(sys.argv[1], "0").exists():
        time.sleep(0.01)
    sys.exit(3)
pathlib.Path(sys.argv[1], "0").write_text(str(os.getpid()))
time.sleep(600)
"""


def run(folder: Path, script: str, *words: str) -> "subprocess.Popen[str]":
    path = folder / "loop.py"
    path.write_text(script)
    command = [sys.executable, "-m", "highwater.engine.ranks", *words[:2], path, folder, *words[2:]]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_every_rank_is_numbered_and_meets_in_a_private_folder(tmp_path):
    process = run(tmp_path, SAYS, "--nproc", "2", "--own", "words")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    stores = set()
    for rank in ("0", "1"):
        (*numbers, store, mode), own = json.loads((tmp_path / rank).read_text())
        assert numbers == [rank, rank, "2", "2"]
        assert mode == "0o700"
        assert own == ["--own", "words"]
        stores.add(store)
    assert len(stores) == 1
    assert not Path(stores.pop()).parent.exists(), "it is gone afterwards"


def test_the_first_that_fails_ends_the_others(tmp_path):
    process = run(tmp_path, FAILS, "--nproc", "2")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 3, said
    assert not Path("/proc", (tmp_path / "0").read_text()).exists()


def test_a_launcher_that_is_ended_ends_its_ranks(tmp_path):
    process = run(tmp_path, FAILS.replace('== "1"', '== "none"'), "--nproc", "1")
    while not (tmp_path / "0").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert not Path("/proc", (tmp_path / "0").read_text()).exists()


@pytest.mark.parametrize("words", [("--nproc", "0"), ("--nproc", "many")])
def test_a_number_that_cannot_be_is_refused(words, tmp_path):
    process = run(tmp_path, SAYS, *words)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "--nproc" in said

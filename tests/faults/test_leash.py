"""The leash: the command's status comes through, and no descendant of the command outlives it, its leash or its owner."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import marked, wait_until

pytestmark = pytest.mark.timeout(60)

LEASH = (sys.executable, "-m", "highwater.launch.leash")
DEAF = "trap '' TERM; touch started; sleep 600"
DAEMONS = f'for _ in 1 2 3; do setsid sh -c "{DEAF}" & done; until [ -e started ]; do sleep 0.01; done'
"""Starts three processes in sessions of their own that do not hear SIGTERM."""

OnLeash = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def on_leash(mark: str) -> OnLeash:
    """Runs a shell script on the leash."""
    return lambda script: subprocess.Popen([*LEASH, str(os.getpid()), "sh", "-c", script])


@pytest.mark.parametrize(("script", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -6 $$", 134)])
def test_the_status_of_the_command_comes_through_as_a_shell_gives_it(on_leash: OnLeash, script: str, status: int) -> None:
    assert on_leash(f"ulimit -c 0; {script}").wait(10) == status


def test_what_the_command_left_behind_is_gone_when_the_leash_is(on_leash: OnLeash, mark: str, tmp_path: Path) -> None:
    assert on_leash(f"{DAEMONS}; exit 3").wait(10) == 3
    assert (tmp_path / "started").exists()
    assert marked(mark) == []


@pytest.mark.parametrize("times", [1, 50])
def test_a_leash_that_is_told_to_end_takes_everything_with_it(on_leash: OnLeash, mark: str, tmp_path: Path, times: int) -> None:
    leash = on_leash(f"{DAEMONS}; {DEAF}")
    assert wait_until((tmp_path / "started").exists, within_s=10)
    assert len(marked(mark)) >= 4
    for _ in range(times):
        leash.send_signal(signal.SIGTERM)
    assert leash.wait(10) == 128 + signal.SIGTERM
    assert marked(mark) == []


def test_an_owner_killed_with_9_takes_everything_on_its_leash_with_it(mark: str, tmp_path: Path) -> None:
    code = "import os, subprocess, sys; subprocess.Popen([*sys.argv[1:4], str(os.getpid()), *sys.argv[4:]]).wait()"
    owner = subprocess.Popen([sys.executable, "-c", code, *LEASH, "sh", "-c", f"{DAEMONS}; {DEAF}"])
    assert wait_until((tmp_path / "started").exists, within_s=10)
    assert len(marked(mark)) >= 5
    owner.kill()
    owner.wait()
    assert wait_until(lambda: marked(mark) == [], within_s=3)


@pytest.mark.parametrize("script", ["exit 0", "kill -9 $$", f"{DAEMONS}; {DEAF}"], ids=["done", "killed", "told to end"])
def test_a_directory_that_was_made_for_the_command_goes_with_it(mark: str, tmp_path: Path, script: str) -> None:
    own = tmp_path / "mine" / "own"
    own.mkdir(parents=True)
    (tmp_path / "mine" / "kept").touch()
    (own / "big").touch()
    (own / "link").symlink_to(tmp_path / "mine")
    leash = subprocess.Popen([*LEASH, str(os.getpid()), "--remove", str(own), "sh", "-c", script])
    if "setsid" in script:
        assert wait_until((tmp_path / "started").exists, within_s=10)
        assert own.exists()
        leash.send_signal(signal.SIGTERM)
    leash.wait(10)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["kept"]


def test_an_owner_that_died_before_the_leash_was_ready_is_noticed(mark: str, tmp_path: Path) -> None:
    long_gone = subprocess.Popen(["true"])
    long_gone.wait()
    leash = subprocess.Popen([*LEASH, str(long_gone.pid), "touch", "ran"])
    assert leash.wait(10) == 128 + signal.SIGTERM
    assert not (tmp_path / "ran").exists()

"""The reaper: the command's status comes through, and no descendant outlives it."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import FIND as SEARCH
from processes import HANGS_S, are_gone, done, lines, marked, wait_until

from highwater.nouns.trial import TrialSpec
from highwater.trials.engine_trial import EngineLauncher
from highwater.trials.local import LocalRunner
from highwater.units import GIB, MIB
from runner_contract import RunnerContract
from trial_specs import trial_of

pytestmark = pytest.mark.timeout(900)
ENDS_S = 60
"""Bound on every wait, on a machine that is busy."""
REAPER = (sys.executable, "-m", "highwater.trials.reaper")
DEAF = "trap '' TERM; touch started-0; sleep 600"
"""Does not hear SIGTERM, once its file ``started-`` is there."""
DAEMONS = (
    f'for n in 1 2 3; do setsid sh -c "{DEAF.replace("0;", "$n;")}" & done; '
    "until [ -e started-1 -a -e started-2 -a -e started-3 ]; do sleep 0.01; done"
)
"""Starts three processes in sessions of their own that do not hear SIGTERM, and waits for them."""
UnderReaper = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def under_reaper(mark: str) -> UnderReaper:
    return lambda script: subprocess.Popen([*REAPER, str(os.getpid()), "sh", "-c", script])


@pytest.mark.parametrize(
    ("script", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -6 $$", 134)]
)
def test_the_status_of_the_command_comes_through_as_a_shell_gives_it(under_reaper, script, status):
    assert under_reaper(f"ulimit -c 0; {script}").wait(ENDS_S) == status


def test_what_the_command_left_behind_is_gone_when_the_reaper_is(under_reaper, mark, tmp_path):
    assert under_reaper(f"{DAEMONS}; exit 3").wait(ENDS_S) == 3
    assert (tmp_path / "started-3").exists()
    assert marked(mark) == []


@pytest.mark.parametrize("times", [1, 50])
def test_a_reaper_that_is_told_to_end_takes_everything_with_it(under_reaper, mark, tmp_path, times):
    reaper = under_reaper(f"{DAEMONS}; {DEAF}")
    assert wait_until((tmp_path / "started-0").exists, within_s=ENDS_S)
    assert len(marked(mark)) >= 6
    for _ in range(times):
        reaper.send_signal(signal.SIGTERM)
    assert reaper.wait(ENDS_S) == 128 + signal.SIGTERM
    assert marked(mark) == []


def test_an_owner_killed_with_9_takes_everything_under_its_reaper_with_it(mark, tmp_path):
    code = (
        "import os, subprocess, sys; subprocess.Popen([*sys.argv[1:4], str(os.getpid()), "
        "*sys.argv[4:]]).wait()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, *REAPER, "sh", "-c", f"{DAEMONS}; {DEAF}"]
    )
    assert wait_until((tmp_path / "started-0").exists, within_s=ENDS_S)
    assert len(marked(mark)) >= 7
    owner.kill()
    owner.wait()
    assert are_gone(mark)


@pytest.mark.parametrize(
    "script", ["exit 0", "kill -9 $$", f"{DAEMONS}; {DEAF}"], ids=["done", "killed", "told to end"]
)
def test_a_directory_that_was_made_for_the_command_goes_with_it(mark, tmp_path, script):
    own = tmp_path / "mine" / "own"
    own.mkdir(parents=True)
    (tmp_path / "mine" / "kept").touch()
    (own / "big").touch()
    (own / "link").symlink_to(tmp_path / "mine")
    reaper = subprocess.Popen([*REAPER, str(os.getpid()), "--remove", str(own), "sh", "-c", script])
    if "setsid" in script:
        assert wait_until((tmp_path / "started-0").exists, within_s=ENDS_S)
        assert own.exists()
        reaper.send_signal(signal.SIGTERM)
    reaper.wait(ENDS_S)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["kept"]


def test_an_owner_that_died_before_the_reaper_was_ready_is_noticed(mark, tmp_path):
    long_gone = subprocess.Popen(["true"])
    long_gone.wait()
    reaper = subprocess.Popen([*REAPER, str(long_gone.pid), "touch", "ran"])
    assert reaper.wait(ENDS_S) == 128 + signal.SIGTERM
    assert not (tmp_path / "ran").exists()


TRIAL_S = 200.0


class TestLocalRunner(RunnerContract):
    @pytest.fixture
    def runner(self, mark: str, tiny: Path, wide: Path, tmp_path: Path) -> LocalRunner:
        self.tiny, self.wide = tiny, wide
        launcher = EngineLauncher(log_directory=tmp_path / "logs", timeout_s=TRIAL_S)
        return LocalRunner(launcher, most_trials=2)

    def trial(self, directory: Path, length_tokens: int, data: str | None = None) -> TrialSpec:
        return trial_of(
            directory,
            device="cpu",
            length_tokens=length_tokens,
            memory_budget_bytes=GIB if directory == self.tiny else GIB + 512 * MIB,
            data=data,
        )

    def fitting(self, number: int) -> TrialSpec:
        return self.trial(self.tiny, 32 * (number + 1))

    def too_long(self) -> TrialSpec:
        return self.trial(self.wide, 8192)

    def crashing(self) -> TrialSpec:
        return self.trial(self.tiny, 48, "faulty_batches:leaving_with_1")

    def endless(self) -> TrialSpec:
        return self.trial(self.tiny, 56, "faulty_batches:hanging")


SIDE_BY_SIDE = (
    *(*SEARCH, "--max-length", "32", "--gpus", "1", "2", "--ring", "1", "--mlp-tiles", "1"),
    *("--max-concurrent-trials", "2", "--data", "faulty_batches:paused"),
)


@pytest.mark.usefixtures("tiny")
def test_two_trials_at_a_time_that_are_killed_with_9_leave_nothing_and_go_on(mark, tmp_path):
    (tmp_path / "pause").write_text("32")
    search = subprocess.Popen(SIDE_BY_SIDE, start_new_session=True, stderr=subprocess.DEVNULL)
    study = tmp_path / "study.jsonl"

    def both_started() -> bool:
        kinds = [line["kind"] for line in lines(study)] if study.exists() else []
        return kinds.count("trial_started") == 2 or search.poll() is not None

    assert wait_until(both_started, within_s=HANGS_S)
    assert wait_until((tmp_path / "hangs").exists, within_s=HANGS_S)
    search.send_signal(signal.SIGKILL)
    search.wait()
    assert are_gone(mark)
    started = [line for line in lines(study) if line["kind"] == "trial_started"]
    assert {line["spec"]["layout"]["gpus"] for line in started} == {1, 2}
    (tmp_path / "pause").unlink()
    ended = done(*SIDE_BY_SIDE)
    assert ended.returncode == 0, ended.stderr
    counts = Counter(line["kind"] for line in lines(study))
    assert counts["trial_started"] == 4
    assert counts["trial_finished"] == counts["cell_answered"] == 2

"""The runner of this machine with the trials of our engine: what every runner does, and a search
whose trials run side by side, killed in the midst of them.
"""

import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from processes import marked, wait_until
from test_faults_of_a_search import ENDS_S, GONE_S, HANGS_S, lines

from highwater.nouns.trial import TrialSpec
from highwater.trials.engine_trial import EngineLauncher
from highwater.trials.local import LocalRunner
from highwater.units import GIB, MIB
from runner_contract import RunnerContract
from trial_specs import trial_of

pytestmark = pytest.mark.timeout(900)

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


FIND = (
    *("highwater", "find", "tiny", "--device", "cpu", "--memory", "1GiB", "--loss", "full"),
    *("--start-length", "32", "--resolution", "32", "--max-length", "32", "--gpus", "1"),
    *("--mlp-tiles", "1", "--study", "study.jsonl", "--max-concurrent-trials", "2"),
    *("--ring", "1", "--data", "faulty_batches:paused"),
)


@pytest.mark.usefixtures("tiny")
def test_a_search_of_two_trials_at_a_time_that_is_killed_with_9_leaves_nothing_and_goes_on(
    mark, tmp_path
):
    (tmp_path / "pause").write_text("32")
    words = (*FIND[:-2], "--gpus", "1", "2", *FIND[-2:])
    search = subprocess.Popen(words, start_new_session=True, stderr=subprocess.DEVNULL)
    study = tmp_path / "study.jsonl"

    def both_started() -> bool:
        kinds = [line["kind"] for line in lines(study)] if study.exists() else []
        return kinds.count("trial_started") == 2 or search.poll() is not None

    assert wait_until(both_started, within_s=HANGS_S)
    assert wait_until((tmp_path / "hangs").exists, within_s=HANGS_S)
    search.send_signal(signal.SIGKILL)
    search.wait()
    assert wait_until(lambda: marked(mark) == [], within_s=GONE_S)
    started = [line for line in lines(study) if line["kind"] == "trial_started"]
    assert {line["spec"]["layout"]["gpus"] for line in started} == {1, 2}
    (tmp_path / "pause").unlink()
    done = subprocess.run(words, capture_output=True, text=True, timeout=ENDS_S, check=False)
    assert done.returncode == 0, done.stderr
    counts = Counter(line["kind"] for line in lines(study))
    assert counts["trial_started"] == 4
    assert counts["trial_finished"] == counts["cell_answered"] == 2

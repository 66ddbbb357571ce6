"""What a trial saves is gone when it is over, however it ended, what a user has beside it stays."""

import errno
import json
import re
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import SmallDisk
from processes import are_gone, wait_until

import highwater
from highwater.nouns.trial import Outcome, TrialResult

pytestmark = pytest.mark.timeout(600)

MINE = "checkpoints"
"""A directory with a user's files in it."""

Saving = Callable[..., TrialResult]


@pytest.fixture
def users_files(tmp_path: Path) -> dict[Path, str]:
    """What a user has in the directory that the trials are told to save below."""
    files = {
        Path("model.safetensors"): "mine",
        Path("hf/config.json"): "mine too",
        Path("sharded/.metadata"): "and mine",
    }
    for path, text in files.items():
        (tmp_path / MINE / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / MINE / path).write_text(text)
    return files


def files_below(directory: Path) -> dict[Path, str]:
    return {
        path.relative_to(directory): path.read_text()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def saving(mark: str, tiny: Path) -> Saving:
    """Tries a trial of two processes that saves after every step, with faulty batches."""

    def saving(data: str | None, **changes: object) -> TrialResult:
        settings = {
            "device": "cpu",
            "memory": "1GiB",
            "gpus": [2],
            "log_dir": "logs",
            "save_hf": "always",
            **changes,
        }
        source = f"faulty_batches:{data}" if data else None
        return highwater.run_trial(
            str(tiny), 32, data=source, checkpoint="sharded", timeout="2m", **settings
        )

    return saving


@pytest.mark.parametrize(
    ("data", "outcome", "kinds"),
    [
        (None, Outcome.FIT, ["hf", "sharded", "hf"]),
        ("crashing_in_rank_1", Outcome.CRASHED, ["hf"]),
        ("allocating_in_rank_1", Outcome.OUT_OF_MEMORY, ["hf"]),
    ],
)
def test_a_trials_own_files_are_gone_when_it_is_over_and_a_users_are_not(
    saving, users_files, tmp_path, data, outcome, kinds
):
    result = saving(data, checkpoint_dir=MINE)
    assert result.outcome is outcome, result.reason
    saves = next(rank.saves for rank in result.ranks if rank.rank == (1 if data else 0))
    assert [save.kind for save in saves] == kinds
    assert all(save.time_s > 0 for save in saves)
    assert files_below(tmp_path / MINE) == users_files
    assert {path.name for path in (tmp_path / MINE).iterdir()} == {
        "model.safetensors",
        "hf",
        "sharded",
    }


def test_rank_0_writes_the_weights_and_every_rank_its_shards(saving):
    result = saving(None)
    hf = [rank.saves[0].written_bytes for rank in result.ranks]
    sharded = [rank.saves[1].written_bytes for rank in result.ranks]
    parameters = result.ranks[0].parameters or 0
    assert hf[1] == 0
    assert 4 * parameters < hf[0] < 4 * parameters + 8192
    assert min(sharded) > 5 * parameters
    beside = [path.suffix for path in Path("logs").rglob("*") if path.is_file()]
    assert sorted(beside) == [".jsonl", ".log"]


def test_a_worker_killed_with_9_after_a_save_leaves_no_file(saving, users_files, tmp_path):
    result = saving("killed_in_rank_1", checkpoint_dir=MINE)
    assert result.outcome is Outcome.CRASHED
    assert "SIGKILL" in result.reason
    assert files_below(tmp_path / MINE) == users_files


def test_a_search_killed_with_9_leaves_no_file_of_its_trial(mark, tiny, users_files, tmp_path):
    (tmp_path / "pause").write_text("32")
    words = ["highwater", "try", "tiny", "--length", "32", "--device", "cpu", "--memory", "1GiB"]
    words += ["--save-hf", "always", "--checkpoint-dir", MINE, "--data", "faulty_batches:paused"]
    search = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert wait_until((tmp_path / "hangs").exists, within_s=240)
    (own,) = (tmp_path / MINE).glob("highwater-checkpoint-*")
    assert (own / "hf" / "model.safetensors").stat().st_size > 0
    search.send_signal(signal.SIGKILL)
    search.wait()
    assert are_gone(mark)
    assert files_below(tmp_path / MINE) == users_files
    assert not own.exists()


@pytest.fixture
def on_a_small_disk(
    small_disk: Callable[[int], SmallDisk], tmp_path: Path
) -> Callable[..., tuple["subprocess.CompletedProcess[str]", list[str]]]:
    """Runs a command that finds 72 MiB in the directory ``disk``, and says what is left there;
    ``fill`` names the trial that fills it up.
    """

    def on_a_small_disk(
        *words: str, fill: int = 0
    ) -> tuple["subprocess.CompletedProcess[str]", list[str]]:
        disk = small_disk(72)
        (disk.folder / "fill").write_text(str(fill))
        done = disk.run(*words, FAULTS=str(tmp_path / "disk"))
        return done, sorted(path.name for path in disk.folder.iterdir())

    return on_a_small_disk


@pytest.mark.parametrize(
    "saved", [("--save-hf", "last"), ("--checkpoint", "sharded", "--gpus", "2")]
)
def test_a_disk_that_fills_up_under_a_save_is_a_crash(on_a_small_disk, tiny, tmp_path, saved):
    words = ("highwater", "try", "tiny", "--length", "32", "--device", "cpu", "--memory", "1GiB")
    words += ("--json", *saved, "--checkpoint-dir", "disk")
    done, left = on_a_small_disk(*words, "--data", "faulty_batches:filling_the_disk", fill=32)
    result = json.loads(done.stdout)["result"]
    assert result["outcome"] == "CRASHED"
    assert f", save: OSError: [Errno {errno.ENOSPC}] " in result["reason"]
    assert str(tmp_path / "disk" / "highwater-checkpoint-") in result["reason"]
    assert left == ["fill", "filler"]


def test_a_disk_that_is_too_small_is_refused_and_each_hint_works(on_a_small_disk, wide, tmp_path):
    """4.9 million parameters: 55.7 MiB of shards and 18.6 MiB of weights, and 64 MiB that have to
    stay free, on 72.
    """
    trial = [
        *("highwater", "try", "wide", "--length", "32", "--device", "cpu", "--memory", "1GiB"),
        *("--loss", "chunked"),
    ]
    trial += ["--checkpoint", "sharded", "--save-hf", "last", "--log-dir", "disk"]
    refused, _ = on_a_small_disk(*trial)
    assert (refused.returncode, refused.stdout) == (3, "")
    problem, _, hint = refused.stderr.splitlines()[-3:]
    assert re.findall(r"[\d.]+ MiB", problem)[:2] == ["55.7 MiB", "18.6 MiB"]
    assert " below disk" in problem
    ways = hint.split("`")[1::2]
    assert ways[0] == "df -h disk"
    assert ways[1].startswith("--checkpoint-dir ")
    assert ways[2:] == ["--checkpoint none --save-hf never"]
    for way in ways[1:]:
        done, _ = on_a_small_disk(*trial, *shlex.split(way))
        assert done.returncode == 0, done.stderr

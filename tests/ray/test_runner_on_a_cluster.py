"""The runner of a Ray cluster does what every runner does; ``highwater find --runner ray``."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from conftest import (
    GONE_S,
    commands_under,
    holder_of_the_trial,
    node_of,
    paused,
    processes_of_trials,
    runner_on,
    trial,
)
from local_cluster import LocalCluster
from processes import wait_until

from highwater.errors import MachineError
from highwater.nouns.trial import Launch, Outcome, TrialSpec
from highwater.trials.ray_runner import RayRunner
from highwater.units import GIB
from places import captured
from runner_contract import ENDS_S, RunnerContract
from tiny_models import write_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("trials")]
_HOLD_ALL_NODES = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False)
groups = [ray.util.placement_group([{"CPU": 1}]) for _ in range(3)]
ray.get([group.ready() for group in groups])
print("held", flush=True)
sys.stdin.read()
"""


class TestRayRunner(RunnerContract):
    @pytest.fixture(autouse=True)
    def directory(self, model: Path) -> None:
        self.model = model

    def fitting(self, number: int) -> TrialSpec:
        return trial(self.model, 32 * (number + 1))

    def too_long(self) -> TrialSpec:
        return trial(self.model, 8192)

    def crashing(self) -> TrialSpec:
        return trial(self.model, 48, "faulty_batches:leaving_with_1")

    def endless(self) -> TrialSpec:
        return trial(self.model, 56, "faulty_batches:hanging")


def test_a_killed_trial_is_moved(runner: RayRunner, model: Path, pause: Path, mark: str) -> None:
    spec, found = paused(model, pause), []
    for attempt in (1, 2):
        future = runner.submit(Launch(spec=spec, attempt=attempt))
        assert wait_until(pause.with_name("hangs").exists, within_s=ENDS_S)
        holder = holder_of_the_trial(mark)
        found.append(node_of(holder).pid)
        holder.kill()
        result = future.result(timeout=GONE_S)
        assert result.outcome is Outcome.CRASHED
        assert result.reason.startswith("Ray lost the trial on node ")
        assert wait_until(lambda: processes_of_trials(mark) == [], within_s=GONE_S)
        pause.with_name("hangs").unlink()
    assert found[0] != found[1]


def test_a_trial_waits_for_the_cluster(runner: RayRunner, nodes: LocalCluster, model: Path) -> None:
    told: list[str] = []
    words = (sys.executable, "-c", _HOLD_ALL_NODES, nodes.address)
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        while "held" not in other.stdout.readline():
            assert other.poll() is None
        future = runner.submit(Launch(spec=trial(model, 32)), on_phase=told.append)
        assert wait_until(lambda: len(told) > 2, within_s=GONE_S)
        assert set(told) == {"waiting for its place on a node"}
    assert future.result(timeout=ENDS_S).outcome is Outcome.FIT


def test_a_trial_too_large_for_every_node_is_refused(runner: RayRunner, model: Path) -> None:
    spec = msgspec.structs.replace(trial(model, 32), memory_budget_bytes=64 * GIB)
    with pytest.raises(MachineError, match="of host memory, and no node") as refused:
        runner.submit(Launch(spec=spec)).result(timeout=GONE_S)
    assert "`ray status`" in refused.value.hint


def test_when_the_process_that_drives_ray_dies_the_trial_ends_and_the_search_hears_of_it(
    nodes: LocalCluster, model: Path, pause: Path, mark: str, tmp_path: Path
) -> None:
    future = runner_on(nodes, model, tmp_path).submit(Launch(spec=paused(model, pause)))
    assert wait_until(pause.with_name("hangs").exists, within_s=ENDS_S)
    # The youngest is the job itself, not its reaper.
    drivers = (
        pid for pid, words in commands_under(mark).items() if "highwater.trials.ray_runner" in words
    )
    os.kill(max(drivers, key=lambda pid: psutil.Process(pid).create_time()), signal.SIGKILL)
    with pytest.raises(MachineError, match="connection to the Ray cluster was lost"):
        future.result(timeout=GONE_S)
    assert wait_until(lambda: processes_of_trials(mark) == [], within_s=GONE_S)


LOST_S = 90
"""Bound on the time until Ray knows that a node is gone."""


def test_a_trial_whose_node_is_killed_says_nothing_and_is_tried_on_another(
    runner: RayRunner, nodes: LocalCluster, model: Path, pause: Path, mark: str
) -> None:
    spec = paused(model, pause)
    future = runner.submit(Launch(spec=spec))
    assert wait_until(pause.with_name("hangs").exists, within_s=ENDS_S)
    node_of(holder_of_the_trial(mark)).kill()
    result = future.result(timeout=LOST_S)
    assert result.outcome is Outcome.CRASHED
    assert not result.outcome.tells
    assert result.reason.endswith("of the Ray cluster was lost")
    assert result.log_path is not None
    assert result.reason in Path(result.log_path).read_text()
    assert wait_until(lambda: processes_of_trials(mark) == [], within_s=GONE_S)
    pause.unlink()
    again = runner.submit(Launch(spec=spec, attempt=2)).result(timeout=ENDS_S)
    assert (again.outcome, again.attempt) == (Outcome.FIT, 2)
    assert again.log_path != result.log_path
    nodes.add("1")


FIND = (
    *(
        *(sys.executable, "-m", "highwater", "find", "tiny", "--device", "cpu", "--memory"),
        *("1GiB", "--loss", "full"),
    ),
    *("--start-length", "32", "--resolution", "32", "--max-length", "32", "--gpus", "1", "2"),
    *("--study", "study.jsonl", "--data", "faulty_batches:paused"),
)
"""Two cells of one trial each, which the pause stops at once."""


def lines(study: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in study.read_text().splitlines()]


def test_a_search_that_is_killed_with_9_leaves_no_process_on_any_node_and_goes_on(
    nodes: LocalCluster, pause: Path, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "tiny", vocab_size=512, num_hidden_layers=1)
    pause.write_text("32")
    words = (*FIND, "--runner", "ray", "--address", nodes.address)
    search = subprocess.Popen(words, start_new_session=True, stderr=subprocess.DEVNULL)
    study = tmp_path / "study.jsonl"

    def both_run() -> bool:
        held = [words for words in processes_of_trials(mark) if "TrialOnNode" in words]
        return len(held) == 2 or search.poll() is not None

    assert wait_until(both_run, within_s=ENDS_S)
    assert wait_until(pause.with_name("hangs").exists, within_s=ENDS_S)
    search.send_signal(signal.SIGKILL)
    search.wait()
    assert wait_until(lambda: processes_of_trials(mark) == [], within_s=GONE_S)
    started = [line for line in lines(study) if line["kind"] == "trial_started"]
    assert {line["spec"]["layout"]["gpus"] for line in started} == {1, 2}
    pause.unlink()
    done = subprocess.run(words, capture_output=True, text=True, timeout=ENDS_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "trials run on 3 nodes of a Ray cluster" in done.stderr
    assert "raylet" not in done.stdout + done.stderr, "Ray says nothing"
    counts = Counter(line["kind"] for line in lines(study))
    assert counts["trial_started"] == 4
    assert counts["trial_finished"] == counts["cell_answered"] == 2
    logs = [line["result"]["log_path"] for line in lines(study) if line["kind"] == "trial_finished"]
    assert all(Path(log).is_relative_to("logs") and Path(log).stat().st_size for log in logs)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_search_that_is_told_to_stop_ends_what_runs_on_the_nodes(
    number: signal.Signals,
    nodes: LocalCluster,
    pause: Path,
    mark: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "tiny", vocab_size=512, num_hidden_layers=1)
    pause.write_text("32")
    words = (*FIND, "--address", nodes.address)
    pipe = subprocess.PIPE
    search = subprocess.Popen(words, start_new_session=True, stderr=pipe, stdout=pipe, text=True)
    assert wait_until(pause.with_name("hangs").exists, within_s=ENDS_S)
    search.send_signal(number)
    _, told = search.communicate(timeout=GONE_S)
    assert search.returncode == 128 + number, told
    assert processes_of_trials(mark) == []


PUBLISHED = (
    *("--model_path", "./small", "--start_length", "4096", "--log_dir", "./logs"),
    *("--test_gpu_num", "1", "2", "--test_sp_num", "1", "2", "--trainer_strategy", "fsdp"),
    *("--save_hf_checkpoint", "last", "--timeout", "2400"),
)
"""The published script's own example, with fewer GPUs, at the longest length that the CPU has."""


def test_the_published_command_answers_on_a_cluster_as_on_one_machine(
    nodes: LocalCluster, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "small", vocab_size=512, num_hidden_layers=1)
    command = (sys.executable, "-m", "highwater.cli.search_context_length_capacity", *PUBLISHED)
    answers: list[list[str]] = []
    for more in ((), ("--dlc", "--log_dir", "./logs-of-the-cluster")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ADDRESS", nodes.address)
            done = subprocess.run(
                (*command, *more), capture_output=True, text=True, timeout=600, check=False
            )
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout.splitlines())
        assert ("nodes of a Ray cluster" in done.stderr) == bool(more)
    # Side by side on three nodes the cells may end in another order.
    assert sorted(answers[0]) == sorted(answers[1])
    assert len(answers[0]) == 3
    assert all(line.startswith("model_name = small, trainer_gpu_num = ") for line in answers[0])
    logs = [
        {str(path.relative_to(folder)) for path in folder.rglob("model_len-*.log")}
        for folder in (tmp_path / "logs", tmp_path / "logs-of-the-cluster")
    ]
    assert logs[0] == logs[1]


TRAINER = """
import os, sys
length = int(sys.argv[1])
try:
    held = bytearray(length * 2**20)
except MemoryError:
    raise SystemExit(sys.exit("RuntimeError: DefaultCPUAllocator: can't allocate memory"))
for step in (1, 2):
    print(f"step {step}/2 loss 1.{step}", flush=True)
"""
"""A trainer that takes a MiB for each token."""


def test_another_trainer_is_tried_on_the_nodes(
    nodes: LocalCluster, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "tiny")
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    command = shlex.join([sys.executable, str(script), "{length}"])
    words = (sys.executable, "-m", "highwater", "find", "tiny", "--device", "cpu", "--gpus", "1")
    words = (*words, "--memory", "512MiB", "--trainer", "command", "--command", command)
    lengths = ("--start-length", "64", "--resolution", "256", "--max-length", "1024")
    done = captured(
        (*words, *lengths, "--address", nodes.address, "--json", "--study", "study.jsonl"),
        timeout=ENDS_S,
    )
    assert done.returncode == 0, done.stderr
    (answer,) = json.loads(done.stdout)["answers"]
    assert (answer["capacity_tokens"], answer["does_not_fit_tokens"]) == (320, 576)

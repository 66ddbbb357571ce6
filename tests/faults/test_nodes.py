"""Trials across machines: two network namespaces are two machines, which share nothing but a file
system and the wire between them.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from processes import marked, wait_until
from test_faults_of_a_search import ENDS_S, GONE_S, HANGS_S, lines

from highwater.store.journal import read_study
from highwater.trials.node_folder import LOST_S

pytestmark = pytest.mark.timeout(900)

FIND = (
    *("highwater", "find", "tiny", "--device", "cpu", "--memory", "1GiB", "--loss", "full"),
    *("--start-length", "32", "--resolution", "32", "--max-length", "64", "--study", "study.jsonl"),
    *("--data", "faulty_batches:paused", "--gpus", "2"),
)
ADDRESSES = ("10.77.0.1/24", "10.77.0.2/24")


class Machine:
    """A network namespace with one end of a wire, and a host's name of its own."""

    def __init__(self, name: str, interface: str) -> None:
        self.name = name
        self.interface = interface

    def start(self, *words: str) -> "subprocess.Popen[str]":
        environment = os.environ | {"GLOO_SOCKET_IFNAME": self.interface}
        inside = ("ip", "netns", "exec", self.name, "unshare", "--uts")
        named = ("sh", "-c", f"hostname {self.name}; exec {shlex.join(words)}")
        return subprocess.Popen(
            (*inside, *named),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


@pytest.fixture
def machines(mark: str) -> Iterator[tuple[Machine, Machine]]:
    if os.geteuid() != 0:
        pytest.skip("only root makes network namespaces")
    short = mark[:6]
    both = (Machine(f"hw-{short}-0", f"hw{short}a"), Machine(f"hw-{short}-1", f"hw{short}b"))
    first, second = both

    def ip(*words: str) -> None:
        subprocess.run(("ip", *words), check=True)

    try:
        for machine in both:
            ip("netns", "add", machine.name)
        wire = ("link", "add", first.interface, "type", "veth", "peer", "name", second.interface)
        ip(*wire)
        for machine, address in zip(both, ADDRESSES, strict=True):
            ip("link", "set", machine.interface, "netns", machine.name)
            inside = ("-n", machine.name)
            ip(*inside, "address", "add", address, "dev", machine.interface)
            ip(*inside, "link", "set", machine.interface, "up")
            ip(*inside, "link", "set", "lo", "up")
        yield both
    finally:
        kill(marked(mark))
        wait_until(lambda: marked(mark) == [], within_s=GONE_S)
        for machine in both:
            subprocess.run(("ip", "netns", "delete", machine.name), check=False)


def kill(pids: Iterable[int]) -> None:
    """Kill them; who went with another before is gone."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def across(rendezvous: Path, node: int, *more: str) -> tuple[str, ...]:
    where = ("--nodes", "2", "--node-rank", str(node), "--rendezvous", str(rendezvous))
    return (*FIND, *where, *more)


def of_both(machines: tuple[Machine, Machine], folder: Path) -> "list[subprocess.Popen[str]]":
    return [each.start(*across(folder, node)) for node, each in enumerate(machines)]


def losses(path: Path) -> dict[int, list[Any]]:
    """The losses and gradient norms of each length, rank by rank."""
    return {
        trial.spec.length_tokens: [
            (rank.losses, rank.gradient_norms) for rank in trial.result.ranks
        ]
        for trial in read_study(path).trials
        if trial.result is not None
    }


@pytest.mark.usefixtures("tiny")
def test_two_machines_train_as_one_does_and_find_the_same(
    machines: tuple[Machine, Machine], mark: str, tmp_path: Path
) -> None:
    meet = tmp_path / "meet"
    searching, serving = of_both(machines, meet)
    answer, talk = searching.communicate(timeout=ENDS_S)
    assert searching.returncode == 0, talk
    assert serving.wait(timeout=GONE_S) == 0, serving.communicate()
    assert not meet.exists()
    assert wait_until(lambda: marked(mark) == [], within_s=GONE_S)
    assert "64 tokens" in answer
    assert "2 copies" in answer
    together = losses(tmp_path / "study.jsonl")
    words = (*FIND, "--copies", "2", "--study", "alone.jsonl")
    done = subprocess.run(words, capture_output=True, text=True, timeout=ENDS_S, check=False)
    assert done.returncode == 0, done.stderr
    assert together == losses(tmp_path / "alone.jsonl")
    assert len(together) == len(list(tmp_path.glob("logs/**/*.node-1.log"))) >= 1


@pytest.mark.usefixtures("tiny")
def test_a_machine_that_dies_in_a_trial_says_nothing_about_the_length_and_the_search_goes_on(
    machines: tuple[Machine, Machine], mark: str, tmp_path: Path
) -> None:
    study = tmp_path / "study.jsonl"
    (tmp_path / "pause").write_text("64")
    searching, serving = of_both(machines, tmp_path / "first")
    assert wait_until((tmp_path / "hangs").exists, within_s=HANGS_S)
    inside = [pid for pid in marked(mark) if _is_in(machines[1], pid)]
    kill(inside)
    assert len(inside) >= 3, "the server, the reaper, and a rank"

    def ended() -> list[dict[str, Any]]:
        finished = [line for line in lines(study) if line["kind"] == "trial_finished"]
        return [line["result"] for line in finished if line["result"]["outcome"] != "FIT"]

    assert wait_until(ended, within_s=HANGS_S)
    (first, *_) = ended()
    assert first["outcome"] == "CRASHED", first["reason"]
    searching.send_signal(signal.SIGINT)
    assert searching.wait(timeout=GONE_S) == 130
    serving.wait(timeout=GONE_S)
    (tmp_path / "pause").unlink()
    again = across(tmp_path / "second", 0, "--retry-crashed")
    searching = machines[0].start(*again)
    serving = machines[1].start(*across(tmp_path / "second", 1, "--retry-crashed"))
    answer, talk = searching.communicate(timeout=ENDS_S)
    assert searching.returncode == 0, talk
    assert "64 tokens" in answer
    assert serving.wait(timeout=GONE_S) == 0


@pytest.mark.usefixtures("tiny")
def test_a_machine_whose_searcher_is_gone_ends_what_it_runs_and_says_so(
    machines: tuple[Machine, Machine], mark: str, tmp_path: Path
) -> None:
    (tmp_path / "pause").write_text("64")
    searching, serving = of_both(machines, tmp_path / "meet")
    assert wait_until((tmp_path / "hangs").exists, within_s=HANGS_S)
    kill(pid for pid in marked(mark) if _is_in(machines[0], pid))
    searching.wait()
    _, talk = serving.communicate(timeout=LOST_S + GONE_S)
    assert serving.returncode == 3, talk
    assert "no machine searches" in talk
    assert wait_until(lambda: marked(mark) == [], within_s=GONE_S)


def training(output: str, *more: str) -> tuple[str, ...]:
    return (
        *("highwater", "train", "tiny", "--data", "data.txt", "--length", "64", "--rows", "4"),
        *("--device", "cpu", "--memory", "1GiB", "--gpus", "2", "--loss", "full"),
        *("--save-every", "1", "--output", output, *more),
    )


def both_train(
    machines: tuple[Machine, Machine], meet: Path, *more: str
) -> "list[subprocess.Popen[str]]":
    (meet.parent / "data.txt").write_text("one machine and another " * 400)
    where = ("--nodes", "2", "--rendezvous", str(meet), *more)
    words = [training("run", *where, "--node-rank", str(node)) for node in (0, 1)]
    return [each.start(*words[node]) for node, each in enumerate(machines)]


def trained_losses(run: Path) -> list[float]:
    last = max((run / "checkpoints").glob("step-*"))
    return json.loads((last / "state.json").read_text())["losses"]


@pytest.mark.usefixtures("tiny")
def test_two_machines_train_a_model_as_one_does_and_whoever_is_told_to_stop_stops_both(
    machines: tuple[Machine, Machine], mark: str, tmp_path: Path
) -> None:
    run, many = tmp_path / "run", ("--steps", "400")
    first, other = both_train(machines, tmp_path / "first", *many)
    assert wait_until((run / "checkpoints" / "step-000002").exists, within_s=HANGS_S), (
        first.communicate(timeout=GONE_S)
    )
    other.send_signal(signal.SIGTERM)
    _, talk = first.communicate(timeout=GONE_S)
    assert (first.returncode, other.wait(timeout=GONE_S)) == (143, 143), talk
    stopped = len(trained_losses(run))
    assert f"step {stopped}" in talk
    assert wait_until(lambda: marked(mark) == [], within_s=GONE_S)

    steps = stopped + 2
    both = both_train(machines, tmp_path / "second", "--steps", str(steps))
    said = [each.communicate(timeout=ENDS_S) for each in both]
    assert [each.returncode for each in both] == [0, 0], said
    assert not (tmp_path / "second").exists()
    assert "2 copies" in said[0][1]
    words = training("alone", "--copies", "2", "--steps", str(steps))
    done = subprocess.run(words, capture_output=True, text=True, timeout=ENDS_S, check=False)
    assert done.returncode == 0, done.stderr
    assert trained_losses(run) == trained_losses(tmp_path / "alone")
    weights = [(tmp_path / each / "model/model.safetensors") for each in ("run", "alone")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.usefixtures("tiny")
def test_a_training_whose_machine_is_lost_ends_and_says_from_which_step_it_goes_on(
    machines: tuple[Machine, Machine], mark: str, tmp_path: Path
) -> None:
    first, other = both_train(machines, tmp_path / "meet", "--steps", "4000")
    kept = tmp_path / "run" / "checkpoints" / "step-000002"
    assert wait_until(kept.exists, within_s=HANGS_S)
    kill(pid for pid in marked(mark) if _is_in(machines[1], pid))
    other.wait()
    _, talk = first.communicate(timeout=LOST_S + GONE_S)
    assert first.returncode == 3, talk
    found = re.search(r"the same command goes on after step (\d+)", talk)
    assert found is not None, talk
    assert len(trained_losses(tmp_path / "run")) == int(found[1]) >= 2
    assert wait_until(lambda: marked(mark) == [], within_s=GONE_S)


SRUN = """#!/bin/bash
# What srun does with such a job: the command on every machine, which is told its number.
for node in 0 1; do SLURM_NODEID=$node "${@:2}" & done
status=0; for job in $(jobs -p); do wait $job || status=$?; done; exit $status
"""


@pytest.mark.usefixtures("tiny", "mark")
def test_the_job_that_is_printed_for_slurm_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*FIND, "--nodes", "2", "--print-sbatch")
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    options = [line for line in printed.splitlines() if line.startswith("#SBATCH ")]
    assert "#SBATCH --nodes=2" in options
    assert "#SBATCH --ntasks-per-node=1" in options
    job, srun = tmp_path / "job.sh", tmp_path / "bin" / "srun"
    job.write_text(printed)
    srun.parent.mkdir()
    srun.write_text(SRUN)
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{srun.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", uuid.uuid4().hex)
    done = subprocess.run(
        ("bash", str(job)), capture_output=True, text=True, timeout=ENDS_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "64 tokens" in done.stdout
    assert list((tmp_path / "logs").glob("nodes-*")) == []


def _is_in(machine: Machine, pid: int) -> bool:
    """Whether a process is on a machine: in its network."""
    try:
        own = Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return False
    return own == Path(f"/run/netns/{machine.name}").stat().st_ino

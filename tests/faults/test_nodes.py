"""Trials across machines: two network namespaces, on each of which ``srun.py`` starts a process."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from processes import ENDS_S, GONE_S, HANGS_S, are_gone, done, lines, marked, started, wait_until
from processes import FIND as SEARCH

from highwater.store.journal import read_study

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("tiny", "mark")]

FIND = (*SEARCH, "--max-length", "64", "--data", "faulty_batches:paused", "--gpus", "2")
ADDRESSES = ("10.77.0.1/24", "10.77.0.2/24")


class Machine(NamedTuple):
    """A network namespace with one end of a wire, and a host's name of its own."""

    name: str
    interface: str


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
        ip("link", "add", first.interface, "type", "veth", "peer", "name", second.interface)
        for machine, address in zip(both, ADDRESSES, strict=True):
            ip("link", "set", machine.interface, "netns", machine.name)
            inside = ("-n", machine.name)
            ip(*inside, "address", "add", address, "dev", machine.interface)
            ip(*inside, "link", "set", machine.interface, "up")
            ip(*inside, "link", "set", "lo", "up")
        yield both
    finally:
        kill(marked(mark))
        are_gone(mark)
        for machine in both:
            subprocess.run(("ip", "netns", "delete", machine.name), check=False)


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def across(folder: Path, *machines: str, kills: bool = True) -> tuple[str, ...]:
    """The words that have a command run on these machines, each a name, or a name and a wire."""
    launcher = (sys.executable, "-P", "-m", "srun", "kills" if kills else "waits", *machines, "--")
    meet = ("--rendezvous", str(folder / "meet" / "ranks"))
    return ("--nodes", str(len(machines)), "--launcher", shlex.join(launcher), *meet)


def wired(machines: tuple[Machine, Machine]) -> tuple[str, ...]:
    return tuple(f"{each.name}:{each.interface}" for each in machines)


def hanging(
    folder: Path, machines: tuple[Machine, Machine], *, kills: bool = True
) -> "subprocess.Popen[str]":
    (folder / "pause").write_text("64")
    search = started(*FIND, *across(folder, *wired(machines), kills=kills))
    assert wait_until((folder / "hangs").exists, within_s=HANGS_S)
    return search


def losses(path: Path) -> dict[int, list[Any]]:
    return {
        each.spec.length_tokens: [(rank.losses, rank.gradient_norms) for rank in each.result.ranks]
        for each in read_study(path).trials
        if each.result is not None
    }


@pytest.mark.parametrize("degrees", ["--copies 1", "--copies 2", "--ulysses 2", "--ring 2"])
def test_two_machines_train_as_one_does_and_find_the_same(machines, mark, tmp_path, degrees):
    named = () if degrees == "--copies 1" else degrees.split()
    search = started(*FIND, *across(tmp_path, *wired(machines)), *named)
    answer, talk = search.communicate(timeout=ENDS_S)
    assert search.returncode == 0, talk
    assert list((tmp_path / "meet").iterdir()) == []
    assert (tmp_path / "meet").stat().st_mode & 0o777 == 0o700
    assert are_gone(mark)
    assert "64 tokens" in answer
    assert ("2 copies" in answer) == (degrees == "--copies 2")
    together = losses(tmp_path / "study.jsonl")
    ended = done(*FIND, *degrees.split(), "--study", "alone.jsonl")
    assert ended.returncode == 0, ended.stderr
    assert together == losses(tmp_path / "alone.jsonl")
    assert len(together) >= 1


@pytest.mark.parametrize("kills", [True, False], ids=["srun kills", "our own watch"])
def test_a_machine_that_dies_says_nothing_and_the_search_goes_on(machines, mark, tmp_path, kills):
    study = tmp_path / "study.jsonl"
    search = hanging(tmp_path, machines, kills=kills)
    inside = [pid for pid in marked(mark) if _is_in(machines[1], pid)]
    assert len(inside) >= 2, "the reaper, and a rank"
    kill(pid for pid in inside if kills or not _runs(pid, "highwater.trials.reaper"))

    def ended() -> list[dict[str, Any]]:
        finished = [line for line in lines(study) if line["kind"] == "trial_finished"]
        return [line["result"] for line in finished if line["result"]["outcome"] != "FIT"]

    assert wait_until(ended, within_s=HANGS_S)
    (first, *_) = ended()
    assert first["outcome"] == "CRASHED", first["reason"]
    search.send_signal(signal.SIGINT)
    assert search.wait(timeout=GONE_S) == 130
    assert are_gone(mark)
    (tmp_path / "pause").unlink()
    again = started(*FIND, *across(tmp_path, *wired(machines)), "--retry-crashed")
    answer, talk = again.communicate(timeout=ENDS_S)
    assert again.returncode == 0, talk
    assert "64 tokens" in answer


def test_a_search_that_is_killed_leaves_nothing_on_any_machine(machines, mark, tmp_path):
    search = hanging(tmp_path, machines)
    search.kill()
    search.communicate()
    assert are_gone(mark)


def test_a_launcher_that_is_killed_takes_its_ranks_with_it(machines, mark, tmp_path):
    search = hanging(tmp_path, machines)
    inside = {pid for pid in marked(mark) if any(_is_in(each, pid) for each in machines)}
    assert len(inside) >= 4, "a reaper and a rank on each"
    kill(pid for pid in marked(mark) if _runs(pid, "srun"))
    # The search goes on with a trial of its own processes: these are gone.
    assert wait_until(lambda: inside.isdisjoint(marked(mark)), within_s=GONE_S)
    search.send_signal(signal.SIGINT)
    assert search.wait(timeout=GONE_S) == 130


def training(output: str, *more: str) -> tuple[str, ...]:
    Path("data.txt").write_text("one machine and another " * 400)
    return (
        *("highwater", "train", "tiny", "--data", "data.txt", "--length", "64", "--rows", "4"),
        *("--device", "cpu", "--memory", "1GiB", "--gpus", "2", "--loss", "full"),
        *("--save-every", "1", "--output", output, *more),
    )


def trained_losses(run: Path) -> list[float]:
    last = max((run / "checkpoints").glob("step-*"))
    return json.loads((last / "state.json").read_text())["losses"]


@pytest.mark.parametrize(("told", "copies"), [("the command", "1"), ("another machine", "2")])
def test_two_machines_train_as_one_and_told_to_stop_both_stop(
    machines, mark, tmp_path, told, copies
):
    named = () if copies == "1" else ("--copies", copies)
    run, where = tmp_path / "run", (*across(tmp_path, *wired(machines)), *named)
    first = started(*training("run", *where, "--steps", "400"))
    assert wait_until((run / "checkpoints" / "step-000002").exists, within_s=HANGS_S), (
        first.communicate(timeout=GONE_S)
    )
    if told == "the command":
        first.send_signal(signal.SIGTERM)
    else:
        (reaper,) = (
            pid
            for pid in marked(mark)
            if _is_in(machines[1], pid) and _runs(pid, "highwater.trials.reaper")
        )
        os.kill(reaper, signal.SIGTERM)
    _, talk = first.communicate(timeout=GONE_S)
    assert first.returncode == 143, talk
    stopped = len(trained_losses(run))
    assert f"step {stopped}" in talk
    assert are_gone(mark)

    steps = str(stopped + 2)
    both = started(*training("run", *where, "--steps", steps))
    _, talk = both.communicate(timeout=ENDS_S)
    assert both.returncode == 0, talk
    assert ("2 copies" in talk) == (copies == "2")
    ended = done(*training("alone", "--copies", copies, "--steps", steps))
    assert ended.returncode == 0, ended.stderr
    assert trained_losses(run) == trained_losses(tmp_path / "alone")
    weights = [(tmp_path / each / "model/model.safetensors") for each in ("run", "alone")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_training_whose_machine_is_lost_says_from_where_it_goes_on(machines, mark, tmp_path):
    first = started(*training("run", *across(tmp_path, *wired(machines)), "--steps", "4000"))
    kept = tmp_path / "run" / "checkpoints" / "step-000002"
    assert wait_until(kept.exists, within_s=HANGS_S)
    kill(pid for pid in marked(mark) if _is_in(machines[1], pid))
    _, talk = first.communicate(timeout=GONE_S)
    assert first.returncode == 3, talk
    found = re.search(r"the same command goes on after step (\d+)", talk)
    assert found is not None, talk
    assert len(trained_losses(tmp_path / "run")) == int(found[1]) >= 2
    assert are_gone(mark)


def test_ranks_meet_at_the_port_that_a_launcher_names_which_is_told_first(tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = training("run", *across(tmp_path, "a", "b")[:-2], "--steps", "1")
    # An outer launcher's port is none of the inner one's.
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    ended = done(*words)
    assert ended.returncode == 3, ended.stderr
    assert "MASTER_ADDR" in ended.stderr
    monkeypatch.setenv("SRUN_SETS", f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port}")
    ended = done(*words)
    assert ended.returncode == 0, ended.stderr
    first, *_ = [line for line in ended.stderr.splitlines() if line.startswith("note:")]
    assert "a port is open" in first
    assert "a port is open" in (tmp_path / "run" / "training.log").read_text()


@pytest.mark.parametrize(
    ("sets", "problem"),
    [
        ("SLURM_NTASKS=4", "2 machines"),
        ("SLURM_PROCID=0", "two processes"),
        ("SLURM_PROCID=x", "which machine"),
        ("GROUP_RANK=0 GROUP_WORLD_SIZE=16", "2 machines"),
    ],
)
def test_a_launcher_that_numbers_otherwise_is_refused_first(tmp_path, monkeypatch, sets, problem):
    monkeypatch.setenv("SRUN_SETS", sets)
    ended = done(*training("run", *across(tmp_path, "a", "b", kills=False), "--steps", "1"))
    assert ended.returncode == 3, ended.stderr
    assert problem in ended.stderr
    assert "--ntasks-per-node 1" in ended.stderr


BIN_SRUN = """#!/bin/sh
while [ ! -x "$1" ]; do shift; done
exec "$PYTHON" -P -m srun kills a b -- "$@"
"""


def test_the_job_that_is_printed_for_slurm_runs_as_it_stands(tmp_path, monkeypatch):
    words = (*FIND, "--nodes", "2", "--print-sbatch")
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    options = [line for line in printed.splitlines() if line.startswith("#SBATCH ")]
    assert "#SBATCH --nodes=2" in options
    assert "#SBATCH --ntasks-per-node=1" in options
    job, srun = tmp_path / "job.sh", tmp_path / "bin" / "srun"
    job.write_text(printed)
    srun.parent.mkdir()
    srun.write_text(BIN_SRUN)
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{srun.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHON", sys.executable)
    ended = done("bash", str(job))
    assert ended.returncode == 0, ended.stderr
    assert "64 tokens" in ended.stdout
    assert list((tmp_path / "logs" / "rendezvous").iterdir()) == []


def _runs(pid: int, word: str) -> bool:
    try:
        return word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def _is_in(machine: Machine, pid: int) -> bool:
    try:
        own = Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return False
    return own == Path(f"/run/netns/{machine.name}").stat().st_ino

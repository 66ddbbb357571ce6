"""Jobs: an order in, a report or a refusal out, failures in words that are never empty, and nothing
left running.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from highwater.errors import HighwaterError, MachineError, UsageError
from highwater.nouns.corpus import Prepared
from highwater.nouns.environment import STORE_VARIABLE
from highwater.nouns.trial import TrialEndedError
from highwater.trials.job import Job, failed, how_ended, last_words

MODULE = """
import atexit, os, signal, subprocess, sys, time
from pathlib import Path

from highwater.errors import MachineError, UsageError
from highwater.nouns.trial import serve, tell_phase
from highwater.nouns.corpus import Prepared


def work(order, folder):
    match order.model_directory:
        case "report":
            return Prepared(model_directory=" ".join([os.environ["GIVEN"], *sys.argv[3:]]))
        case "report, then fail":
            atexit.register(os._exit, 3)
            return Prepared(model_directory="made")
        case "refuse":
            raise UsageError("nobody can", hint="ask for less")
        case "refuse here":
            raise MachineError("nobody can here", hint="go elsewhere")
        case "exit":
            print("one", "two", sep=os.linesep, flush=True)
            print("three", file=sys.stderr)
            sys.exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stay":
            subprocess.Popen(["sleep", "600"], start_new_session=True)
            tell_phase(folder, "staying")
            time.sleep(600)


if __name__ == "__main__":
    serve(Prepared, work)
"""
OF_RANKS = """
import os, sys
from pathlib import Path

if os.environ["RANK"] == "1":
    Path(sys.argv[1]).write_text('{"model_directory":"of %s"}' % os.environ["WORLD_SIZE"])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "at_work.py").write_text(MODULE)
    (tmp_path / "of_ranks.py").write_text(OF_RANKS)
    folder = tmp_path / "folder"
    folder.mkdir()
    return folder


def job(folder: Path, asked: str, **changes: Any) -> Job[Prepared]:
    fields: dict[str, Any] = {
        "module": "at_work",
        "order": Prepared(model_directory=asked),
        "report": Prepared,
        "environment": os.environ | {"PYTHONPATH": str(folder.parent), "GIVEN": "given"},
        "timeout_s": 60.0,
        "failure": "nothing was made",
    }
    return Job(**(fields | changes))


@pytest.mark.parametrize(
    ("asked", "changes", "made"),
    [
        ("report", {}, "given"),
        ("report", {"words": ("a", "b c")}, "given a b c"),
        ("report, then fail", {}, "made"),
        ("", {"module": "of_ranks", "order": None, "ranks": 2}, "of 2"),
    ],
)
def test_a_whole_report_comes_back_as_the_record_that_it_is(asked, changes, made, folder):
    assert job(folder, asked, **changes).run(folder) == Prepared(model_directory=made)


@pytest.mark.parametrize(
    ("asked", "kind", "problem", "hint"),
    [
        ("refuse", UsageError, "nobody can", "ask for less"),
        ("refuse here", MachineError, "nobody can here", "go elsewhere"),
    ],
)
def test_what_a_job_refuses_is_raised_as_it_was_said(asked, kind, problem, hint, folder):
    with pytest.raises(HighwaterError) as refused:
        job(folder, asked, hint="what failures say").run(folder)
    assert (type(refused.value), refused.value.problem, refused.value.hint) == (kind, problem, hint)


@pytest.mark.parametrize(
    ("asked", "changes", "problem"),
    [
        ("exit", {}, "nothing was made: exited with 3: one / two / three"),
        ("kill", {}, "nothing was made: ended by signal 9 (SIGKILL), without a word"),
        ("stay", {"timeout_s": 1.5}, "nothing was made: time was up, without a word"),
        ("stay", {"timeout_s": 1.5, "late": "to wait"}, "to wait took more than 2 s"),
    ],
)
def test_a_job_without_a_report_is_told_by_how_it_ended(asked, changes, problem, folder):
    with pytest.raises(MachineError) as failure:
        job(folder, asked, hint="try again", **changes).run(folder)
    assert (failure.value.problem, failure.value.hint) == (problem, "try again")


def test_a_module_that_is_not_there_is_told_by_its_last_words(folder):
    with pytest.raises(MachineError, match=r"exited with 1: .*nowhere_at_all") as failure:
        job(folder, "report", module="nowhere_at_all").run(folder)
    assert "pip install" in failure.value.hint


def test_nothing_is_left_of_a_job_that_nobody_waits_for_any_more(folder):
    ended, told = threading.Event(), list[str]()

    def end_soon(phase: str) -> None:
        told.append(phase)
        if phase == "staying":
            ended.set()

    with pytest.raises(TrialEndedError):
        job(folder, "stay", first_phase="coming").run(folder, ended=ended, on_phase=end_soon)
    assert told[-1] == "staying"
    assert set(told[:-1]) <= {"coming"}
    assert not psutil.Process().children(recursive=True)


def test_nothing_is_left_of_a_job_that_is_interrupted(folder):
    def interrupt(phase: str) -> None:
        if phase == "staying":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job(folder, "stay").run(folder, on_phase=interrupt)
    assert not psutil.Process().children(recursive=True)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "exited with 0"),
        (3, "exited with 3"),
        (137, "ended by signal 9 (SIGKILL)"),
        (-signal.SIGSEGV, "ended by signal 11 (SIGSEGV)"),
        (255, "exited with 255"),
        (-200, "ended by signal 200"),
    ],
)
def test_an_exit_status_is_told_in_words(status, words):
    assert how_ended(status) == words


@pytest.mark.parametrize("status", [0, 1, 137, None])
@pytest.mark.parametrize("text", ["", "\n \n", "a\nb\nc\nd\n"])
def test_nothing_is_told_as_a_reason_that_is_empty(text, status, tmp_path):
    log = tmp_path / "log"
    log.write_text(text)
    said = last_words(log, status)
    assert said.endswith(": b / c / d" if text.strip() else ", without a word")
    assert said.partition(",")[0].strip()
    error = failed("nothing was made", log, status)
    assert error.problem == f"nothing was made: {said}"
    assert ("pip install" in error.hint) == (status in (0, 1))


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

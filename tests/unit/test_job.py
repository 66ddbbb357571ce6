"""Jobs: an order in, a report or a refusal out, failures in words that are never empty."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from highwater.cli.app import main
from highwater.errors import HighwaterError, MachineError, UsageError
from highwater.nouns.corpus import Prepared
from highwater.nouns.environment import STORE_VARIABLE
from highwater.nouns.request import Request
from highwater.nouns.trial import TrialEndedError
from highwater.trials.job import Job, failed, how_ended, last_words
from highwater.trials.nodes import Across, across_nodes
from tiny_models import TINY

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


def below() -> set[psutil.Process]:
    """Processes below this one; servers that other tests of it started stay."""
    return set(psutil.Process().children(recursive=True))


def test_nothing_is_left_of_a_job_that_nobody_waits_for_any_more(folder):
    before = below()
    ended, told = threading.Event(), list[str]()

    def end_soon(phase: str) -> None:
        told.append(phase)
        if phase == "staying":
            ended.set()

    with pytest.raises(TrialEndedError):
        job(folder, "stay", first_phase="coming").run(folder, ended=ended, on_phase=end_soon)
    assert told[-1] == "staying"
    assert set(told[:-1]) <= {"coming"}
    assert below() <= before


def test_nothing_is_left_of_a_job_that_is_interrupted(folder):
    def interrupt(phase: str) -> None:
        if phase == "staying":
            raise KeyboardInterrupt

    before = below()
    with pytest.raises(KeyboardInterrupt):
        job(folder, "stay").run(folder, on_phase=interrupt)
    assert below() <= before


@pytest.mark.parametrize(
    ("status", "words"),
    [
        *((status, f"exited with {status}") for status in (0, 3, 255)),
        *((137, "ended by signal 9 (SIGKILL)"), (-200, "ended by signal 200")),
        (-signal.SIGSEGV, "ended by signal 11 (SIGSEGV)"),
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


def test_the_first_that_fails_and_a_launcher_that_is_ended_end_the_ranks(tmp_path):
    process = run(tmp_path, FAILS, "--nproc", "2")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 3, said
    assert not Path("/proc", (tmp_path / "0").read_text()).exists()
    (tmp_path / "0").unlink()
    process = run(tmp_path, FAILS.replace('== "1"', '== "none"'), "--nproc", "1")
    while not (tmp_path / "0").exists() or not (tmp_path / "0").read_text():
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


FIND = ("--device", "cpu", "--memory", "1GiB", "--gpus", "2", "--nodes", "2", "--print-sbatch")
RAN = "RAN"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def model(place: Path, name: str) -> str:
    folder = place / "models" / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


def typed_in_the_job(script: str, place: Path) -> list[str]:
    """What ``highwater`` is told where the script runs, which makes no file."""
    starts = 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"'
    for name, program in (("highwater", 'printf "%s\\0" "$@" > "$TOLD"'), ("srun", starts)):
        (place / name).write_text(f"#!/bin/sh\n{program}\n")
        (place / name).chmod(0o755)
    (place / "job.sh").write_text(script)
    told = place / "told"
    variables = {"PATH": f"{place}:{os.environ['PATH']}", "TOLD": str(told)}
    subprocess.run(["bash", "job.sh"], cwd=place, env=variables, check=True, timeout=20)
    assert not list(place.rglob(f"{RAN}.made"))
    return told.read_text().split("\0")[:-1]


MAKES = f"touch {RAN}.made"
HOSTILE = [
    *(f"x\n{MAKES}\n#", f"x\r\n{MAKES}", f"x; {MAKES}", f"$({MAKES})", f"x' && {MAKES} '"),
    *(f"x\n#SBATCH --wrap='{MAKES}'", "a model of ours", "Größe"),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE)
def test_the_name_of_a_model_runs_nothing_and_is_no_other_option(name, place, capsys):
    named = model(place, name)
    (place / "find.yaml").write_text(f"model: {json.dumps(named)}\n")
    assert main(("find", "--config", "find.yaml", *FIND)) == 0, capsys.readouterr().err
    script = capsys.readouterr().out
    options = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    (job,) = (line for line in options if "job-name" in line)
    assert re.fullmatch(r"#SBATCH --job-name=[A-Za-z0-9._-]+", job)
    assert len(options) == len({line.partition("=")[0] for line in options})
    assert not any("wrap" in line.partition("=")[0] for line in options)
    words = typed_in_the_job(script, place)
    assert words[: len(FIND) + 2] == ["find", "--config", "find.yaml", *FIND[:-1]]
    name, launcher, meet, file = words[len(FIND) + 2 :]
    assert (name, meet, file) == ("--launcher", "--rendezvous", "logs/rendezvous/ranks")
    assert shlex.split(launcher)[:2] == ["srun", "--nodes"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\u2028", "\x85"])
@pytest.mark.parametrize("at", ["model", "--study", "--log-dir", "--command"])
def test_a_word_with_a_line_end_is_refused(at, end, place, capsys):
    hostile = f"x{end}touch {RAN}.made"
    words: tuple[str, ...] = (model(place, hostile if at == "model" else "x"),)
    more = FIND
    if at == "--command":
        words += ("--trainer", "command", at, f"a {{length}} '{hostile}'", "--gpus=1")
        more = ("--device", "cpu", "--memory", "1GiB", "--print-sbatch")
    elif at != "model":
        words += (f"{at}={hostile}",)
    assert main(("find", *words, *more)) == 2
    said = capsys.readouterr()
    assert not said.out
    assert "has its command in one line" in said.err


@pytest.mark.timeout(60)
def test_what_a_shell_would_expand_reaches_the_search_as_it_was_typed(place, capsys):
    named = model(place, f"$(touch {RAN}.made) 'a'")
    assert main(("find", named, *FIND)) == 0
    assert shlex.quote(named) in (script := capsys.readouterr().out)
    assert named in typed_in_the_job(script, place)


def of_two(place: Path, rendezvous: Path | None = None, launcher: str | None = "sh -c") -> Request:
    file = None if rendezvous is None else str(rendezvous)
    log_dir = str(place / "logs")
    return Request(model="tiny", nodes=2, launcher=launcher, rendezvous=file, log_dir=log_dir)


def refusal(request: Request) -> UsageError:
    with pytest.raises(UsageError) as refused:
        across_nodes(request)
    return refused.value


def made(request: Request) -> Across:
    machines = across_nodes(request)
    assert machines is not None
    return machines


def test_a_folder_that_is_not_there_is_made_for_this_user_alone(tmp_path: Path) -> None:
    with made(of_two(tmp_path, tmp_path / "new" / "meet" / "ranks")).folder() as first:
        assert first.parent == tmp_path / "new" / "meet"
        assert {path.stat().st_mode & 0o777 for path in (first, first.parent)} == {0o700}
    assert list((tmp_path / "new" / "meet").iterdir()) == []


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o770, 0o701, 0o777])
def test_a_folder_open_to_others_is_refused_and_the_hint_works(tmp_path: Path, mode: int) -> None:
    meet = tmp_path / "meet"
    meet.mkdir()
    meet.chmod(mode)
    error = refusal(of_two(tmp_path, meet / "f"))
    assert "others can read or write" in error.problem
    named = re.search(r"`--rendezvous (.*)`", error.hint)
    with made(of_two(tmp_path, Path(*shlex.split(named[1])))).folder():
        pass


@pytest.mark.parametrize("kind", ["link", "file", "below a file", "another user's"])
def test_what_is_no_folder_of_this_user_s_is_refused(tmp_path: Path, kind: str) -> None:
    meet = tmp_path / "meet"
    if kind == "link":
        (tmp_path / "own").mkdir(mode=0o700)
        meet.symlink_to(tmp_path / "own")
    elif kind == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root gives folders away")
        meet.mkdir(mode=0o700)
        os.chown(meet, 12345, 12345)
    else:
        meet.write_text("mine")
    refusal(of_two(tmp_path, meet / "deeper" / "f" if kind == "below a file" else meet / "f"))


def test_a_folder_that_others_took_meanwhile_is_not_entered(tmp_path: Path) -> None:
    machines = made(of_two(tmp_path, tmp_path / "meet" / "f"))
    (tmp_path / "meet").mkdir()
    (tmp_path / "meet").chmod(0o777)
    with pytest.raises(UsageError, match="others can"), machines.folder():
        pass


@pytest.mark.parametrize("launcher", [None, "", "  ", "'", "no-such-launcher -n 2"])
def test_a_launcher_that_starts_nothing_is_refused(tmp_path: Path, launcher: str | None) -> None:
    assert "--launcher" in refusal(of_two(tmp_path, launcher=launcher)).hint


def test_one_machine_has_no_launcher_and_of_several_it_is_words_without_a_shell(
    tmp_path: Path,
) -> None:
    assert "`--launcher`" in refusal(Request(model="tiny", launcher="sh")).problem
    assert "`--rendezvous`" in refusal(Request(model="tiny", rendezvous="f")).problem
    assert across_nodes(Request(model="tiny")) is None
    machines = made(of_two(tmp_path, launcher="sh '$(touch made)' a;b"))
    assert machines.launcher == ("sh", "$(touch made)", "a;b")
    assert machines.notes, "no file is named: a port is open"
    assert not made(of_two(tmp_path, tmp_path / "own" / "f")).notes


def test_a_launcher_is_told_nothing_of_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "GROUP_RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    left = made(of_two(tmp_path)).environment()
    assert left["SLURM_JOB_ID"] == "7"
    assert not {"SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "GROUP_RANK"} & left.keys()
    assert "MASTER_ADDR" not in left

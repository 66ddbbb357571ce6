"""The job that is printed for Slurm: whatever a model is called, only the search runs in it."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from highwater.cli.app import main
from highwater.errors import UsageError
from highwater.nouns.request import Request
from highwater.trials.nodes import Across, across
from tiny_models import TINY

FIND = ("--device", "cpu", "--memory", "1GiB", "--gpus", "2", "--nodes", "2", "--print-sbatch")
RAN = "RAN"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def model(place: Path, name: str) -> str:
    """A model's directory of this name."""
    folder = place / "models" / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


def typed_in_the_job(script: str, place: Path) -> list[str]:
    """What ``highwater`` is told where the script runs, which makes no file."""
    (place / "highwater").write_text('#!/bin/sh\nprintf "%s\\0" "$@" > "$TOLD"\n')
    (place / "highwater").chmod(0o755)
    (place / "srun").write_text(
        '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n'
    )
    (place / "srun").chmod(0o755)
    (place / "job.sh").write_text(script)
    told = place / "told"
    variables = {"PATH": f"{place}:{os.environ['PATH']}", "TOLD": str(told)}
    subprocess.run(["bash", "job.sh"], cwd=place, env=variables, check=True, timeout=20)
    assert not list(place.rglob(f"{RAN}.made"))
    return told.read_text().split("\0")[:-1]


HOSTILE = [
    f"x\ntouch {RAN}.made\n#",
    f"x\r\ntouch {RAN}.made",
    f"x; touch {RAN}.made",
    f"$(touch {RAN}.made)",
    f"x' && touch {RAN}.made '",
    f"x\n#SBATCH --wrap='touch {RAN}.made'",
    "a model of ours",
    "Größe",
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
    if at == "model":
        words = (model(place, hostile),)
    elif at == "--command":
        words = (
            *(model(place, "x"), "--trainer", "command", at, f"a {{length}} '{hostile}'"),
            "--gpus=1",
        )
    else:
        words = (model(place, "x"), f"{at}={hostile}")
    more = FIND if at != "--command" else ("--device", "cpu", "--memory", "1GiB", "--print-sbatch")
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
        across(request)
    return refused.value


def made(request: Request) -> Across:
    machines = across(request)
    assert machines is not None
    return machines


def test_a_folder_that_is_not_there_is_made_for_this_user_alone(tmp_path: Path) -> None:
    with made(of_two(tmp_path, tmp_path / "new" / "meet" / "ranks")).folder() as first:
        assert first.parent == tmp_path / "new" / "meet"
        assert {path.stat().st_mode & 0o777 for path in (first, first.parent)} == {0o700}
    assert list((tmp_path / "new" / "meet").iterdir()) == []


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o770, 0o701, 0o777])
def test_a_folder_that_others_can_enter_is_refused_and_the_hint_works(
    tmp_path: Path, mode: int
) -> None:
    meet = tmp_path / "meet"
    meet.mkdir()
    meet.chmod(mode)
    error = refusal(of_two(tmp_path, meet / "f"))
    assert "others can read or write" in error.problem
    named = re.search(r"`--rendezvous (.*)`", error.hint)
    assert named is not None
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


def test_one_machine_alone_has_no_launcher_and_meets_nobody() -> None:
    assert "`--launcher`" in refusal(Request(model="tiny", launcher="sh")).problem
    assert "`--rendezvous`" in refusal(Request(model="tiny", rendezvous="f")).problem
    assert across(Request(model="tiny")) is None


def test_a_launcher_is_words_and_no_shell_sees_it(tmp_path: Path) -> None:
    machines = made(of_two(tmp_path, launcher="sh '$(touch made)' a;b"))
    assert machines.launcher == ("sh", "$(touch made)", "a;b")
    assert machines.notes, "no file is named: a port is open"
    assert not made(of_two(tmp_path, tmp_path / "own" / "f")).notes


def test_a_launcher_is_told_nothing_of_who_started_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "GROUP_RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    left = made(of_two(tmp_path)).environment()
    assert left["SLURM_JOB_ID"] == "7"
    assert not {"SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "GROUP_RANK"} & left.keys()
    assert "MASTER_ADDR" not in left

"""Where ranks of several machines would meet, and who would start them: refused before anything
starts, with a hint that works.
"""

import os
import re
import shlex
from pathlib import Path

import pytest

from highwater.errors import UsageError
from highwater.nouns.request import Request
from highwater.trials.nodes import Across, across


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

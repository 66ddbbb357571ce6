"""A private folder is gone with its maker: at once, or when the next one is made; what nobody of
ours made stays.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from highwater.trials.trial_process import private_folder

MAKES = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored
from pathlib import Path
from highwater.trials.trial_process import private_folder
with private_folder(Path(sys.argv[1]), kind=sys.argv[2]) as folder:
    (folder / "big").write_text("mine")
    print(folder, flush=True)
    if sys.argv[3] == "and wait":
        time.sleep(600)
"""


def making(
    parent: Path, how: str = "and go", kind: str = ""
) -> tuple["subprocess.Popen[str]", Path]:
    """A process that makes a folder and says which."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKES, str(parent), kind, how], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_is_its_users_alone_and_gone_when_its_maker_is_done(tmp_path):
    with private_folder(tmp_path) as folder:
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "big").write_text("mine")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
@pytest.mark.parametrize("kind", ["", "checkpoint-"])
def test_what_a_killed_maker_left_is_removed_by_the_next_start(tmp_path, number, kind):
    process, left = making(tmp_path, "and wait", kind)
    process.send_signal(number)
    process.wait(10)
    assert (left / "big").exists()
    making(tmp_path)[0].wait(10)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_somebody_who_still_runs_stays(tmp_path):
    process, folder = making(tmp_path, "and wait")
    making(tmp_path)[0].wait(10)
    assert (folder / "big").read_text() == "mine"
    process.kill()
    process.wait(10)


def test_what_nobody_of_ours_made_stays_whatever_it_is_called(tmp_path):
    target = tmp_path / "target"
    process, left = making(tmp_path, "and wait")
    process.kill()
    process.wait(10)
    left.rename(target)
    (tmp_path / "highwater-link").symlink_to(target)
    (tmp_path / "highwater-file").write_text("a user's")
    (tmp_path / "highwater-study").mkdir()
    (tmp_path / "highwater-study" / "notes").write_text("a user's")
    before = sorted(tmp_path.rglob("*"))
    making(tmp_path)[0].wait(10)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "highwater-study" / "notes").read_text() == "a user's"


def test_a_folder_of_another_user_stays(tmp_path):
    process, left = making(tmp_path, "and wait")
    process.kill()
    process.wait(10)
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(left, 65534, 65534)
    making(tmp_path)[0].wait(10)
    assert (left / "big").exists()

"""Folders and files that are made: their own, whole, and never over another's."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from emitting import goal

from highwater.errors import MachineError, UsageError
from highwater.model.held_bytes import CheckpointBytes, checkpoint_bytes
from highwater.model.model import load_model
from highwater.nouns.settings import Settings
from highwater.store import directory as store
from highwater.trainers import targets
from highwater.trainers.emitted import Emitted
from highwater.trials.trial_process import private_folder
from highwater.units import MIB
from tiny_models import write_model

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


def left_by_a_killed_maker(parent: Path) -> Path:
    process, left = making(parent, "and wait")
    process.kill()
    process.wait(10)
    return left


def test_what_nobody_of_ours_made_stays_whatever_it_is_called(tmp_path):
    target, study = tmp_path / "target", tmp_path / "highwater-study"
    left_by_a_killed_maker(tmp_path).rename(target)
    (tmp_path / "highwater-link").symlink_to(target)
    (tmp_path / "highwater-file").write_text("a user's")
    study.mkdir()
    (study / "notes").write_text("a user's")
    before = sorted(tmp_path.rglob("*"))
    making(tmp_path)[0].wait(10)
    assert sorted(tmp_path.rglob("*")) == before
    assert (study / "notes").read_text() == "a user's"


def test_a_folder_of_another_user_stays(tmp_path):
    left = left_by_a_killed_maker(tmp_path)
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(left, 65534, 65534)
    making(tmp_path)[0].wait(10)
    assert (left / "big").exists()


FILES = {"trl.yaml": "a: 1\n", "launch.sh": "#!/usr/bin/env bash\n"}
PRINTS = """#!/bin/sh
for each in "$@"; do printf "%s\\n" "$each"; done
echo "alloc=$PYTORCH_ALLOC_CONF at=$(pwd)"
"""
PROGRAMS = ("torchrun", "trl", "accelerate", "swift", "python3", "trinity", "ray")


def test_files_are_written_beside_others_a_script_may_be_run_and_what_is_the_same_stays(tmp_path):
    paths = targets.write_folder(tmp_path / "a" / "b", FILES)
    assert [path.read_text() for path in paths] == list(FILES.values())
    assert [os.access(path, os.X_OK) for path in paths] == [False, True]
    (tmp_path / "a" / "b" / "notes.txt").write_text("mine")
    first = [path.stat().st_mtime_ns for path in paths]
    again = targets.write_folder(tmp_path / "a" / "b", FILES)
    assert [path.stat().st_mtime_ns for path in again] == first
    assert (tmp_path / "a" / "b" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("kind", ["text", "folder", "link", "broken link", "binary"])
def test_what_is_the_users_is_kept_and_nothing_else_is_written(kind, tmp_path):
    mine = tmp_path / "launch.sh"
    if kind == "folder":
        mine.mkdir()
    elif kind in ("link", "broken link"):
        elsewhere = tmp_path / "elsewhere"
        elsewhere.write_text("mine\n") if kind == "link" else None
        mine.symlink_to(elsewhere)
    else:
        mine.write_bytes(b"mine\n" if kind == "text" else bytes(range(256)))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match="with another content: nothing was written") as refused:
        targets.write_folder(tmp_path, FILES)
    assert refused.value.hint == f"name a new folder: `-o {tmp_path}-2`"
    assert sorted(tmp_path.iterdir()) == before
    assert kind not in ("text", "link") or mine.read_text() == "mine\n"
    assert targets.write_folder(Path(f"{tmp_path}-2"), FILES)


def test_a_file_in_the_place_of_the_folder_or_no_room_leaves_nothing(tmp_path):
    path = tmp_path / "taken"
    path.write_text("mine")
    with pytest.raises(UsageError, match="is no folder") as refused:
        targets.refuse_no_folder(path)
    assert refused.value.hint == f"name another: `-o {path}-2`"
    with pytest.raises(MachineError, match="cannot be written"):
        targets.write_folder(tmp_path, {"a.yaml": "a", f"{'b' * 300}.yaml": "b"})
    assert list(tmp_path.iterdir()) == [path]


def launched(
    emitted: Emitted, target: str, folder: Path, variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """The script, where every program prints its words and the allocator's variable."""
    row = targets.TARGETS[target]
    script = targets.launch_script(emitted, file=row.file, said=["a\nb"], before=row.before)
    targets.write_folder(folder, {row.file: emitted.text, **emitted.beside, "launch.sh": script})
    programs = folder.parent / "bin"
    programs.mkdir(exist_ok=True)
    for name in PROGRAMS:
        (programs / name).write_text(PRINTS)
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", **variables}
    words, asked = [folder / "launch.sh", "--more", "a b"], {"cwd": "/", "env": environment}
    return subprocess.run(words, **asked, capture_output=True, text=True, check=False)


def made_for(target: str, model: str, **filled: bool) -> Emitted:
    """The configuration of a target, of a model by its name or path."""
    ulysses = {} if target in ("trinity", "verl", "areal") else {"ulysses": [1]}
    return targets.configured(target, *goal(target, "16k", **ulysses), model=model, **filled)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("target", targets.TARGETS)
@pytest.mark.parametrize(
    "name", ["m\ntouch RAN\n#", "m'; touch RAN; '", "$(touch RAN)`touch RAN`", "m\r\ntouch RAN"]
)
def test_the_path_of_a_model_runs_nothing(name, target, tmp_path):
    model = str(write_model(tmp_path / "models" / name))
    variables = {"MODEL_PATH": model, "DATASET": model}
    done = launched(made_for(target, model), target, tmp_path / "it", variables)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("RAN"))


@pytest.mark.parametrize("target", targets.TARGETS)
def test_the_script_starts_the_training_in_its_folder_as_it_is_typed(target, tmp_path):
    emitted = made_for(target, "Qwen3-4B", is_filled_in=True)
    folder = tmp_path / "it's here"
    done = launched(emitted, target, folder, {"MODEL_PATH": "/m", "DATASET": "/d"})
    assert done.returncode == 0, done.stderr
    *words, last = done.stdout.splitlines()
    assert words[-2:] == ["--more", "a b"]
    is_set = emitted.environment.get("PYTORCH_ALLOC_CONF", "")
    assert last == f"alloc={is_set} at={folder}"
    named = any("Qwen/Qwen3-4B" in text for text in (emitted.text, *words))
    assert named or target == "torchtitan"


@pytest.mark.parametrize("target", ["trl", "verl", "areal", "axolotl", "ms-swift"])
def test_a_script_without_its_model_says_what_to_export(target, tmp_path):
    emitted = made_for(target, "Qwen3-4B")
    without = launched(emitted, target, tmp_path / "a", {"DATASET": "/d"})
    assert without.returncode != 0
    assert "export MODEL_PATH=the directory of the model" in without.stderr
    given = launched(emitted, target, tmp_path / "a", {"DATASET": "/d", "MODEL_PATH": "/m m"})
    assert given.returncode == 0, given.stderr
    if target != "areal":  # its file reads the variable itself
        assert any("/m m" in word for word in given.stdout.splitlines())


LIMIT_BYTES = 1000


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file may be longer than the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_half_file_is_left_and_another_is_left_alone(tmp_path, small_disk):
    path = tmp_path / "guide.html"
    path.write_text("mine")
    with pytest.raises(MachineError, match=os.strerror(errno.EEXIST)):
        store.write_new_file(path, b"theirs", flag="-o")
    assert path.read_text() == "mine"
    store.write_new_file(tmp_path / "short.md", b"x" * LIMIT_BYTES, flag="-o")
    with pytest.raises(MachineError, match=os.strerror(errno.EFBIG)) as refused:
        store.write_new_file(tmp_path / "long.md", b"x" * (LIMIT_BYTES + 1), flag="-o")
    assert "`-o`" in refused.value.hint
    assert {path.name for path in tmp_path.iterdir()} == {"guide.html", "short.md"}


def test_checking_a_log_directory_touches_no_file_that_is_there(tmp_path):
    mine = tmp_path / f".highwater-{os.getpid()}"
    mine.write_text("mine")
    store.check_log_directory(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {mine.name: "mine"}


NOTHING = CheckpointBytes(sharded_bytes=0, hf_bytes=0)


def test_a_trial_saves_12_bytes_a_parameter_of_shards_and_2_on_a_gpu_4_on_the_cpu_of_weights():
    shape = load_model("Qwen3-0.6B").shape
    both = Settings(checkpoint="sharded", save_hf="last")
    parameters = shape.parameters
    assert 595e6 < parameters < 597e6
    assert checkpoint_bytes(shape, both, "cuda") == (12 * parameters, 2 * parameters)
    assert checkpoint_bytes(shape, both, "cpu") == (12 * parameters, 4 * parameters)
    assert checkpoint_bytes(shape, Settings(), "cuda") == NOTHING
    always = checkpoint_bytes(shape, Settings(save_hf="always"), "cuda").hf_bytes
    assert always == 2 * parameters, "each overwrites the last"


def needing(**sizes: int) -> CheckpointBytes:
    return NOTHING._replace(**{"sharded_bytes": MIB, "hf_bytes": MIB} | sizes)


def test_a_directory_with_room_is_made_and_left_empty(tmp_path):
    store.check_checkpoint_directory(tmp_path / "a" / "b", needing())
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize(
    ("huge", "flags"),
    [
        (["sharded_bytes"], "--checkpoint none"),
        (["hf_bytes"], "--save-hf never"),
        (["sharded_bytes", "hf_bytes"], "--checkpoint none --save-hf never"),
    ],
)
def test_a_disk_without_room_is_refused_with_the_flags_that_are_enough(tmp_path, huge, flags):
    twice_the_disk = 2 * shutil.disk_usage(tmp_path).total
    with pytest.raises(MachineError, match="of shards and ") as refused:
        store.check_checkpoint_directory(tmp_path, needing(**dict.fromkeys(huge, twice_the_disk)))
    ways = refused.value.hint.split("`")[1::2]
    ways = [way for way in ways if not way.startswith("--checkpoint-dir ")]
    assert ways == [f"df -h {tmp_path}", flags]
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_refused_and_the_hint_works(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="Not a directory") as refused:
        store.check_checkpoint_directory(tmp_path / "file" / "checkpoints", needing())
    offered = tmp_path / "highwater-checkpoints"
    assert refused.value.hint == f"use `--checkpoint-dir {offered}`"
    store.check_checkpoint_directory(offered, needing())

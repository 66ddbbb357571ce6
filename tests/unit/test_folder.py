"""A folder to take away: what its script does, and that nothing of the user's is written over."""

import os
import subprocess
from pathlib import Path

import pytest
from test_emitted_others import goal

from highwater.errors import MachineError, UsageError
from highwater.trainers.emitted import Emitted
from highwater.trainers.folder import launch_script, refuse_no_folder, write_folder
from highwater.trainers.targets import TARGETS, configured
from tiny_models import write_model

FILES = {"trl.yaml": "a: 1\n", "launch.sh": "#!/usr/bin/env bash\n"}
PROGRAMS = ("torchrun", "trl", "accelerate", "swift", "python3", "trinity", "ray")


def test_files_are_written_into_a_new_folder_and_a_script_may_be_run(tmp_path):
    paths = write_folder(tmp_path / "a" / "b", FILES)
    assert [path.read_text() for path in paths] == list(FILES.values())
    assert [os.access(path, os.X_OK) for path in paths] == [False, True]


def test_what_is_there_with_the_same_content_stays(tmp_path):
    first = [path.stat().st_mtime_ns for path in write_folder(tmp_path, FILES)]
    assert [path.stat().st_mtime_ns for path in write_folder(tmp_path, FILES)] == first


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
        write_folder(tmp_path, FILES)
    assert refused.value.hint == f"name a new folder: `-o {tmp_path}-2`"
    assert sorted(tmp_path.iterdir()) == before
    assert kind not in ("text", "link") or mine.read_text() == "mine\n"
    assert write_folder(Path(f"{tmp_path}-2"), FILES)


def test_other_files_of_a_folder_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    write_folder(tmp_path, FILES)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    path = tmp_path / "taken"
    path.write_text("mine")
    with pytest.raises(UsageError, match="is no folder") as refused:
        refuse_no_folder(path)
    assert refused.value.hint == f"name another: `-o {path}-2`"


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(MachineError, match="cannot be written"):
        write_folder(tmp_path, {"a.yaml": "a", f"{'b' * 300}.yaml": "b"})
    assert list(tmp_path.iterdir()) == []


def launched(
    emitted: Emitted, target: str, folder: Path, variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """The script, where every program prints its words and the allocator's variable."""
    row = TARGETS[target]
    script = launch_script(emitted, file=row.file, said=["a\nb"], before=row.before)
    write_folder(folder, {row.file: emitted.text, **emitted.beside, "launch.sh": script})
    programs = folder.parent / "bin"
    programs.mkdir(exist_ok=True)
    for name in PROGRAMS:
        program = programs / name
        program.write_text(
            '#!/bin/sh\nfor each in "$@"; do printf "%s\\n" "$each"; done\n'
            'echo "alloc=$PYTORCH_ALLOC_CONF at=$(pwd)"\n'
        )
        program.chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", **variables}
    return subprocess.run(
        [folder / "launch.sh", "--more", "a b"],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.timeout(60)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "name", ["m\ntouch RAN\n#", "m'; touch RAN; '", "$(touch RAN)`touch RAN`", "m\r\ntouch RAN"]
)
def test_the_path_of_a_model_runs_nothing(name, target, tmp_path):
    model = str(write_model(tmp_path / "models" / name))
    ulysses = {} if target in ("trinity", "verl", "areal") else {"ulysses": [1]}
    found, chosen = goal(target, "16k", **ulysses)
    emitted = configured(target, found, chosen, model=model)
    done = launched(emitted, target, tmp_path / "it", {"MODEL_PATH": model, "DATASET": model})
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("RAN"))


@pytest.mark.parametrize("target", TARGETS)
def test_the_script_starts_the_training_in_its_folder_with_the_words_that_are_typed(
    target, tmp_path
):
    ulysses = {} if target in ("trinity", "verl", "areal") else {"ulysses": [1]}
    found, chosen = goal(target, "16k", **ulysses)
    emitted = configured(target, found, chosen, model="Qwen3-4B", is_filled_in=True)
    folder = tmp_path / "it's here"
    variables = {"MODEL_PATH": "/m", "DATASET": "/d"}
    done = launched(emitted, target, folder, variables)
    assert done.returncode == 0, done.stderr
    *words, last = done.stdout.splitlines()
    assert words[-2:] == ["--more", "a b"]
    assert last.endswith(f" at={folder}")
    is_set = emitted.environment.get("PYTORCH_ALLOC_CONF", "")
    assert last.startswith(f"alloc={is_set} ")
    named = any("Qwen/Qwen3-4B" in text for text in (emitted.text, *words))
    assert named or target in ("torchtitan",)


@pytest.mark.parametrize("target", ["trl", "verl", "areal", "axolotl", "ms-swift"])
def test_a_script_without_its_model_says_what_to_export(target, tmp_path):
    ulysses = {} if target in ("verl", "areal") else {"ulysses": [1]}
    emitted = configured(target, *goal(target, "16k", **ulysses), model="Qwen3-4B")
    without = launched(emitted, target, tmp_path / "a", {"DATASET": "/d"})
    assert without.returncode != 0
    assert "export MODEL_PATH=the directory of the model" in without.stderr
    given = launched(emitted, target, tmp_path / "a", {"DATASET": "/d", "MODEL_PATH": "/m m"})
    assert given.returncode == 0, given.stderr
    if target not in ("areal",):  # its file reads the variable itself
        assert any("/m m" in word for word in given.stdout.splitlines())

"""A damaged checkpoint is refused by the name of its file, with one that works in the hint."""

import json
import os
import pickle
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from highwater.engine.data.store import FileRecord, check_files, read_manifest, write_manifest
from highwater.engine.training import shard_reader
from highwater.engine.training.checkpoint import load_sharded, save_sharded
from highwater.engine.training.export import _dtype_of
from highwater.engine.training.run_checkpoints import RunCheckpoints, read_state
from highwater.engine.training.step import Training
from highwater.engine.training.training_run import keep_lines_up_to
from highwater.errors import UsageError
from highwater.nouns.codec import to_json
from run_folders import (
    EVALUATIONS,
    Harmful,
    approve,
    are_equal,
    copied,
    numbers_of,
    state,
    step_of,
    trained_and_saved,
    training,
)

BEST, LATEST = "step-000002", "step-000003"
FILES = ("model/__0_0.distcp", "model/.metadata", "model/index.json", "state.json", "manifest.json")


@pytest.fixture(scope="module")
def run(
    alone: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[int, list["torch.Tensor"]]]:
    folder = tmp_path_factory.mktemp("run")
    return folder, dict(trained_and_saved(folder))


@pytest.fixture(scope="module")
def own(alone: None, tmp_path_factory: pytest.TempPathFactory) -> Training:
    return training(tmp_path_factory.mktemp("own") / "model")


def names(checkpoints: Path) -> set[str]:
    return {path.name for path in checkpoints.iterdir()}


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def without_last_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00" * path.stat().st_size)


def test_the_latest_and_the_best_are_kept_and_the_best_is_named(run, own):
    folder, saved = run
    assert names(folder / "checkpoints") == {BEST, LATEST, "best.json"}
    best = json.loads((folder / "checkpoints" / "best.json").read_text())
    assert best == {"checkpoint": BEST, "step": 2, "loss": 1.0}
    assert RunCheckpoints(folder).resume(own) == state(3)
    assert are_equal(numbers_of(own), saved[3])
    assert {group["lr"] for group in own.optimizer.param_groups} == {0.01}


@pytest.mark.parametrize("damage", [half, without_last_byte, flipped, garbage, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_with_one_that_works(run, own, tmp_path, name, damage):
    checkpoints = copied(run[0], tmp_path / "run")
    damage(checkpoints / LATEST / name)
    of_run = RunCheckpoints(tmp_path / "run")
    with pytest.raises(UsageError) as refused:
        of_run.resume(own)
    assert refused.value.problem.startswith(f"{checkpoints / LATEST / name} is damaged: ")
    found = re.search(r"`--resume-from (\S+)`", refused.value.hint)
    assert of_run.resume(own, checkpoint=found[1]) == state(2)
    assert are_equal(numbers_of(own), run[1][2])
    assert names(checkpoints) == {BEST, f"{LATEST}.set-aside", "best.json"}
    assert of_run.resume(own) == state(2), "the one that was set aside is out of the way"
    step_of(own, 3)
    of_run.save(own, state(3))
    assert names(checkpoints) == {BEST, LATEST, f"{LATEST}.set-aside", "best.json"}


def test_where_no_checkpoint_is_whole_the_hint_begins_anew(run, own, tmp_path):
    checkpoints = copied(run[0], tmp_path / "run")
    for name in (BEST, LATEST):
        flipped(checkpoints / name / "model" / "index.json")
    of_run = RunCheckpoints(tmp_path / "run")
    with pytest.raises(UsageError, match=f"{LATEST}/model/index.json is damaged") as refused:
        of_run.resume(own)
    _, here, there = shlex.split(refused.value.hint.split("`")[1])
    Path(here).rename(there)
    assert of_run.resume(own) is None
    of_run.save(own, state(3))
    assert of_run.resume(own) == state(3)


def test_a_file_of_metadata_that_runs_code_runs_none(run, own, tmp_path):
    checkpoints = copied(run[0], tmp_path / "run")
    metadata = checkpoints / LATEST / "model" / ".metadata"
    metadata.write_bytes(pickle.dumps(Harmful(tmp_path / "harm")))
    approve(checkpoints / LATEST)
    assert RunCheckpoints(tmp_path / "run").resume(own) == state(3)
    assert not (tmp_path / "harm").exists()


def test_a_shard_that_runs_code_is_refused_and_runs_none(run, own, tmp_path):
    checkpoints = copied(run[0], tmp_path / "run")
    folder = checkpoints / LATEST / "model"
    torch.save(Harmful(tmp_path / "harm"), folder / "__0_0.distcp")
    index = json.loads((folder / "index.json").read_text())
    for tensor in index["tensors"].values():
        for piece in tensor["pieces"]:
            size = (folder / "__0_0.distcp").stat().st_size
            piece |= {"start_bytes": 0, "length_bytes": size}
    (folder / "index.json").write_text(json.dumps(index))
    approve(checkpoints / LATEST)
    with pytest.raises(UsageError, match=r"__0_0\.distcp cannot be read"):
        RunCheckpoints(tmp_path / "run").resume(own)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("outside", ["../../secret", "/etc/passwd", ".."])
def test_an_index_that_names_a_file_elsewhere_is_refused(run, own, tmp_path, outside):
    checkpoints = copied(run[0], tmp_path / "run")
    index = checkpoints / LATEST / "model" / "index.json"
    index.write_text(index.read_text().replace("__0_0.distcp", outside))
    approve(checkpoints / LATEST)
    with pytest.raises(UsageError, match=r"index\.json cannot be read: it names"):
        RunCheckpoints(tmp_path / "run").resume(own)


def test_a_state_that_is_none_is_refused_whatever_its_checksum(run, own, tmp_path):
    checkpoints = copied(run[0], tmp_path / "run")
    path = checkpoints / LATEST / "state.json"
    for text in ("{}", "[]", '{"step": 3', path.read_text().replace('"step":3', '"step":4')):
        path.write_text(text)
        approve(checkpoints / LATEST)
        with pytest.raises(UsageError, match=re.escape(f"{path} is damaged")):
            RunCheckpoints(tmp_path / "run").resume(own)


def test_shards_without_a_manifest_are_refused_where_they_are_cut_short(own, tmp_path):
    how: Any = (own.policy, own.optimizer, tmp_path / "shards")
    save_sharded(*how, mesh=own.mesh)
    half(tmp_path / "shards" / "__0_0.distcp")
    with pytest.raises(UsageError, match=r"__0_0\.distcp cannot be read"):
        load_sharded(*how, mesh=own.mesh)


@pytest.mark.parametrize("lacking", ["model", "optimizer"])
def test_another_models_checkpoint_is_refused(run, own, tmp_path, lacking):
    checkpoints = copied(run[0], tmp_path / "run")
    index = checkpoints / LATEST / "model" / "index.json"
    content = json.loads(index.read_text())
    name = next(name for name in content["tensors"] if name.startswith(f"{lacking}."))
    del content["tensors"][name]
    index.write_text(json.dumps(content))
    approve(checkpoints / LATEST)
    with pytest.raises(UsageError, match="was saved of another model"):
        RunCheckpoints(tmp_path / "run").resume(own)


def test_what_a_killed_save_left_is_removed_and_a_users_files_never_are(run, own, tmp_path):
    checkpoints = copied(run[0], tmp_path / "run")
    of_run = RunCheckpoints(tmp_path / "run")
    for name in ("step-000004.partial", "step-000007.partial"):
        (checkpoints / name / "model").mkdir(parents=True)
        (checkpoints / name / "model" / "__0_0.distcp").write_bytes(b"half")
    mine = (
        checkpoints / "step-000007.partial" / "notes.txt",
        checkpoints / BEST / "notes.txt",
        checkpoints / "step-1" / "notes.txt",
        checkpoints / "notes.txt",
    )
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    of_run.resume(own)
    assert not (checkpoints / "step-000004.partial").exists()
    of_run.save(own, state(4, evaluation_loss=0.5))
    assert names(checkpoints) >= {"step-000004", BEST}, "one has a user's file in it"
    assert LATEST not in names(checkpoints)
    assert all(path.read_text() == "mine" for path in mine)
    with pytest.raises(UsageError, match=r"step-000007\.partial is in the way") as refused:
        of_run.save(own, state(7))
    _, here, there = shlex.split(refused.value.hint.strip("`"))
    Path(here).rename(there)
    of_run.save(own, state(7))
    assert of_run.latest() == checkpoints / "step-000007"


class _Killed(BaseException):
    """Stands for a signal: nothing handles it."""


@pytest.mark.parametrize("renamed", ["index.json", "state.json", "manifest.json"])
def test_a_save_killed_before_its_name_is_removed(run, own, tmp_path, monkeypatch, renamed):
    checkpoints = copied(run[0], tmp_path / "run")
    of_run = RunCheckpoints(tmp_path / "run")
    of_run.resume(own)

    def kill(path: Path, target: Path) -> Path:
        if target.name == renamed:
            raise _Killed
        return replace(path, target)

    replace = Path.replace
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", kill)
        with pytest.raises(_Killed):
            of_run.save(own, state(4))
    left = {path.name for path in (checkpoints / "step-000004.partial").rglob("*")}
    assert f"{renamed}.partial" in left
    assert of_run.save(own, state(4)) == checkpoints / "step-000004"
    assert not any(checkpoints.glob("*.partial"))


def test_losses_over_other_evaluation_data_do_not_compare(run, own, tmp_path):
    copied(run[0], tmp_path / "run")
    of_run = RunCheckpoints(tmp_path / "run")
    of_run.resume(own)
    of_run.save(own, state(4, evaluation_loss=9.0, evaluation_digest="other"))
    best = of_run.best()
    assert (best.step, best.loss) == (4, 9.0)
    assert names(of_run.folder) == {"step-000004", "best.json"}


def test_a_step_is_saved_once_and_never_over_another_runs(run, own, tmp_path):
    checkpoints = copied(run[0], tmp_path / "run")
    of_run = RunCheckpoints(tmp_path / "run")
    of_run.resume(own)
    before = (checkpoints / LATEST / "manifest.json").stat().st_mtime_ns
    assert of_run.save(own, state(3)) == checkpoints / LATEST
    assert (checkpoints / LATEST / "manifest.json").stat().st_mtime_ns == before
    for other in (state(3, run_digest="another"), state(1)):
        with pytest.raises(UsageError, match=f"{LATEST} is not of this run"):
            of_run.save(own, other)
    assert names(checkpoints) == {BEST, LATEST, "best.json"}
    with pytest.raises(UsageError, match="no checkpoint 'step-000001'") as refused:
        of_run.resume(own, checkpoint="step-000001")
    assert of_run.resume(own, checkpoint=refused.value.hint.split()[2].strip("`")) == state(3)


def test_checkpoints_that_were_never_evaluated_leave_the_latest_alone(own, tmp_path):
    of_run = RunCheckpoints(tmp_path)
    assert (of_run.latest(), of_run.best(), of_run.resume(own)) == (None, None, None)
    for step in EVALUATIONS:
        of_run.save(own, state(step, evaluation_loss=None))
        assert names(of_run.folder) == {f"step-{step:06}"}
    assert of_run.best() is None


def listed(folder: Path) -> None:
    write_manifest(folder, {"shard": FileRecord(size_bytes=0, sha256="0" * 64)})
    check_files(folder, read_manifest(folder), ["shard"])


def shards(folder: Path) -> None:
    import torch

    piece = shard_reader.IndexedPiece(
        file="shard", start_bytes=0, length_bytes=9, offsets=(0,), sizes=(1,)
    )
    tensor = shard_reader.IndexedTensor(dtype="float32", shape=(1,), pieces=(piece,))
    (folder / "index.json").write_text(to_json(shard_reader.ShardIndex(tensors={"a": tensor})))
    with shard_reader.ShardReader(folder) as reader:
        reader.fill("a", torch.zeros(1), shard_reader.FlatRange(0, 1))


READ: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a manifest": ("manifest.json", read_manifest),
    "a file that a manifest lists": ("shard", listed),
    "an index": ("index.json", shard_reader.read_index),
    "a file of shards": ("shard", shards),
    "a state": ("state.json", read_state),
    "what names the best": ("checkpoints/best.json", lambda folder: RunCheckpoints(folder).best()),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("target", ["pipe", "/dev/zero"])
@pytest.mark.parametrize("what", READ)
def test_what_is_no_file_is_named_as_damage(what, target, tmp_path):
    name, read = READ[what]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target)
    os.mkfifo(path.with_name("pipe"))
    with pytest.raises(UsageError, match=path.name):
        read(tmp_path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("statistics.jsonl", lambda path: keep_lines_up_to(path, step=1)),
        ("config.json", lambda path: _dtype_of(path.parent)),
    ],
)
def test_what_is_no_file_beside_a_run_is_no_reason_to_wait(name, read, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match="it is no regular file"):
        read(tmp_path / name)

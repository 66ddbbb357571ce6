"""A file of a checkpoint or of a model that is a pipe or a device is named, never waited for."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from highwater.engine.data.store import FileRecord, check_files, read_manifest, write_manifest
from highwater.engine.training.export import _dtype_of
from highwater.engine.training.run_checkpoints import RunCheckpoints, read_state
from highwater.engine.training.shard_reader import (
    FlatRange,
    IndexedPiece,
    IndexedTensor,
    ShardIndex,
    ShardReader,
    read_index,
)
from highwater.engine.training.training_run import keep_lines_up_to
from highwater.errors import UsageError
from highwater.nouns.codec import to_json

pytestmark = pytest.mark.timeout(60)


def listed(folder: Path) -> None:
    record = FileRecord(size_bytes=0, sha256="0" * 64)
    write_manifest(folder, {"shard": record})
    check_files(folder, read_manifest(folder), ["shard"])


def shards(folder: Path) -> None:
    import torch

    piece = IndexedPiece(file="shard", start_bytes=0, length_bytes=9, offsets=(0,), sizes=(1,))
    tensor = IndexedTensor(dtype="float32", shape=(1,), pieces=(piece,))
    (folder / "index.json").write_text(to_json(ShardIndex(tensors={"a": tensor})))
    with ShardReader(folder) as reader:
        reader.fill("a", torch.zeros(1), FlatRange(0, 1))


READ: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a manifest": ("manifest.json", read_manifest),
    "a file that a manifest lists": ("shard", listed),
    "an index": ("index.json", read_index),
    "a file of shards": ("shard", shards),
    "a state": ("state.json", read_state),
    "what names the best": ("checkpoints/best.json", lambda folder: RunCheckpoints(folder).best()),
}


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

"""Room for what a trial saves: its bytes by the model's shape, compared with the free disk before
anything starts.
"""

import shutil

import pytest

from highwater.errors import MachineError, UsageError
from highwater.model.footprint import CheckpointBytes, checkpoint_bytes
from highwater.model.model import load_model
from highwater.nouns.settings import Settings
from highwater.store.directory import check_checkpoint_directory
from highwater.units import MIB

NOTHING = CheckpointBytes(sharded_bytes=0, hf_bytes=0)


def test_a_trial_saves_12_bytes_a_parameter_of_shards_and_2_on_a_gpu_4_on_the_cpu_of_weights():
    shape = load_model("Qwen3-0.6B").shape
    both = Settings(checkpoint="sharded", save_hf="last")
    parameters = shape.parameters
    assert 595e6 < parameters < 597e6
    assert checkpoint_bytes(shape, both, "cuda") == (12 * parameters, 2 * parameters)
    assert checkpoint_bytes(shape, both, "cpu") == (12 * parameters, 4 * parameters)
    assert checkpoint_bytes(shape, Settings(), "cuda") == NOTHING
    assert checkpoint_bytes(shape, Settings(save_hf="always"), "cuda").hf_bytes == 2 * parameters, (
        "each overwrites the last"
    )


def test_a_directory_with_room_is_made_and_left_empty(tmp_path):
    check_checkpoint_directory(
        tmp_path / "a" / "b", CheckpointBytes(sharded_bytes=MIB, hf_bytes=MIB)
    )
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize(
    ("huge", "flags"),
    [
        (("sharded_bytes",), ["--checkpoint none"]),
        (("hf_bytes",), ["--save-hf never"]),
        (("sharded_bytes", "hf_bytes"), ["--checkpoint none --save-hf never"]),
    ],
)
def test_a_disk_without_room_is_refused_with_the_flags_that_are_enough(tmp_path, huge, flags):
    needed = NOTHING._replace(sharded_bytes=MIB, hf_bytes=MIB)._replace(
        **dict.fromkeys(huge, 2 * shutil.disk_usage(tmp_path).total)
    )
    with pytest.raises(MachineError) as refused:
        check_checkpoint_directory(tmp_path, needed)
    assert "of shards and " in refused.value.problem
    ways = [
        way
        for way in refused.value.hint.split("`")[1::2]
        if not way.startswith("--checkpoint-dir ")
    ]
    assert ways == [f"df -h {tmp_path}", *flags]
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_refused_and_the_hint_works(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="Not a directory") as refused:
        check_checkpoint_directory(
            tmp_path / "file" / "checkpoints", CheckpointBytes(sharded_bytes=MIB, hf_bytes=0)
        )
    assert refused.value.hint == f"use `--checkpoint-dir {tmp_path / 'highwater-checkpoints'}`"
    check_checkpoint_directory(
        tmp_path / "highwater-checkpoints", CheckpointBytes(sharded_bytes=MIB, hf_bytes=0)
    )

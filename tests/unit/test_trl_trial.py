"""Before a trial of TRL: the user's configuration as it is read, and the Python of TRL."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from highwater.errors import HighwaterError, MachineError, UsageError
from highwater.model.model import load_model
from highwater.nouns.foreign_request import config_digest
from highwater.nouns.foreign_trainer import ForeignTrainer
from highwater.nouns.trial import TrialSpec
from highwater.trainers.trl.trial import own_files
from highwater.trials.foreign_trial import check_foreign, python_of, versions_there
from highwater.trials.trial_process import cache_directory
from trial_specs import trial_of


def trainer(path: Path | None = None, *command: str) -> ForeignTrainer:
    return ForeignTrainer(
        trainer="trl",
        command=command,
        base_config_path=None if path is None else str(path),
        base_config_digest=None if path is None else config_digest(path),
    )


def trial(name: str, **settings: Any) -> TrialSpec:
    return trial_of(name, loss="chunked", **settings)


def test_without_a_configuration_there_is_nothing_to_keep():
    assert not own_files(trainer()).config


def test_accelerates_file_is_read_beside_the_configuration(tmp_path):
    own = tmp_path / "base.yaml"
    own.write_text("learning_rate: 1.0e-4\naccelerate_config: launch.yaml\n")
    (tmp_path / "launch.yaml").write_text("distributed_type: DEEPSPEED\n")
    base = own_files(trainer(own))
    assert base.config["learning_rate"] == 1e-4
    assert base.launcher == {"distributed_type": "DEEPSPEED"}
    assert base.source == "base.yaml"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1\n", "is no YAML"),
        ("- a\n- b\n", "no named fields"),
        ("accelerate_config: fsdp2\n", "no file beside it"),
    ],
)
def test_what_is_no_configuration_is_refused(text, said, tmp_path):
    own = tmp_path / "base.yaml"
    own.write_text(text)
    with pytest.raises(UsageError, match=said):
        own_files(trainer(own))


def test_a_configuration_that_changed_is_refused(tmp_path):
    own = tmp_path / "base.yaml"
    own.write_text("bf16: true\n")
    asked = trainer(own)
    own.write_text("bf16: false\n")
    with pytest.raises(UsageError, match="has changed"):
        own_files(asked)


def test_the_python_of_a_program_is_that_of_its_first_line(tmp_path):
    program = tmp_path / "trl"
    program.write_text(f"#!{sys.executable}\nprint(1)\n")
    program.chmod(0o755)
    assert python_of(str(program)) == Path(sys.executable)
    program.write_text("#!/bin/sh\nexec trl\n")
    assert python_of(str(program)) is None
    assert python_of(str(tmp_path / "nowhere")) is None


def test_versions_are_those_of_the_other_python(tmp_path):
    found = versions_there(Path(sys.executable), ("msgspec", "no-such-package"))
    assert list(found) == ["msgspec"]
    assert versions_there(tmp_path / "nowhere", ("msgspec",)) == {}


def checked(spec: TrialSpec, program: str) -> tuple[str, ...]:
    return check_foreign([msgspec.structs.replace(spec, foreign=trainer(None, program))])


def test_what_a_reader_should_know_is_said_before_the_first_trial(tmp_path):
    program = tmp_path / "trl"
    program.write_text(f"#!{sys.executable}\n")
    program.chmod(0o755)
    spec = trial("Qwen3-0.6B", objective="grpo")
    said = "\n".join(checked(spec, str(program)))
    for each in ("weights", "tokenizer", "sdpa", "8 micro-batches", "generated one by one"):
        assert each in said
    with pytest.raises(HighwaterError, match="not found"):
        check_foreign(
            [msgspec.structs.replace(spec, foreign=trainer(None, str(tmp_path / "nowhere")))]
        )


def test_a_disk_without_room_for_random_weights_is_said(tmp_path, monkeypatch):
    program = tmp_path / "trl"
    program.write_text(f"#!{sys.executable}\n")
    program.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = json.loads(Path(load_model("Qwen3-4B").directory, "config.json").read_text())
    huge = tmp_path / "huge"
    huge.mkdir()
    (huge / "config.json").write_text(json.dumps(config | {"intermediate_size": 10**7}))
    spec = trial(str(huge))
    with pytest.raises(MachineError, match="has no weights here"):
        checked(spec, str(program))


def test_prepared_models_are_in_the_users_cache():
    assert cache_directory("models", {"XDG_CACHE_HOME": "/here"}) == Path("/here/highwater/models")

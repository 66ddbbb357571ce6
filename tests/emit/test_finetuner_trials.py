"""Trials of LLaMA-Factory, Axolotl and ms-swift, by their own entry points on the CPU."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from environments import program_of

import highwater
from highwater.nouns.trial import Outcome, TrialResult
from highwater.trainers.logs import logged_steps
from tiny_models import OF_OTHERS, write_model

pytestmark = [pytest.mark.emit, pytest.mark.timeout(1200)]

MEMORY = "4GiB"
"""More than any of them imports, and less than two copies of the logits of 8192 tokens beside."""
PROGRAMS = {"llamafactory": "llamafactory-cli", "axolotl": "axolotl", "ms-swift": "swift"}
CONSTANT = {"llamafactory": "lr_scheduler_type", "axolotl": "lr_scheduler"}
OWN: Mapping[str, Mapping[str, Any]] = {
    "llamafactory": {"finetuning_type": "full", "cutoff_len": 64, "dataset": "mine"},
    "axolotl": {"sequence_len": 64, "datasets": [{"path": "org/nowhere", "type": "alpaca"}]},
    "ms-swift": {
        "tuner_type": "full",
        "max_length": 64,
        "dataset": ["org/nowhere"],
        "model_type": "qwen3",
        "template": "qwen3",
    },
}
"""The user's file of each trainer; ms-swift has to be told what the directory is."""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model that is a config alone; what is prepared of it goes with the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # LLaMA-Factory imports it for sounds, of which there are none; its wheel on PyPI wants CUDA.
    (tmp_path / "modules" / "torchaudio").mkdir(parents=True)
    (tmp_path / "modules" / "torchaudio" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.chdir(tmp_path)
    return write_model(tmp_path / "small", OF_OTHERS, vocab_size=65_536)


def tried(name: str, model: Path, length: int) -> TrialResult:
    base = {"learning_rate": 3e-4, CONSTANT.get(name, "lr_scheduler_type"): "constant"}
    (model.parent / "base.yaml").write_text(json.dumps({**base, **OWN[name]}))  # YAML, too
    return highwater.run_trial(
        str(model),
        length,
        trainer=name,
        command=str(program_of(name, PROGRAMS[name])),
        trainer_config="base.yaml",
        device="cpu",
        memory=MEMORY,
        micro_batches=2,
        steps=2,
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_trial_trains_on_exactly_the_length_and_keeps_the_users_fields(name, model):
    result = tried(name, model, 512)
    assert result.outcome is Outcome.FIT, result.reason
    assert result.log_path is not None
    steps = list(logged_steps(Path(result.log_path).read_text()))
    assert [step["num_input_tokens_seen"] for step in steps] == [1024, 2048]
    assert [float(str(step["learning_rate"])) for step in steps] == [3e-4, 3e-4]
    assert result.ranks[0].memory.peak_data_segment_bytes


@pytest.mark.parametrize("name", PROGRAMS)
def test_want_of_memory_is_told_from_every_other_end(name, model):
    result = tried(name, model, 8192)
    assert result.outcome is Outcome.OUT_OF_MEMORY, result.reason
    assert "allocate" in result.reason

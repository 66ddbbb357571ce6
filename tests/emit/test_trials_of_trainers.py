"""Trials of TRL, LLaMA-Factory, Axolotl and ms-swift, by their own entry points on the CPU."""

import json
from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from environments import program_of

import highwater
from highwater.api.search import prepare_trial
from highwater.errors import HighwaterError
from highwater.model.model import load_model
from highwater.nouns.request import request_from
from highwater.nouns.trial import Launch, Outcome, TrialEndedError, TrialResult
from highwater.trainers.logs import logged_steps
from highwater.trials.foreign_trial import ForeignLauncher
from tiny_models import OF_OTHERS, write_model

pytestmark = [pytest.mark.emit, pytest.mark.timeout(1200)]

ROOMY, NARROW = "6GiB", "1000MiB"
"""A bound that every trial here is far below; and one that is past TRL's own imports and below its
loss over 8192 tokens."""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model that is a config alone; what is prepared of it goes with the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return write_model(tmp_path / "small", OF_OTHERS, tie_word_embeddings=False)


def settings(**others: Any) -> dict[str, Any]:
    return {"trainer": "trl", "command": str(program_of("trl", "trl")), "device": "cpu", **others}


def tried(model: Path, length: int, *, base: Mapping[str, Any] | None = None, **others: Any) -> Any:
    if base is not None:
        path = model.parent / "base.yaml"
        path.write_text(json.dumps(base))  # which is YAML, too
        others["trainer_config"] = str(path)
    result = highwater.run_trial(str(model), length, **settings(memory=ROOMY, **others))
    assert result.log_path is not None
    return result, list(logged_steps(Path(result.log_path).read_text()))


def test_a_trial_trains_on_exactly_the_length(model):
    result, steps = tried(model, 1021, sequences_per_micro_batch=2, steps=2)
    assert result.outcome is Outcome.FIT, result.reason
    assert [step["num_tokens"] for step in steps] == ["4084", "8168"]  # 2 x 2 x 1021 a step
    assert result.ranks[0].memory.peak_data_segment_bytes
    base = {"num_generations": 2, "max_completion_length": 40}
    result, steps = tried(model, 100, base=base, objective="grpo")
    assert result.outcome is Outcome.FIT, result.reason
    for number, step in enumerate(steps, start=1):
        assert (step["completions/min_length"], step["completions/max_length"]) == ("40", "40")
        assert step["num_tokens"] == str(number * 2 * 100)
    assert len(steps) == 2


def test_the_users_own_fields_stay_and_packed_rows_are_whole_documents(model):
    base = {"learning_rate": 3e-4, "lr_scheduler_type": "constant", "packing": True}
    base |= {"max_length": 64, "max_steps": 500, "dataset_name": "org/nowhere"}
    result, steps = tried(model, 515, base=base)
    assert result.outcome is Outcome.FIT, result.reason
    assert [step["learning_rate"] for step in steps] == ["0.0003", "0.0003"]
    assert [step["num_tokens"] for step in steps] == ["1030", "2060"]


def test_want_of_memory_is_told_from_every_other_end(model):
    result: TrialResult = highwater.run_trial(str(model), 8192, **settings(memory=NARROW))
    assert result.outcome is Outcome.OUT_OF_MEMORY, result.reason
    assert "allocate" in result.reason
    base = model.parent / "base.yaml"
    base.write_text("optim: no_such_optimizer\n")
    others = settings(memory=ROOMY, trainer_config=str(base))
    result = highwater.run_trial(str(model), 64, **others)
    assert result.outcome is Outcome.CRASHED
    assert "no_such_optimizer" in result.reason


def test_find_finds_the_capacity_of_trl(model):
    asked = settings(memory=NARROW, start_length=2048, resolution=4096, max_length=10240)
    study = highwater.find(str(model), steps=2, study="trl.jsonl", **asked)
    (answer,) = study.answers
    assert answer.capacity_tokens, answer.reason
    assert answer.does_not_fit_tokens == answer.capacity_tokens + 4096
    assert answer.trials <= 4
    ended = {trial.spec.length_tokens: trial.result.outcome for trial in study.trials}
    assert ended[answer.capacity_tokens] is Outcome.FIT
    assert ended[answer.does_not_fit_tokens] is Outcome.OUT_OF_MEMORY
    again = highwater.find(str(model), steps=2, study="trl.jsonl", **asked)
    assert len(again.trials) == len(study.trials), "a study goes on where it was"


def test_what_trl_cannot_be_told_is_refused_before_anything_starts(model):
    for others, said in (
        ({"ulysses": 2, "gpus": 2}, "nothing on the CPU|Ulysses"),
        ({"mlp_tiles": 4}, "mlp tiles"),
        ({"loss": "full"}, "loss"),
        ({"recompute": "all-but-attention"}, "whole layers"),
    ):
        with pytest.raises(HighwaterError, match=said):
            highwater.run_trial(str(model), 64, **settings(memory=ROOMY, **others))
    with pytest.raises(HighwaterError, match="not found"):
        highwater.run_trial(
            str(model), 64, trainer="trl", command="/no/such/trl", device="cpu", memory=ROOMY
        )


@pytest.mark.parametrize("phase", ["preparing", "starting"])
def test_a_trial_that_is_ended_leaves_nothing(model, tmp_path, phase):
    ended = Event()
    request = request_from({"model": str(model), **settings(memory=ROOMY)})
    spec = prepare_trial(request, 4096)
    launcher = ForeignLauncher(log_directory=tmp_path / "logs", timeout_s=600)

    def on_phase(told: str) -> None:
        if told == phase:
            ended.set()

    with pytest.raises(TrialEndedError):
        launcher.launch(Launch(spec=spec), gpus=None, ended=ended, on_phase=on_phase)
    left = [path for path in (tmp_path / "logs").rglob("*") if path.is_file()]
    assert [path.suffix for path in left] == [".log"]


def test_the_model_is_prepared_once(model):
    assert load_model(str(model)).shape.layers == 2
    for _ in range(2):
        result, _ = tried(model, 64)
        assert result.outcome is Outcome.FIT, result.reason
    made = [path for path in (model.parent / "cache/highwater/models").iterdir() if path.is_dir()]
    assert [path.name.rpartition("-")[0] for path in made] == ["small"]


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
def larger(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with so many words that their logits fill a memory."""
    # LLaMA-Factory imports it for sounds, of which there are none; its wheel on PyPI wants CUDA.
    (tmp_path / "modules" / "torchaudio").mkdir(parents=True)
    (tmp_path / "modules" / "torchaudio" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    return write_model(model, OF_OTHERS, vocab_size=65_536)


def tried_by(name: str, model: Path, length: int) -> TrialResult:
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
def test_a_trial_trains_on_exactly_the_length_and_keeps_the_users_fields(name, larger):
    result = tried_by(name, larger, 512)
    assert result.outcome is Outcome.FIT, result.reason
    assert result.log_path is not None
    steps = list(logged_steps(Path(result.log_path).read_text()))
    assert [step["num_input_tokens_seen"] for step in steps] == [1024, 2048]
    assert [float(str(step["learning_rate"])) for step in steps] == [3e-4, 3e-4]
    assert result.ranks[0].memory.peak_data_segment_bytes


@pytest.mark.parametrize("name", PROGRAMS)
def test_want_of_memory_is_told_of_each(name, larger):
    result = tried_by(name, larger, 8192)
    assert result.outcome is Outcome.OUT_OF_MEMORY, result.reason
    assert "allocate" in result.reason

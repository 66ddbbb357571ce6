"""What a training says where there is no terminal, and before a bar."""

import msgspec
import pytest

from highwater.cli.progress import training_progress
from highwater.nouns.corpus import Corpus
from highwater.nouns.request import request_from
from highwater.nouns.training import Schedule, TrainingProgress, TrainingRequest, TrainingSpec
from highwater.recommendation.training_settings import chosen_trial
from highwater.trials.probe import probe

STEPS = 4


@pytest.fixture
def spec() -> TrainingSpec:
    """A run of four steps on the CPU."""
    request = request_from({"model": "tiny", "device": "cpu", "memory": 2**30}, keywords=True)
    asked = TrainingRequest(data=("data.jsonl",), length=256, steps=STEPS, output="run")
    corpus = Corpus(
        directory="/corpus",
        digest="0",
        objective="sft",
        length_tokens=256,
        documents=1,
        units=1,
        tokens=256,
        trained_tokens=255,
        longest_tokens=256,
    )
    return TrainingSpec(
        trial=chosen_trial(request, asked, probe()).spec,
        corpus=corpus,
        steps=STEPS,
        micro_batches=1,
        schedule=Schedule(steps=STEPS),
        output_directory="/run",
        model_directory="/run/model",
    )


def test_without_a_terminal_every_evaluation_is_a_line_of_its_own(spec, capsys):
    started = TrainingProgress(phase="training", steps=STEPS)
    before = msgspec.structs.replace(started, evaluation_loss=3.5, evaluation_step=0)
    first = msgspec.structs.replace(before, step=1, loss=3.25, tokens=512, seconds=2.0)
    last = msgspec.structs.replace(first, step=4, evaluation_loss=3.125, evaluation_step=4)
    with training_progress(spec, done_steps=0) as hear:
        for said in (started, before, before, first, first, last, last):
            hear(said)
    assert capsys.readouterr().err.splitlines() == [
        "held-out loss 3.500 before the first step",
        "step 1 of 4: loss 3.250, 256 tokens/s, about 6 s left",
        "held-out loss 3.125 after step 4",
    ]

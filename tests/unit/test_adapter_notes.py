"""What is said of a training whose adapters alone are saved."""

import msgspec
import pytest

from highwater.nouns.request import request_from
from highwater.nouns.training import TrainingRequest
from highwater.nouns.trial import TrialSpec
from highwater.recommendation.training_settings import adapter_notes, chosen_trial
from highwater.trials.probe import probe

NATIVE = 32_768
"""Positions of the tiny model."""


def trial(length_tokens: int, **settings: object) -> TrialSpec:
    request = request_from({"model": "tiny", "device": "cpu", "memory": "2GiB"}, keywords=True)
    asked = TrainingRequest(data=("data.jsonl",), length=256, steps=1, output="run")
    chosen = chosen_trial(request, asked, probe()).spec
    return msgspec.structs.replace(
        chosen,
        length_tokens=length_tokens,
        settings=msgspec.structs.replace(chosen.settings, **settings),
    )


@pytest.mark.parametrize(
    ("length_tokens", "settings", "is_noted"),
    [
        (2 * NATIVE, {"lora": 4}, True),
        (NATIVE, {"lora": 4}, False),
        (2 * NATIVE, {"lora": 4, "lora_merged": True, "save_hf": "last"}, False),
        (2 * NATIVE, {}, False),
    ],
)
def test_adapters_that_are_trained_with_yarn_are_said_not_to_have_it(
    length_tokens, settings, is_noted
):
    notes = adapter_notes(trial(length_tokens, **settings))
    assert any("the YaRN of factor 2 that" in note for note in notes) == is_noted

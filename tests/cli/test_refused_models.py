"""Models that cannot be asked about, and layouts that theirs do not allow: one clear error from
every command.
"""

import json

import pytest
from conftest import SIMULATED, refusal

from tiny_models import TINY, write_model

GPUS = ("--gpus", "1xH100-80GB")
TRAINING = ("--data", "data.jsonl", "--output", "run", "--steps", "1")


def test_a_model_that_is_not_understood_is_refused_by_every_command(highwater, tiny):
    (tiny / "config.json").write_text(json.dumps({**TINY, "vocab_size": None}))
    at_length = ("--length", "2048")
    for words in (
        ("find", str(tiny), *SIMULATED),
        ("find", str(tiny), "--device", "cpu"),
        ("try", str(tiny), "--device", "cpu", *at_length),
        ("predict", str(tiny), *GPUS),
        ("recommend", str(tiny), *GPUS, *at_length),
        ("emit", "--for", "trl", str(tiny), *GPUS, *at_length),
        ("guide", "--predict", str(tiny), *GPUS),
        ("train", str(tiny), "--device", "cpu", *TRAINING, *at_length),
    ):
        problem, hint = refusal(highwater(*words), 2)
        assert "has no vocab_size" in problem
        assert hint


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("predict", *GPUS), None),
        (("recommend", *GPUS, "--length", "2048"), None),
        (("emit", "--for", "trl", *GPUS, "--length", "2048"), None),
        (("find", *SIMULATED), None),
        (("predict", *GPUS, "--trainer", "trinity"), "scales or caps its logits"),
        (("emit", "--for", "verl", *GPUS, "--length", "2048"), "scales or caps its logits"),
    ],
)
def test_a_model_that_scales_its_logits_is_known_to_every_command_but_for_trinitys_step(
    highwater, tiny, words, said
):
    write_model(tiny, model_type="granite", logits_scaling=8.0, residual_multiplier=0.22)
    command, *rest = words
    done = highwater(command, str(tiny), *rest)
    if said is None:
        assert done.returncode == 0, done.stderr
        return
    problem, hint = refusal(done, 2)
    assert said in problem
    (offered_command,) = [part for part in hint.split("`") if part.startswith("highwater ")]
    assert highwater(*offered_command.split()[1:]).returncode == 0

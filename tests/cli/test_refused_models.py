"""Models that cannot be asked about, and layouts that theirs do not allow: one clear error from
every command.
"""

import json

import pytest
from conftest import SIMULATED, offered, refusal

from tiny_models import TINY, write_model

GPUS = ("--gpus", "1xH100-80GB")
PAIR = ("--gpus", "2xH100-80GB")
RING = ("--gpus", "2", "--ring", "2")
TRAINING = ("--data", "data.jsonl", "--output", "run", "--steps", "1")


@pytest.mark.parametrize(
    "words",
    [
        ("find", *SIMULATED, *RING, "--max-length", "8k"),
        ("try", *SIMULATED, *RING, "--length", "8k"),
        ("predict", *PAIR, *RING[2:], "--length", "8k"),
        ("predict", *PAIR, *RING[2:], "--length", "8k", "--exact"),
        ("predict", *PAIR, *RING[2:], "--max-length", "8k"),
        ("recommend", *PAIR, *RING[2:], "--length", "8k"),
    ],
)
def test_a_ring_of_documents_past_a_window_is_refused_and_the_hint_works(highwater, tiny, words):
    write_model(tiny, model_type="mistral", sliding_window=4096)
    command, *rest = words
    problem, hint = refusal(highwater(command, str(tiny), *rest), 2)
    assert "sliding window of 4,096" in problem
    assert "8,192 tokens" in problem
    at = rest.index("--ring")
    mended = [*rest[:at], *offered(hint)[0], *rest[at + 2 :]]
    assert highwater(command, str(tiny), *(w for w in mended if w != "--exact")).returncode == 0


def test_an_answer_does_not_end_at_a_sliding_window(highwater, tiny):
    write_model(tiny, model_type="mistral", sliding_window=4096)
    for done in (highwater("find", str(tiny), *SIMULATED), highwater("predict", str(tiny), *GPUS)):
        assert done.returncode == 0
        assert "window" not in done.stderr
        assert "high-water mark: 4,096 " not in done.stdout


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": None}, "has no vocab_size"),
        ({"model_type": "t5"}, "of the family t5, "),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"rope_scaling": {"type": "yran", "factor": 2.0}}, "rope_type 'yran'"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types names 3 layers"),
    ],
)
def test_a_model_that_is_not_understood_is_refused_by_every_command(highwater, tiny, changes, said):
    (tiny / "config.json").write_text(json.dumps({**TINY, **changes}))
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
        assert said in problem
        assert hint


@pytest.mark.parametrize(
    "words",
    [
        ("find", *SIMULATED),
        ("find", "--device", "cpu", "--memory", "1GiB"),
        ("try", *SIMULATED, "--length", "4k"),
        ("predict", *GPUS),
        ("predict", *GPUS, "--exact"),
        ("recommend", *GPUS, "--length", "4k"),
        ("emit", "--for", "verl", *GPUS, "--length", "4k"),
    ],
)
def test_a_quantised_checkpoint_is_refused_by_every_command_and_the_hint_works(
    highwater, tiny, words
):
    write_model(tiny, quantization_config={"quant_method": "fp8"})
    command, *rest = words
    problem, hint = refusal(highwater(command, str(tiny), *rest), 2)
    assert "(fp8)" in problem
    assert "quantization_config" in hint
    write_model(tiny)
    if rest[0] == "--device" and "--dry-run" in rest:  # the others go the same way, and take longer
        assert highwater(command, str(tiny), *rest).returncode == 0


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

"""``--activations auto`` as it is typed: what a trial says of it, and what is refused."""

from pathlib import Path

import pytest
from conftest import SIMULATED, following, offered, refusal

from highwater.errors import EXIT_ANSWERED, EXIT_USER
from tiny_models import write_model

UNPREDICTED = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 32,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "global_head_dim": 512,
}
"""A model that trains, and whose layers nobody has traced."""


@pytest.mark.parametrize(("length", "placement"), [("64k", "gpu"), ("320k", "host")])
def test_a_trial_says_which_placement_it_takes(highwater, length, placement):
    asked = ("try", "Qwen3-4B", "--lora", "16", "--length", length, "--loss", "chunked")
    memory = ("--host-memory", "512GiB", "--allocator", "expandable")
    done = highwater(*asked, *memory, *SIMULATED, "--activations", "auto")
    assert done.returncode == EXIT_ANSWERED
    assert f"note: `--activations auto` is `--activations {placement}` here" in done.stderr
    assert ("activations on host" in done.stdout) == (placement == "host")
    assert highwater(*following(done), "--dry-run").returncode == EXIT_ANSWERED


def test_auto_of_a_model_that_nobody_predicts_is_refused(highwater, tmp_path: Path):
    model = str(write_model(tmp_path / "model", **UNPREDICTED))
    asked = ("try", model, "--length", "64", *SIMULATED, "--activations", "auto")
    problem, hint = refusal(highwater(*asked), EXIT_USER)
    assert "no prediction knows" in problem
    assert "`auto` is by prediction" in hint
    for words in offered(hint)[:2]:
        assert highwater("find", model, *words, "--print-config").returncode == EXIT_ANSWERED

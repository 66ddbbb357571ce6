"""Models that cannot be asked about, and lengths that theirs do not reach: one clear error from every command."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import SIMULATED, Run, refusal

GPUS = ("--gpus", "1xH100-80GB")


def rewrite(tiny: Path, **changes: Any) -> None:
    """Other fields in the tiny model's config.json."""
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
            "of the family gemma3, which reads more than text",
        ),
        ({"model_type": "llava", "text_config": {"model_type": "mistral"}}, "of the family llava, which reads more than text"),
        ({"model_type": "t5", "vocab_size": None}, "of the family t5, has no vocab_size"),
        ({"model_type": ["llama"]}, "has the model_type ['llama']"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
        ({"text_config": None}, "has the text_config None"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
    ],
)
def test_a_model_that_is_not_understood_is_refused_by_every_command(
    highwater: Run, tiny: Path, changes: dict[str, Any], said: str
) -> None:
    rewrite(tiny, **changes)
    for words in (("find", str(tiny), *SIMULATED), ("predict", str(tiny), *GPUS)):
        problem, hint = refusal(highwater(*words), 2)
        assert said in problem
        assert hint

"""What is said of a length that YaRN stretches further than published models go."""

import pytest

from highwater.model.model import load_model
from highwater.nouns.plan_notes import yarn_notes


@pytest.mark.parametrize(
    ("name", "length_tokens", "times"),
    [
        ("Qwen3-8B", 8 * 40_960, None),
        ("Qwen3-8B", 524_288, "12.8 times"),
        ("Qwen2.5-Math-7B", 65_536, "16 times"),
        ("Llama-3.1-8B", 131_072, None),
        ("Qwen3-8B", None, None),
    ],
)
def test_a_factor_above_eight_is_told(name, length_tokens, times):
    notes = yarn_notes(load_model(name), length_tokens, "auto")
    assert [times in note for note in notes] == ([] if times is None else [True])

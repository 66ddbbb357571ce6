"""Attention in head groups as it is asked for: what is refused before anything starts, what it is
called, and what it buys.
"""

import msgspec
import pytest

import highwater
from highwater.errors import HighwaterError
from highwater.memory.formula.layers import Step, working_set_bytes
from highwater.model.model import load_model
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings, settings_in_words
from highwater.speed import predicted_step

ONE, FOUR = {"gpus": "1xH100-80GB"}, {"gpus": "4xH100-80GB"}


@pytest.mark.parametrize(
    ("model", "groups", "asked", "problem"),
    [
        ("Llama-3.1-8B", 3, ONE, "8 key/value heads"),
        ("Llama-3.1-8B", 16, ONE, "8 key/value heads"),
        ("Qwen3-30B-A3B", 8, FOUR, "4 key/value heads"),
        ("Llama-3.1-8B", 4, FOUR | {"ring": 2}, "a ring passes on"),
        ("Llama-3.1-8B", 4, FOUR | {"ulysses": 4}, "4 equal groups"),
        ("Llama-3.1-8B", 8, FOUR | {"ulysses": 2}, "8 equal groups"),
        ("gemma-2-2b", 2, ONE, "family gemma2"),
        ("gpt-oss-20b", 2, FOUR, "family gpt_oss"),
        ("Phi-4", 2, ONE, "family phi3"),
    ],
)
def test_heads_that_do_not_make_such_groups_are_refused_with_a_hint_that_works(
    model, groups, asked, problem
):
    asked = {**asked, "attention_head_groups": groups}
    with pytest.raises(HighwaterError, match=problem) as refused:
        highwater.predict(model, **asked)
    words = refused.value.hint.split("`")[1].split()
    offered = dict(zip(words[::2], words[1::2], strict=False))
    if "out" in refused.value.hint:
        asked = {name: value for name, value in asked.items() if name != "attention_head_groups"}
    else:
        asked |= {name[2:].replace("-", "_"): int(value) for name, value in offered.items()}
    assert highwater.predict(model, **asked).cells


def test_groups_of_the_heads_that_ranks_share_are_predicted():
    found = highwater.predict("Llama-3.1-8B", **FOUR, attention_head_groups=2, ulysses=4)
    assert found.cells[0].cell.settings.label == "head-groups-2"
    assert found.cells[0].cell.words.startswith("2 head groups")
    assert "attention in 2 head groups" in settings_in_words(found.cells[0].cell.settings)


def test_a_layer_of_an_8b_takes_little_more_than_half_in_four_groups():
    shape = load_model("Llama-3.1-8B").shape

    def per_token(groups: int) -> float:
        settings = Settings(loss="chunked", lora=32, attention_head_groups=groups)
        one, two = (
            working_set_bytes(
                Step(shape, settings, Layout(), length_tokens=tokens).layer(shape.runs[0].kind)
            )
            for tokens in (1 << 17, 1 << 18)
        )
        return (two - one) / (1 << 17)

    assert [round(per_token(groups) / 1000) for groups in (1, 2, 4, 8)] == [90, 69, 53, 49]


def test_a_step_costs_the_projections_of_queries_keys_and_values_once_more():
    shape = load_model("Llama-3.1-8B").shape
    plain = Settings(loss="chunked")
    steps = [
        predicted_step(shape, each, Layout(gpus=4), length_tokens=1 << 16, device_name="H100-80GB")
        for each in (plain, msgspec.structs.replace(plain, attention_head_groups=4))
    ]
    assert steps[0] is not None
    assert steps[1] is not None
    assert 1 < steps[1].time_s / steps[0].time_s < 1.02

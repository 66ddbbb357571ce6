"""A family is trained only where its own forward pass is its head on its last hidden states."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from engine_models import on_meta
from highwater.engine.models.requirements import prove_head
from highwater.errors import ModelError
from highwater.model.families import PLAIN, TRAINED, LogitTransform, logit_transform_of
from highwater.model.model_config import refuse_features
from tables import table
from tiny_models import SIZES


def as_its_class(family: str, **fields: Any) -> Any:
    config = AutoConfig.for_model(family, **fields)
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        if isinstance(getattr(config, name, None), int):
            with contextlib.suppress(AttributeError):  # a property of other fields
                setattr(config, name, 2)
    if isinstance(getattr(config, "layer_types", None), list):
        config.layer_types = config.layer_types[:2]
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def transform_of(model: Any) -> LogitTransform:
    return logit_transform_of(model.config.to_dict(), "its config")


def is_proven(model: Any, transform: LogitTransform = PLAIN) -> bool:
    return not refused_by(model.config.model_type, prove_head, model, transform)


def refused_by(family: str, check: Callable[..., None], *arguments: Any) -> bool:
    try:
        check(*arguments)
    except ModelError as refusal:
        return family in refusal.problem and bool(refusal.hint)
    return False


NOT_OF_DEFAULTS = ("dots1", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")
"""Families whose class cannot be built of its own defaults; tests/dist builds them small."""


@pytest.mark.parametrize("family", sorted(TRAINED - set(NOT_OF_DEFAULTS)))
def test_a_family_that_trains_is_proven(family):
    model = as_its_class(family)
    prove_head(model, transform_of(model))


@pytest.mark.parametrize(
    ("family", "fields", "said"), table("head_proof", "the_proof_says_what_stands")
)
def test_the_proof_says_what_stands_beside_the_backbone_or_in_the_config(family, fields, said):
    with pytest.raises(ModelError) as refusal:
        prove_head(as_its_class(family, **fields))
    assert refusal.value.problem.startswith(f"{family} cannot be trained: its logits")
    assert said in refusal.value.problem


@pytest.mark.parametrize(
    ("family", "field", "changes", "neutral"),
    table("head_proof", "a_factor_or_a_cap_is_proven_as_it_is_read"),
)
def test_a_factor_or_a_cap_is_proven_as_it_is_read_alone(family, field, changes, neutral):
    for value in (changes, neutral):
        model = as_its_class(family, **{field: value})
        transform = logit_transform_of({"model_type": family, field: value}, "config.json")
        assert transform == transform_of(model)
        assert is_proven(model, transform)
        assert is_proven(model) == transform.is_plain == (value == neutral), (family, value)
        refuse_features({"model_type": family, field: value}, "config.json")
    assert not is_proven(
        as_its_class(family, **{field: neutral}), transform_of_changed(family, field)
    )


def transform_of_changed(family: str, field: str) -> LogitTransform:
    """A transform that is not the plain one."""
    value = 3.0 if field == "final_logit_softcapping" else 0.5
    return logit_transform_of({"model_type": family, field: value}, "config.json")


def test_a_field_that_a_family_does_not_read_changes_nothing():
    config = Qwen3Config(**SIZES, final_logit_softcapping=30.0)
    assert config.final_logit_softcapping == 30.0
    on_meta(config)


@pytest.mark.parametrize("loss", ["full", None])
def test_what_is_built_is_proven_a_reward_models_backbone_too(loss):
    with pytest.raises(ModelError, match="minicpm3 cannot be trained"):
        on_meta(as_its_class("minicpm3").config, loss=loss)


class Shifting(Qwen3ForCausalLM):
    """Trains on the tokens before its own, and says nothing of it in its config."""

    def forward(self, input_ids: Any = None, **rest: Any) -> CausalLMOutput:
        return super().forward(input_ids=input_ids - 1, **rest)


class Remembering(Qwen3ForCausalLM):
    """Asks its backbone twice."""

    def forward(self, input_ids: Any = None, **rest: Any) -> CausalLMOutput:
        self.model(input_ids=input_ids)
        return super().forward(input_ids=input_ids, **rest)


class Adding(Qwen3ForCausalLM):
    """Adds to the logits what is no part of its head."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        self.favourites = nn.Parameter(torch.zeros(1))

    def forward(self, **arguments: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=super().forward(**arguments).logits + self.favourites)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_is_proven_in_the_dtype_that_it_is_built_in(dtype):
    on_meta(Qwen3Config(**SIZES), dtype=dtype)


@pytest.mark.parametrize("family", [Shifting, Remembering, Adding])
def test_a_class_that_does_anything_else_is_refused(family):
    with torch.device("meta"):
        model = family(Qwen3Config(**SIZES))
    assert not is_proven(model)


def test_the_proof_leaves_the_model_and_the_random_numbers_of_others_as_they_were():
    model = as_its_class("qwen3")
    before = {name: id(module) for name, module in model.named_modules()}, torch.get_rng_state()
    prove_head(model)
    assert {name: id(module) for name, module in model.named_modules()} == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(p.is_meta for p in model.parameters())
    assert model.training

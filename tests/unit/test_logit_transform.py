"""The logit transform: what a config.json says of a factor and a cap, and which values are none."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.errors import ModelError
from highwater.model.families import TRAINED
from highwater.model.logit_transform import PLAIN, LogitTransform, logit_transform_of, transforms
from highwater.model.model import load_model
from tiny_models import write_model

FACTORS = {
    "cohere": "logit_scale",
    "cohere2": "logit_scale",
    "cohere2_moe": "logit_scale",
    "hyperclovax": "logits_scaling",
}
DIVISORS = dict.fromkeys(
    ("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared"), "logits_scaling"
)
CAPS = dict.fromkeys(
    ("beam", "gemma2", "gemma3_text", "nanochat", "vaultgemma"), "final_logit_softcapping"
)
FIELDS = FACTORS | DIVISORS | CAPS
TAKE_WHOLE = {"beam", "hyperclovax", *DIVISORS}
"""Families whose class takes a whole number."""
VALUES = st.floats(1e-6, 1e6)


@given(st.sampled_from(sorted(FIELDS)), VALUES)
def test_a_value_is_what_multiplies_divides_or_caps(family, value):
    found = logit_transform_of({"model_type": family, FIELDS[family]: value}, "config.json")
    if family in FACTORS:
        assert found == LogitTransform(scale=value)
    elif family in DIVISORS:
        assert found == LogitTransform(scale=1 / value)
    else:
        assert found == LogitTransform(soft_cap=value)


@given(
    st.sampled_from(sorted(FIELDS)),
    st.sampled_from((0, 0.0, -1.0, -30, math.inf, math.nan, 1e9, True, "8", [8.0], {})),
)
def test_what_is_no_factor_and_no_cap_is_refused_by_the_fields_name(family, value):
    field = FIELDS[family]
    with pytest.raises(ModelError, match=f"of the family {family}, has {field} ") as refusal:
        logit_transform_of({"model_type": family, field: value}, "config.json")
    assert field in refusal.value.hint


@pytest.mark.parametrize("family", sorted(FIELDS))
def test_a_whole_number_is_refused_where_the_class_refuses_it_and_the_hint_works(family):
    config: dict[str, Any] = {"model_type": family, FIELDS[family]: 8}
    if family in TAKE_WHOLE:
        assert logit_transform_of(config, "config.json") != PLAIN
        return
    with pytest.raises(ModelError, match=r"= 8$") as refusal:
        logit_transform_of(config, "config.json")
    offered = refusal.value.hint.rpartition(" ")[2]
    assert offered == "8.0"
    logit_transform_of({**config, FIELDS[family]: json.loads(offered)}, "config.json")


@pytest.mark.parametrize("family", sorted(FIELDS))
def test_null_is_no_cap_and_is_no_factor(family):
    config = {"model_type": family, FIELDS[family]: None}
    if family in CAPS:
        assert logit_transform_of(config, "config.json") == PLAIN
        return
    with pytest.raises(ModelError, match=r"= None$"):
        logit_transform_of(config, "config.json")


@pytest.mark.parametrize("family", sorted(FIELDS))
def test_the_class_takes_what_is_taken_and_refuses_what_is_refused(family):
    """A null factor is refused also where the class takes it: it makes no logits of it."""
    kind = pytest.importorskip("transformers").CONFIG_MAPPING[family]
    field = FIELDS[family]
    written = json.loads(kind().to_json_string(use_diff=False))
    assert logit_transform_of({"model_type": family}, "") == logit_transform_of(written, "")
    for value in (None, 8, 8.0, True, "8"):
        try:
            kind(**{field: value})
        except Exception:  # noqa: BLE001 (of huggingface_hub, which the control plane has not)
            with pytest.raises(ModelError):
                logit_transform_of({"model_type": family, field: value}, "config.json")
        else:
            if value is not None or family in CAPS:
                logit_transform_of({"model_type": family, field: value}, "config.json")


def test_every_family_of_transformers_whose_logits_are_transformed_is_known():
    """By the source of its causal LM: what it reads of its config."""
    transformers = pytest.importorskip("transformers")
    names = ("logit_scale", "logits_scaling", "final_logit_softcapping")
    for family in sorted(TRAINED & set(transformers.CONFIG_MAPPING)):
        folder = transformers.CONFIG_MAPPING[family].__module__.split(".")[2]
        files = Path(transformers.__file__).parent.joinpath("models", folder).glob("modeling_*.py")
        source = "".join(file.read_text() for file in files)
        read = {field for field in names if f"config.{field}" in source}
        assert read == ({FIELDS[family]} if family in FIELDS else set()), family
        assert all(transforms(family, field) == (field in read) for field in names)


@pytest.mark.parametrize("family", sorted(set(FIELDS) & TRAINED))
def test_a_model_that_scales_or_caps_its_logits_is_read(tmp_path, family):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    known = experts if "moe" in family else {}
    directory = write_model(tmp_path, model_type=family, **known, **{FIELDS[family]: 8.0})
    assert load_model(str(directory)).shape.parameters > 0


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 7000.0}}, "rope_type"),
    ],
)
def test_rope_that_the_mixture_of_coheres_class_does_not_read_is_refused(tmp_path, rope, said):
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    with pytest.raises(ModelError, match=said):
        load_model(str(write_model(tmp_path, model_type="cohere2_moe", **experts, **rope)))
    whole = {"rope_parameters": {"rope_type": "default", "rope_theta": 7000.0}}
    load_model(str(write_model(tmp_path, model_type="cohere2_moe", **experts, **whole)))

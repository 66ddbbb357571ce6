"""The codec: nouns survive the way to JSON and back, and what is not a noun is refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.nouns.codec import (
    digest,
    from_builtins,
    from_json,
    json_schema,
    to_builtins,
    to_json,
)
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.trial import (
    Failure,
    Outcome,
    RankMemory,
    RankReport,
    Save,
    TrialResult,
    TrialSpec,
)

_BYTES = st.none() | st.integers(min_value=0, max_value=2**45)
_SPECS = st.builds(
    TrialSpec,
    model_name=st.text(min_size=1),
    model_directory=st.text(),
    config_digest=st.text(alphabet="0123456789abcdef", min_size=16, max_size=16),
    device=st.just("cuda"),
    layout=st.builds(
        Layout, gpus=st.sampled_from([2, 4, 8]), ulysses_degree=st.sampled_from([1, 2])
    ),
    settings=st.builds(Settings),
    length_tokens=st.integers(min_value=2, max_value=2**30),
    memory_budget_bytes=_BYTES,
    data=st.none(),
)
_REPORTS = st.builds(
    RankReport,
    rank=st.integers(min_value=0, max_value=7),
    failure=st.none() | st.builds(Failure, hint=st.none() | st.text()),
    memory=st.builds(RankMemory, peak_reserved_bytes=_BYTES, device_used_bytes=_BYTES),
    budget=st.none(),
    losses=st.lists(st.floats(allow_nan=False, allow_infinity=False)).map(tuple),
    step_times_s=st.lists(st.floats(min_value=0, allow_infinity=False)).map(tuple),
    saves=st.lists(
        st.builds(Save, time_s=st.floats(min_value=0, allow_infinity=False)), max_size=3
    ).map(tuple),
)
_RESULTS = st.builds(
    TrialResult,
    outcome=st.sampled_from(Outcome),
    ranks=st.lists(_REPORTS, max_size=3).map(tuple),
    log_path=st.none(),
)


@given(_SPECS)
def test_a_specification_survives_json(spec):
    assert from_json(to_json(spec), TrialSpec) == spec
    assert from_builtins(to_builtins(spec), TrialSpec) == spec


@given(_RESULTS)
def test_a_result_survives_json_on_one_line(result):
    text = to_json(result)
    assert "\n" not in text
    assert from_json(text, TrialResult) == result


@given(_SPECS, st.text())
def test_the_key_of_a_trial_does_not_depend_on_where_the_model_lies(spec, elsewhere):
    assert msgspec.structs.replace(spec, model_directory=elsewhere).key == spec.key


@given(_SPECS, st.text())
def test_the_key_of_a_trial_does_not_depend_on_where_it_saves(spec, elsewhere):
    assert msgspec.structs.replace(spec, checkpoint_directory=elsewhere).key == spec.key


@given(_SPECS)
def test_trials_of_different_lengths_have_different_keys(spec):
    assert msgspec.structs.replace(spec, length_tokens=spec.length_tokens + 1).key != spec.key


@pytest.mark.parametrize(
    "text",
    [
        '{"gpus": 1, "gpu": 2}',  # an unknown field
        '{"gpus": "1"}',  # a wrong type
        '{"gpus": 1',  # cut short
    ],
)
def test_what_is_not_the_noun_is_refused(text):
    with pytest.raises(msgspec.MsgspecError):
        from_json(text, Layout)


def test_equal_values_have_equal_digests_whatever_the_order_of_their_keys():
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert len(digest({})) == 16


def test_the_schema_of_a_noun_allows_no_other_fields():
    assert json_schema(Layout)["$defs"]["Layout"]["additionalProperties"] is False

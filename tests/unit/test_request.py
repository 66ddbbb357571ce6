"""Requests: flags, files and keywords are read in one place, and every mistake is answered with what works."""

import re

import pytest

from highwater.errors import UsageError
from highwater.spec.request import Request, choices, request_from


def test_typed_text_becomes_numbers() -> None:
    request = request_from({"model": "Qwen3-0.6B", "gpus": ["1", "2"], "confirm": "2", "memory": "79.15GiB", "timeout": "90s"})
    assert (request.gpus, request.confirm, request.memory_bytes, request.timeout_s) == ((1, 2), 2, 84986665369, 90.0)


def test_a_file_must_have_the_right_types() -> None:
    with pytest.raises(UsageError, match=r"study.yaml: confirm 'two' is not a whole number"):
        request_from({"model": "Qwen3-0.6B", "confirm": "two"}, config_file="study.yaml")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"memoryy": "80GiB"}, "unknown setting 'memoryy'"),
        ({"loss": "ful"}, "loss 'ful' is not one of"),
        ({"confirm": "often"}, "confirm 'often' is not a whole number"),
        ({"gpus": ["one"]}, "gpus 'one' is not a whole number"),
        ({"gpus": 1}, "gpus '1' is not a list of whole numbers"),
        ({"allow_busy": "perhaps"}, "allow_busy 'perhaps' is not true or false"),
        ({"data": 3}, "data '3' is not what it should be"),
        ({"gpus": ["0"]}, "gpus is 0"),
        ({"gpus": []}, "gpus is empty"),
        ({"timeout": "soon"}, "'soon'"),
        ({"memory": "80GB"}, "decimal"),
        ({"start_length": "short"}, "'short'"),
        ({"max_length": "0"}, "'0'"),
        ({"margin": "-1GiB"}, "'-1GiB'"),
    ],
)
def test_a_mistake_is_told_in_the_users_words(values: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        request_from({"model": "Qwen3-0.6B", **values})


@pytest.mark.parametrize(
    ("values", "hint"),
    [
        ({"memoryy": "80GiB"}, "memory"),
        ({"loss": "ful"}, "--loss full"),
        ({"allocator": "expandible"}, "--allocator expandable"),
        ({"method": "bisection"}, "--method bisect"),
        ({"gpus": ["one"]}, "--gpus 1"),
    ],
)
def test_the_hint_is_the_nearest_thing_that_works(values: dict[str, object], hint: str) -> None:
    with pytest.raises(UsageError) as refusal:
        request_from({"model": "Qwen3-0.6B", **values})
    assert f"`{hint}`" in refusal.value.hint


def test_in_a_file_the_hint_is_a_line_of_the_file() -> None:
    with pytest.raises(UsageError) as refusal:
        request_from({"model": "Qwen3-0.6B", "loss": "ful"}, config_file="study.yaml")
    assert "`loss: full`" in refusal.value.hint


def test_a_request_names_a_model() -> None:
    with pytest.raises(UsageError, match="no model is named"):
        request_from({"gpus": ["1"]})


@pytest.mark.parametrize(("name", "allowed"), [("loss", {"full", "chunked"}), ("device", {"cuda", "cpu"}), ("memory", set())])
def test_the_choices_of_a_setting_are_known(name: str, allowed: set[str]) -> None:
    assert set(choices(name)) == allowed


def test_every_setting_is_described() -> None:
    from msgspec.json import schema

    properties = schema(Request)["$defs"]["Request"]["properties"]
    assert [name for name, entry in properties.items() if not entry.get("description")] == []

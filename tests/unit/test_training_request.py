"""Training requests: what is asked beside a trial's settings, and what cannot be."""

from collections.abc import Mapping
from typing import Any

import pytest

from highwater.cli.flags import training_request_of
from highwater.cli.grammar import parse
from highwater.errors import UsageError
from highwater.nouns.training import Schedule, TrainingRequest, training_request_from

ASKED: Mapping[str, Any] = {
    "data": ("data.jsonl",),
    "length": "8k",
    "steps": 100,
    "output": "./run",
}
TYPED = ("train", "tiny", "--data", "data.jsonl", "--length", "8k", "--steps", "100", "-o", "./run")


def test_what_is_typed_is_what_python_is_given():
    assert training_request_of(parse(TYPED)) == training_request_from(ASKED)
    more = {
        "eval_data": ("held_out.jsonl", "more.jsonl"),
        "rows": 8,
        "schedule": "cosine",
        "warmup_steps": 10,
        "eval_every": 20,
        "save_every": 25,
        "long_documents": "split",
        "train_on": "all",
        "seed": 3,
        "resume_from": "step-000025",
    }
    words = [*TYPED, "--eval-data", "held_out.jsonl", "more.jsonl"]
    for name, value in list(more.items())[1:]:
        words += [f"--{name.replace('_', '-')}", str(value)]
    assert training_request_of(parse(words)) == training_request_from({**ASKED, **more})


def test_the_length_may_be_spelled_as_everywhere():
    assert training_request_from(ASKED).length_tokens == 8192
    assert training_request_from({**ASKED, "length": 5000}).length_tokens == 5000


@pytest.mark.parametrize(
    ("changes", "problem", "hint"),
    [
        ({"data": ()}, "nothing to train on", "--data"),
        ({"steps": 0}, "0 steps", "--steps 1"),
        ({"rows": 0}, "0 rows", "--rows 1"),
        ({"rows": 10**9}, "1000000000 rows", "--rows 1"),
        ({"output": ""}, "no folder for the run", "--output ./run"),
        ({"seed": -1}, "--seed -1", "--seed 0"),
        ({"seed": 2**63}, f"--seed {2**63}", "--seed 0"),
        ({"warmup_steps": 101}, "101 steps to warm up", "--warmup-steps 100"),
        ({"save_every": -1}, "--save-every -1", "--save-every 0"),
        ({"eval_every": 5}, "nothing to evaluate", "--eval-data"),
        ({"schedule": "cosin"}, "schedule 'cosin'", "--schedule"),
        ({"steps": "many"}, "steps 'many'", "--steps"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(changes, problem, hint):
    with pytest.raises(UsageError) as refused:
        training_request_from({**ASKED, **changes})
    assert problem in refused.value.problem
    assert hint in refused.value.hint


@pytest.mark.parametrize("flag", ["--data", "--length", "--steps", "-o"])
def test_what_has_to_be_named_is_asked_for_with_an_example(flag):
    at = TYPED.index(flag)
    with pytest.raises(UsageError) as refused:
        training_request_of(parse([*TYPED[:at], *TYPED[at + 2 :]]))
    named = {"-o": "--output ./run"}.get(flag, flag)
    assert named in refused.value.hint


def test_a_schedule_is_a_share_of_the_rate_and_ends_where_it_says():
    linear = Schedule(name="linear", warmup_steps=4, steps=12)
    assert [linear.factor(step) for step in (1, 2, 3, 4, 5)] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert linear.factor(12) == pytest.approx(1 / 8)
    cosine = Schedule(name="cosine", warmup_steps=0, steps=8)
    assert cosine.factor(1) == 1.0
    assert cosine.factor(5) == pytest.approx(0.5)
    assert {Schedule(steps=9).factor(step) for step in range(1, 10)} == {1.0}


def test_a_request_is_frozen_and_has_a_default_for_all_but_four_fields():
    assert TrainingRequest(**ASKED) == training_request_from(ASKED)

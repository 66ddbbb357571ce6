"""The page that answers without a server: what is packed into it is what ``predict --json`` and
``emit`` print.
"""

import base64
import gzip
import json
import random
import re
import shlex
import sys
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from highwater.memory.capacity import Prediction
from highwater.nouns.codec import from_json, to_builtins
from highwater.pages.prediction_tables import prediction_answer

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

from answers import GPUS, MODELS
from answers_page import CONFIGURED, COUNTS, MOST_BYTES, page, places_of

QUESTIONS = 500
PLACES = 22
"""Of 720 models on kinds and numbers of GPUs; each has two or three kinds of training."""
CONFIGURATIONS = 5


class Question(NamedTuple):
    """One answer of the page, and the command that gives the same."""

    command: list[str]
    chosen: dict[str, Any] | None
    said: str
    configurations: dict[str, str]


def answers_in(text: str) -> dict[str, Any]:
    """The document that a page unpacks."""
    packed = re.search(r'<script type="application/gzip" id="chooser-data">([^<]+)<', text)
    assert packed is not None
    return json.loads(gzip.decompress(base64.b64decode(packed[1])))


def questions_in(document: dict[str, Any]) -> list[Question]:
    """Every question that the page answers, its indices looked up as its script does."""
    value = document["values"].__getitem__
    return [
        Question(
            command=shlex.split(value(answer["command"])),
            chosen=answer["chosen"]
            and dict(zip(document["chosen"], map(value, answer["chosen"]), strict=True)),
            said=value(answer["said"]),
            configurations={
                value(name): "\n".join(map(value, lines))
                for name, lines in answer["configurations"]
            },
        )
        for place in document["places"]
        for answer in place["answers"]
    ]


@pytest.fixture(scope="module")
def sampled() -> str:
    """The page of some models on some GPUs."""
    every = list(product(MODELS, GPUS, COUNTS))
    chosen = random.Random(52).sample(every, PLACES)
    return page([each for m, kind, n in chosen for each in places_of(m, gpus=[kind], counts=[n])])


def test_the_page_answers_500_questions_as_predict_does(sampled, run):
    every = questions_in(answers_in(sampled))
    asked = random.Random(500).sample(every, QUESTIONS)
    assert len(sampled) < MOST_BYTES / 20, "a thirtieth of the answers, which share less"
    yes = 0
    for question in asked:
        program, *words = question.command
        done = run(program, *words, "--json")
        predicted = from_json(done.stdout, Prediction)
        answer, chosen = predicted.answer, question.chosen
        assert done.returncode == (0 if answer else 1), question.command
        if answer is None:
            assert chosen is None, question.command
            assert question.said.startswith("No: ")
            continue
        assert chosen is not None, question.command
        assert answer.step is not None
        assert {
            "cell": chosen["cell"],
            "risk": chosen["risk"],
            "headroom_bytes": chosen["headroom_bytes"],
            "host_bytes": chosen["host_bytes"],
            "time_s": chosen["step_time"]["time_s"],
            "tokens_per_s": chosen["step_time"]["tokens_per_s"],
        } == {
            "cell": to_builtins(answer.cell),
            "risk": answer.risk,
            "headroom_bytes": answer.headroom_bytes,
            "host_bytes": answer.footprint.host_bytes,
            "time_s": answer.step.time_s,
            "tokens_per_s": answer.step.tokens_per_s,
        }, question.command
        with_settings = prediction_answer(predicted).partition(": ")[2].partition(": ")[0]
        assert with_settings in question.said
        yes += 1
    assert QUESTIONS / 4 < yes < QUESTIONS, "some fit, and some do not"


def test_a_configuration_of_the_page_is_what_emit_prints(sampled, run):
    configured = [each for each in questions_in(answers_in(sampled)) if each.configurations]
    for question in random.Random(5).sample(configured, CONFIGURATIONS):
        for target, text in question.configurations.items():
            if target in CONFIGURED:
                words = ("emit", "--for", target, *question.command[2:])
                assert run("highwater", *words).stdout == text, words


def test_a_page_is_the_same_each_time():
    model, kinds = "Qwen3-0.6B", ["RTX-4090"]
    first, again = (page(places_of(model, gpus=kinds, counts=[1])) for _ in range(2))
    assert first == again
    document = answers_in(first)
    assert [place["basis"] for place in document["places"]] == [
        "all parameters",
        "LoRA of rank 16",
        "QLoRA of rank 16",
    ]
    assert len(MODELS) == 30

"""The page that answers without a server."""

import base64
import gzip
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from highwater.cli.app import main
from highwater.memory.capacity import Prediction
from highwater.nouns.codec import from_json, to_builtins
from highwater.pages.prediction_tables import prediction_answer

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

from answers import GPUS, MODELS
from answers_page import CONFIGURED, COUNTS, MOST_BYTES, page, places_of

from tables import deep

PLACES = (
    ("Qwen3-0.6B", "RTX-4090", 1),
    ("Qwen2.5-14B-Instruct", "L40S", 2),
    ("gpt-oss-20b", "A100-80GB", 4),
    ("gemma-3-27b-text", "H100-80GB", 8),
    ("Llama-3.1-8B", "H200-141GB", 1),
    ("Mixtral-8x7B-v0.1", "B200", 2),
    *deep(*((m, kind, n) for m in MODELS for kind, n in zip(GPUS, 2 * COUNTS, strict=False))),
)
"""Each kind and number of GPUs, and each kind of layers."""
CONFIGURATIONS = 5


class Question(NamedTuple):
    """One answer of the page, and the command that gives the same."""

    command: list[str]
    chosen: dict[str, Any] | None
    said: str
    configurations: dict[str, str]


def answers_in(text: str) -> dict[str, Any]:
    packed = re.search(r'<script type="application/gzip" id="chooser-data">([^<]+)<', text)
    return json.loads(gzip.decompress(base64.b64decode(packed[1])))


def questions_in(document: dict[str, Any]) -> list[list[Question]]:
    """Every question of the page, by place and kind of training, looked up as its script does."""
    value = document["values"].__getitem__
    return [
        [
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
            for answer in place["answers"]
        ]
        for place in document["places"]
    ]


def around_its_edge(answers: list[Question]) -> list[Question]:
    """The shortest length, the longest that fits, and the next one, which does not."""
    fitting = sum(each.chosen is not None for each in answers)
    assert all((each.chosen is None) == (n >= fitting) for n, each in enumerate(answers))
    return answers if deep(1) else [answers[0], *answers[max(1, fitting - 1) : fitting + 1]]


@pytest.fixture(scope="module")
def some() -> str:
    return page([each for m, kind, n in PLACES for each in places_of(m, gpus=[kind], counts=[n])])


@pytest.mark.timeout(3600)  # every answer of 180 places, where HIGHWATER_DEEP is set
def test_the_page_answers_as_predict_does(some, capsys):
    places = questions_in(answers_in(some))
    asked = [each for answers in places for each in around_its_edge(answers)]
    assert len(some) < MOST_BYTES, "more than a hundredth of the answers, which share less"
    yes = 0
    for question in asked:
        code = main([*question.command[1:], "--json"])
        predicted = from_json(capsys.readouterr().out, Prediction)
        answer, chosen = predicted.answer, question.chosen
        assert code == (0 if answer else 1), question.command
        if answer is None:
            assert chosen is None, question.command
            assert question.said.startswith("No: ")
            continue
        assert chosen is not None, question.command
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
        assert prediction_answer(predicted).partition(": ")[2].partition(": ")[0] in question.said
        yes += 1
    assert len(asked) / 4 < yes < len(asked), "some fit, and some do not"


def test_a_configuration_of_the_page_is_what_emit_prints(some, capsys):
    answered = (each for place in questions_in(answers_in(some)) for each in place)
    configured = [each for each in answered if each.configurations]
    for question in configured[:: len(configured) // CONFIGURATIONS]:
        for target, text in question.configurations.items():
            if target in CONFIGURED:
                words = ["emit", "--for", target, *question.command[2:]]
                main(words)
                assert capsys.readouterr().out == text, words


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

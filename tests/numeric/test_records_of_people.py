"""Two hundred records as people have them are trained as their public pages say, or refused."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from corpora import END, made, trained_of, write_tokenizer
from transformers import AutoTokenizer

from highwater.engine.data.store import OpenCorpus
from highwater.errors import UsageError

RECORDS = Path(__file__).parents[1] / "data" / "records"
TEMPLATES: dict[str, str] = json.loads((RECORDS / "templates.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = [
    json.loads(line) for line in (RECORDS / "records.jsonl").read_text("utf-8").splitlines()
]
Runs = list[tuple[bool, str]]
"""A document as stretches of text, each trained or not."""


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        name: write_tokenizer(folder / str(name), template)
        for name, template in {**TEMPLATES, None: None}.items()
    }


def told(case: Mapping[str, Any], folder: Path, tokenizer: Path, objective: str) -> OpenCorpus:
    """The corpus of a record, as its user has it on the disk."""
    is_list = isinstance(case["record"], list)
    data = folder / ("data.json" if is_list else "data.jsonl")
    data.write_text(json.dumps(case["record"], ensure_ascii=False) + "\n", encoding="utf-8")
    return made(folder, data, tokenizer=tokenizer, objective=objective, length_tokens=4096)


def runs_of(corpus: OpenCorpus, number: int, tokenizer: Any) -> Runs:
    document = corpus.document(number)
    tokens = zip(document.ids_L.tolist(), (document.labels_L != -100).tolist(), strict=True)
    return [
        (is_trained, tokenizer.decode([token for token, _ in run]))
        for is_trained, run in groupby(tokens, key=lambda each: each[1])
    ]


def joined(*parts: tuple[bool, str]) -> Runs:
    filled = [part for part in parts if part[1]]
    return [
        (is_trained, "".join(text for _, text in run))
        for is_trained, run in groupby(filled, key=lambda part: part[0])
    ]


def rendered(messages: list[dict[str, Any]], tools: Any, tokenizer: Any, **how: Any) -> str:
    given = [{key: message[key] for key in message if key != "trained"} for message in messages]
    return tokenizer.apply_chat_template(given, tools=tools, tokenize=False, **how)


def conversation(messages: list[dict[str, Any]], tools: Any, tokenizer: Any) -> Runs:
    """What transformers makes of messages: turns ``trained`` without its beginning of an answer."""
    user = [{"role": "user", "content": "?"}]
    asked, begun = (rendered(user, tools, tokenizer, **how) for how in ({}, BEGUN))
    parts: list[tuple[bool, str]] = []
    text = ""
    for number, message in enumerate(messages):
        if message["trained"]:
            assert message["role"] == "assistant"
            parts.append((False, begun.removeprefix(asked)))
            text += parts[-1][1]
        until = rendered(messages[: number + 1], tools, tokenizer)
        assert until.startswith(text)
        parts.append((message["trained"], until[len(text) :]))
        text = until
    return joined(*parts)


BEGUN = {"add_generation_prompt": True}


def expected(case: Mapping[str, Any], tokenizer: Any) -> list[Runs]:
    given = case["expected"]
    tools = given.get("tools")
    if "chosen" in given and isinstance(given["chosen"], list):
        prompt = [{**message, "trained": False} for message in given["prompt"]]
        return [
            conversation(
                [*prompt, *({**message, "trained": True} for message in given[name])],
                tools,
                tokenizer,
            )
            for name in ("chosen", "rejected")
        ]
    if "chosen" in given:
        return [
            joined((False, given["prompt"]), (True, given[name] + END))
            for name in ("chosen", "rejected")
        ]
    if "messages" in given:
        return [conversation(given["messages"], tools, tokenizer)]
    if "prompt" in given:
        return [joined((False, given["prompt"]), (True, given["completion"] + END))]
    if "segments" in given:
        return [joined(*((each["trained"], each["text"]) for each in given["segments"]))]
    if "text" in given:
        return [joined((True, given["text"] + END))]
    raise AssertionError(f"{case['id']}: nobody knows what is expected")


REFUSED = {
    *("axolotl-train-field-05", "dpo-messages-05", "input-output-segments-01"),
    *("input-output-segments-02", "input-output-segments-03", "ms-swift-query-response-03"),
    *("openai-parts-08", "pretokenised-04", "question-answer-03", "sharegpt-roles-06"),
    *("sharegpt-roles-07", "sharegpt-roles-08", "text-04"),
}
"""Records that may be refused or read, and are refused."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_a_record_is_trained_as_its_page_says_or_refused(case, tokenizers, tmp_path):
    directory = tokenizers[case["template"]]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for objective in ("dpo", "rw") if case["objective"] == "dpo" else (case["objective"],):
        if is_refused(case):
            with pytest.raises(UsageError) as refused:
                told(case, tmp_path, directory, objective)
            assert (case["refused_field"] or "") in refused.value.problem
            assert refused.value.hint
            continue
        corpus = told(case, tmp_path, directory, objective)
        if "input_ids" in case["expected"]:
            document = corpus.document(0)
            assert document.ids_L.tolist() == case["expected"]["input_ids"]
            assert document.labels_L.tolist() == case["expected"]["labels"]
            continue
        runs = [runs_of(corpus, number, tokenizer) for number in range(corpus.summary.documents)]
        assert runs == expected(case, tokenizer)


def is_refused(case: Mapping[str, Any]) -> bool:
    return case["must"] == "refuse" or case["id"] in REFUSED


def test_of_two_hundred_records_of_thirty_formats_most_are_read():
    assert (len(CASES), len({case["format"] for case in CASES})) == (200, 30)
    assert {case["must"] for case in CASES if case["id"] in REFUSED} == {"either"}
    assert Counter(map(is_refused, CASES)) == {False: 131, True: 69}


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "data.md"
SECTION = re.compile(r"^## (sft|rw and dpo|grpo|ppo)\n(.*?)(?=^## )", re.MULTILINE | re.DOTALL)
EXAMPLES = [
    (objective, block)
    for names, text in SECTION.findall(PAGE.read_text(encoding="utf-8"))
    for objective in names.split(" and ")
    for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL)
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_each_objective_has_examples():
    assert {objective for objective, _ in EXAMPLES} == {"sft", "rw", "dpo", "grpo", "ppo"}


@pytest.mark.parametrize(("objective", "block"), EXAMPLES)
def test_an_example_of_the_page_is_trained(objective, block, tokenizer, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(block, encoding="utf-8")
    corpus = made(tmp_path, data, tokenizer=tokenizer, objective=objective)
    assert corpus.summary.empty == 0
    assert all(trained_of(corpus))
    lines = len(block.splitlines())
    if objective != "grpo":
        assert corpus.summary.units == lines

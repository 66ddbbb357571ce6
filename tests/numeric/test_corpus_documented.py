"""Every example of docs/reference/data.md is read as its page says."""

import re
from pathlib import Path

import pytest
from corpora import made, trained_of, write_tokenizer

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

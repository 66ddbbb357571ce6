"""Every token of a sequence is counted and trained, in `predict`, `find` and `try`, unless somebody
says how many are its prompt.
"""

import json
from typing import Any

import pytest
from conftest import Run, offered, refusal

from highwater.api.search import prepare
from highwater.nouns.request import request_from
from highwater.nouns.trial import PROMPT_TOKENS
from highwater.units import MIB

VOCABULARY = {"Qwen3-0.6B": 151_936, "Qwen3-8B": 151_936, "Llama-3.1-8B": 128_256}
LENGTH = 2048


def logits_bytes(highwater: Run, *words: str) -> int:
    done = highwater("predict", *words, "--json")
    (cell,) = json.loads(done.stdout)["cells"]
    (loss,) = (phase for phase in cell["footprint"]["phases"] if phase["name"] == "loss")
    (logits,) = (term["bytes"] for term in loss["terms"] if term["name"] == "logits")
    return logits


@pytest.mark.parametrize(
    ("model", "tokens"), [("Qwen3-0.6B", 4096), ("Qwen3-0.6B", 1000), ("Llama-3.1-8B", 8192)]
)
def test_a_full_loss_is_predicted_with_the_logits_of_every_token(highwater, model, tokens):
    words = (model, "--gpus", "1xH200-141GB", "--length", str(tokens), "--loss", "full")
    words = (*words, "--allocator", "native", "--ulysses", "1", "--offload")
    of_a_token = 2 * VOCABULARY[model]
    assert logits_bytes(highwater, *words) == of_a_token * tokens
    prompted = logits_bytes(highwater, *words, "--prompt-tokens", "2048")
    assert prompted == of_a_token * (tokens - min(2048, tokens // 2))


def data_segment(highwater: Run, *words: str) -> int:
    asked = ("tiny", "--device", "cpu", "--memory", "6GiB", "--length", str(LENGTH), "--json")
    done = highwater("try", *asked, *words)
    assert done.returncode == 0, done.stderr
    (rank,) = json.loads(done.stdout)["result"]["ranks"]
    return rank["memory"]["peak_data_segment_bytes"]


def test_a_trial_trains_every_token_and_takes_their_logits(highwater):
    every = data_segment(highwater, "--loss", "full")
    prompted = data_segment(highwater, "--loss", "full", "--prompt-tokens", "1024")
    logits = 4 * 151_936 * 1024
    assert every - prompted == pytest.approx(logits, abs=64 * MIB)


def prompt_of(**fields: Any) -> int:
    values = {"model": "tiny", "device": "cpu", "memory": "2GiB", **fields}
    return prepare(request_from(values, keywords=True)).question.prompt_tokens


def test_a_search_has_no_prompt_unless_one_is_named():
    assert prompt_of() == 0
    assert prompt_of(prompt_tokens=7) == 7
    assert prompt_of(prompt_tokens="512") == 512


def test_a_study_is_gone_on_with_by_its_own_prompt(highwater):
    words = ("tiny", "--device", "cpu", "--memory", "2GiB", "--max-length", "4k", "--dry-run")
    first = (*words, "--study", "study.jsonl", "--prompt-tokens", str(PROMPT_TOKENS))
    assert highwater("find", *first).returncode in (0, 1)
    again = highwater("find", *words, "--study", "study.jsonl")
    assert again.returncode in (0, 1), again.stderr
    assert "begin with a prompt of 2,048 tokens" in again.stderr
    problem, _ = refusal(
        highwater("find", *words, "--study", "study.jsonl", "--prompt-tokens", "0"), 2
    )
    assert "prompt_tokens is 2048 there and 0 here" in problem


@pytest.mark.parametrize("trainer", ["trinity", "trl"])
def test_trainers_whose_prompts_are_their_own_are_not_told_of_one(highwater, trainer):
    words = ("predict", "Qwen3-4B", "--gpus", "1xH20-96GB", "--trainer", trainer)
    _, hint = refusal(highwater(*words, "--prompt-tokens", "9"), 2)
    assert offered(hint) or "leave" in hint

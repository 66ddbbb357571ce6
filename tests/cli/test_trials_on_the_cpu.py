"""Real trials on the CPU: ``--data`` that trains nothing or not what it says, which is refused by
name; ``try --attention-depth`` and ``find --proof memory``.
"""

import json
import subprocess
from pathlib import Path

import pytest
from conftest import Run, refusal

from highwater.nouns.trial import PROMPT_TOKENS

pytest.importorskip("torch", reason="trials need the train extra")

pytestmark = pytest.mark.timeout(240)

CPU = ("--device", "cpu", "--memory", "2GiB", "--timeout", "120s")
BATCHES = """
import os
import random

def untrained(*, length_tokens, **_):
    while True:
        yield [{"input_ids": [1] * length_tokens, "labels": [1] + [-100] * (length_tokens - 1)}]

def trained_on_one_rank(*, data_rank, length_tokens, **_):
    label = 2 if data_rank else -100
    ids, labels = [1] * (length_tokens - 1) + [2], [-100] * (length_tokens - 1) + [label]
    yield [{"input_ids": ids, "labels": labels}]

def trained_once(*, length_tokens, **_):
    yield [[1] * length_tokens]
    yield [[1] * length_tokens]
    yield from untrained(length_tokens=length_tokens)

def unseeded(*, length_tokens, **_):
    yield [[token % 251 for token in os.urandom(length_tokens)]]

def seeded(*, data_rank, length_tokens, **_):
    yield [random.Random(data_rank).choices(range(251), k=length_tokens)]

def rewarded(*, length_tokens, **_):
    half = list(range(1, length_tokens // 2 + 1))
    yield [{"input_ids": half, "reward": 1e30}, {"input_ids": half, "reward": -1e30}]
"""


@pytest.fixture
def tried(highwater: Run, tiny: Path, tmp_path: Path) -> Run:
    """Tries one length with batches of one of the functions above."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "own_batches.py").write_text(BATCHES)
    words = ("try", str(tiny), "--length", "64", *CPU, "--json")
    own = str(tmp_path / "own")
    return lambda source, *more: highwater(
        *words, *more, "--data", f"own_batches:{source}", found_in=own
    )


def outcome(done: "subprocess.CompletedProcess[str]") -> tuple[str, str]:
    result = json.loads(done.stdout)["result"]
    return result["outcome"], result["reason"]


@pytest.mark.parametrize(("source", "more"), [("untrained", ("--gpus", "2")), ("trained_once", ())])
def test_a_step_that_trains_no_token_on_any_rank_is_refused(tried, source, more):
    done = tried(source, *more)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "trains no token" in done.stderr


def test_a_rank_without_trained_tokens_is_none_of_that_where_another_has_some(tried):
    assert outcome(tried("trained_on_one_rank", "--gpus", "2"))[0] == "FIT"


def test_a_critic_whose_gradient_is_no_number_is_no_fit(tried):
    ended, reason = outcome(tried("rewarded", "--objective", "ppo", "--critic"))
    assert ended == "CRASHED", reason
    assert "critic" in reason
    assert "step 1 is inf" in reason


def test_ranks_that_share_a_sequence_are_given_one(tried):
    shared = ("--gpus", "2", "--ulysses", "2")
    refused = tried("unseeded", *shared)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "own_batches:unseeded" in refused.stderr
    assert "2 ranks" in refused.stderr
    assert outcome(tried("seeded", *shared))[0] == "FIT"


SMALL = ("--device", "cpu", "--memory", "1GiB")


def test_a_memory_only_trial_says_so_and_shows_no_figure_of_a_training(highwater, tiny, tmp_path):
    words = ("try", str(tiny), "--length", "2048", *SMALL, "--attention-depth", "1")
    done = highwater(*words)
    assert done.returncode == 0, done.stderr
    assert "measured, memory-only" in done.stdout
    assert "memory-only fit: memory holds it, nothing was trained" in done.stdout
    assert not any(name in done.stdout for name in ("tokens/s", "MFU", "step time", "loss"))
    assert (
        done.stderr.splitlines()[-1]
        == f"next: highwater find {tiny} {' '.join(SMALL)} --proof memory"
    )
    result = json.loads(highwater(*words, "--json").stdout)["result"]
    assert result["outcome"] == "MEMORY_ONLY_FIT"
    assert result["tokens_per_s"] is None
    assert result["mfu"] is None
    assert [
        (rank["losses"], rank["gradient_norms"], rank["step_times_s"]) for rank in result["ranks"]
    ] == [([], [], [])]
    assert list((tmp_path / "logs").rglob("*.log"))
    assert not list((tmp_path / "logs").rglob("*.statistics.jsonl"))


def test_a_search_that_proves_by_memory_trains_in_full_what_time_allows(highwater, tiny):
    grid = (
        *("--start-length", "512", "--resolution", "512", "--max-length", "1024", "--loss"),
        "full",
    )
    done = highwater("find", str(tiny), *SMALL, *grid, "--proof", "memory", "--json")
    assert done.returncode == 0, done.stderr
    (answer,) = json.loads(done.stdout)["answers"]
    assert answer["capacity_tokens"] == 1024
    assert answer["memory_only"] is None
    assert answer["limit"] == "ceiling"
    shown = highwater("show").stdout
    assert "trained in full" in shown
    assert "memory-only" not in shown, "a column with nothing in it is left out"


def test_the_lines_say_what_the_result_says(highwater, tiny, tmp_path):
    two = ("--device", "cpu", "--memory", "2GiB", "--gpus", "2", "--length", "101")
    result = json.loads(highwater("try", str(tiny), *two, "--json").stdout)["result"]
    (path,) = (tmp_path / "logs").rglob("model_len-101.statistics.jsonl")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [step["loss"] for step in found] == result["ranks"][0]["losses"]
    assert [step["gradient_norm"] for step in found] == result["ranks"][0]["gradient_norms"]
    assert found[-1]["tokens_per_s"] == pytest.approx(result["tokens_per_s"])


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

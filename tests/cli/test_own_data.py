"""``--data`` on real trials: what trains nothing or not what it says is refused by name."""

import json
import subprocess
from pathlib import Path

import pytest
from conftest import Run

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

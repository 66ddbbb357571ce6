"""``--data`` on real trials: what trains nothing or not what it says is refused by name; what is
exact is trained.
"""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="trials need the train extra")

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
def batches(tmp_path: Path) -> dict[str, str]:
    """Where the batches above are found."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "own_batches.py").write_text(BATCHES)
    return {"found_in": str(tmp_path / "own")}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("source", "flags"), [("untrained", ("--gpus", "2")), ("trained_once", ())]
)
def test_a_step_that_trains_no_token_on_any_rank_is_refused(
    highwater, tiny, batches, source, flags
):
    words = (*flags, "--data", f"own_batches:{source}")
    done = highwater("try", str(tiny), "--length", "64", *CPU, *words, **batches)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "trains no token" in done.stderr


@pytest.mark.timeout(240)
def test_a_rank_without_trained_tokens_is_none_of_that_where_another_has_some(
    highwater, tiny, batches
):
    words = ("--gpus", "2", "--data", "own_batches:trained_on_one_rank", "--json")
    done = highwater("try", str(tiny), "--length", "64", *CPU, *words, **batches)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["result"]["outcome"] == "FIT"


@pytest.mark.timeout(240)
def test_a_critic_whose_gradient_is_no_number_is_no_fit(highwater, tiny, batches):
    words = ("--objective", "ppo", "--critic", "--data", "own_batches:rewarded", "--json")
    done = highwater("try", str(tiny), "--length", "64", *CPU, *words, **batches)
    result = json.loads(done.stdout)["result"]
    assert result["outcome"] == "CRASHED", result
    assert "critic" in result["reason"]
    assert "step 1 is inf" in result["reason"]


@pytest.mark.timeout(240)
def test_ranks_that_share_a_sequence_are_given_one(highwater, tiny, batches):
    shared = ("--gpus", "2", "--ulysses", "2", "--json", "--data")
    words = ("try", str(tiny), "--length", "64", *CPU, *shared)
    refused = highwater(*words, "own_batches:unseeded", **batches)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "own_batches:unseeded" in refused.stderr
    assert "2 ranks" in refused.stderr
    done = highwater(*words, "own_batches:seeded", **batches)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["result"]["outcome"] == "FIT"


pytest.importorskip("torch", reason="trials need the train extra")

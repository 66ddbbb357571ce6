"""Trials whose GPUs share sequences by heads, by a ring and by both, with copies of the shards or
without: the same losses and gradients as one process has.
"""

import json
import subprocess
from pathlib import Path

import pytest
from conftest import Run

pytest.importorskip("torch", reason="trials need the train extra")

CPU = ("--device", "cpu", "--memory", "2GiB", "--timeout", "120s", "--json")
TOLERANCE = 2e-6
"""Relative: sums of float32 in another order."""


def trained(highwater: Run, tiny: Path, *flags: str) -> list[tuple[float, ...]]:
    """Losses and gradients' norms of every rank."""
    return of_ranks(highwater("try", str(tiny), "--length", "1021", *CPU, *flags))


def of_ranks(done: subprocess.CompletedProcess[str]) -> list[tuple[float, ...]]:
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = json.loads(done.stdout)["result"]["ranks"]
    return [(*rank["losses"], *rank["gradient_norms"]) for rank in ranks]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "flags",
    [
        ("--gpus", "3", "--ring", "3"),
        ("--gpus", "4", "--ulysses", "2", "--ring", "2", "--copies", "2"),
        ("--gpus", "6", "--ulysses", "2", "--ring", "3", "--recompute", "all-but-attention"),
    ],
    ids=" ".join,
)
def test_a_shared_sequence_trains_as_on_one_process(highwater, tiny, flags):
    config = tiny / "config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 4096})
    )
    (alone,) = trained(highwater, tiny, "--gpus", "1")
    ranks = trained(highwater, tiny, *flags)
    assert len(ranks) == int(flags[1])
    for found in ranks:
        assert found == pytest.approx(alone, rel=TOLERANCE)


@pytest.mark.timeout(300)
def test_a_trial_on_the_cpu_needs_no_memory_limit_whatever_shares_its_sequence(highwater):
    command = "try tiny --device cpu --gpus {} --length 1021 --json".format
    shared = highwater(*command("4 --ulysses 2 --ring 2").split())
    (alone,) = of_ranks(highwater(*command("1").split()))
    assert "its share of half of the free memory" in shared.stderr
    budgets = {
        rank["budget"]["budget_bytes"] for rank in json.loads(shared.stdout)["result"]["ranks"]
    }
    assert budgets == {json.loads(shared.stdout)["spec"]["memory_budget_bytes"]}
    for found in of_ranks(shared):
        assert found == pytest.approx(alone, rel=TOLERANCE)


def test_where_heads_do_not_allow_it_a_ring_is_named_that_does(highwater):
    six = ("predict", "Qwen3-8B", "--gpus", "6xA100-80GB", "--length", "131072", "--json")
    refused = highwater(*six, "--ulysses", "3")
    assert refused.returncode == 2
    offered = refused.stderr.partition("hint:")[2].split("`")[1].split()
    assert offered == ["--ulysses", "1", "--ring", "3"]
    assert json.loads(highwater(*six, *offered).stdout)["cells"]

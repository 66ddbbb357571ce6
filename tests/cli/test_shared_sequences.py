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


FLAGS = ("--gpus", "4", "--ulysses", "2", "--ring", "2", "--copies", "2")


@pytest.mark.timeout(300)
def test_a_shared_sequence_trains_as_on_one_process(highwater, tiny):
    config = tiny / "config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 4096})
    )
    (alone,) = trained(highwater, tiny, "--gpus", "1")
    ranks = trained(highwater, tiny, *FLAGS)
    assert len(ranks) == 4
    for found in ranks:
        assert found == pytest.approx(alone, rel=TOLERANCE)

"""Trials of a model with dropout: the same command trains the same numbers, and nobody else's."""

import json

import pytest

from tiny_models import write_model

pytest.importorskip("torch", reason="trials need the train extra")

CPU = ("--device", "cpu", "--memory", "2GiB", "--timeout", "120s", "--json")


@pytest.mark.timeout(300)
def test_the_same_command_twice_has_the_same_losses(highwater, tiny):
    losses: dict[float, list[object]] = {}
    for rate in (0.2, 0.2, 0.0):
        write_model(tiny, model_type="seed_oss", attention_dropout=0.0, residual_dropout=rate)
        done = highwater("try", str(tiny), "--length", "64", *CPU, "--gpus", "2", "--ulysses", "2")
        assert done.returncode == 0, done.stdout + done.stderr
        (found,) = {tuple(rank["losses"]) for rank in json.loads(done.stdout)["result"]["ranks"]}
        losses.setdefault(rate, []).append(found)
    assert losses[0.2][0] == losses[0.2][1]
    assert losses[0.2][0] != losses[0.0][0], "which it does drop things in"

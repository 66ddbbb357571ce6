"""A node of a Ray cluster that is killed in mid-trial: what is known of the length then, and where
the trial goes.
"""

from pathlib import Path

import pytest
from conftest import GONE_S, holder_of_the_trial, node_of, paused, processes_of_trials
from local_cluster import LocalCluster
from processes import wait_until

from highwater.nouns.protocols import Launch
from highwater.nouns.trial import Outcome
from highwater.trials.ray_runner import RayRunner
from runner_contract import ENDS_S

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("trials")]

LOST_S = 90
"""Bound on the time until Ray knows that a node is gone."""


def test_a_trial_whose_node_is_killed_says_nothing_and_is_tried_on_another(
    runner: RayRunner, nodes: LocalCluster, model: Path, pause: Path, mark: str
) -> None:
    spec = paused(model, pause)
    future = runner.submit(Launch(spec=spec))
    assert wait_until(pause.with_name("hangs").exists, within_s=ENDS_S)
    node = node_of(holder_of_the_trial(mark))
    node.kill()
    result = future.result(timeout=LOST_S)
    assert result.outcome is Outcome.CRASHED
    assert not result.outcome.tells
    assert result.reason.endswith("of the Ray cluster was lost")
    assert result.log_path is not None
    assert result.reason in Path(result.log_path).read_text()
    assert wait_until(lambda: processes_of_trials(mark) == [], within_s=GONE_S)
    pause.unlink()
    again = runner.submit(Launch(spec=spec, attempt=2)).result(timeout=ENDS_S)
    assert (again.outcome, again.attempt) == (Outcome.FIT, 2)
    assert again.log_path != result.log_path
    nodes.add("1")

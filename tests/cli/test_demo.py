"""``make demo``: what a newcomer sees first."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from highwater import study_report
from highwater.api.search import open_study
from highwater.nouns.study import Study

EXAMPLES = Path(__file__).parents[2] / "examples"
TIME_LIMIT_S = 420
"""Far more than the demo takes alone: other tests share the cores."""


@pytest.mark.timeout(TIME_LIMIT_S)
def test_the_demo_answers_with_pairs_of_real_trials_and_leaves_what_is_there_alone(tmp_path):
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "demo" / "1").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "examples/demo.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    capacities = re.findall(
        r"^model_name = tiny, trainer_gpu_num = ([12]), sp_num = 1, max_model_len = (\d+)$",
        done.stdout,
        re.M,
    )
    assert [gpus for gpus, _ in capacities] == ["1", "2"]
    assert all(1000 <= int(tokens) <= 3000 for _, tokens in capacities)
    assert re.search(r"^checked: .* demo/2/study\.jsonl: one fit, ", done.stdout, re.MULTILINE)
    assert demo_doubts(open_study(tmp_path / "demo" / "2" / "study.jsonl")) == []
    assert re.search(r"^checked: demo/2/run was trained on [12] process", done.stdout, re.MULTILINE)
    losses = [
        json.loads(line)["loss"]
        for line in (tmp_path / "demo/2/run/statistics.jsonl").read_text().splitlines()
    ]
    assert len(losses) == 2
    assert all(10 < loss < 14 for loss in losses), "the logarithm of 151,936 is 11.9"
    found = study_report(tmp_path / "demo" / "2" / "study.jsonl")
    assert [
        where.versions["torch"] == found.versions["torch"][0] for where in found.study.environments
    ] == [True]
    assert all("memory" in failed.log.lines[-1] for failed in found.failures), "the logs' own words"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "examples"]
    assert list((tmp_path / "demo" / "1").iterdir()) == []


def demo_doubts(study: Study) -> list[str]:
    """What the demo itself says of a study."""
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    return demo.doubts_about(study)

"""Every objective on 1, 2 and 4 gloo processes against its plain float64 implementation: loss and
every gradient.
"""

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the data plane needs the train extra")
sys.path.insert(0, str(Path(__file__).parent))

from objective_cases import cases_for
from plain_objectives import save_judges
from rank_groups import RankGroups
from reference import save_models

TOLERANCE = {"float64": 1e-10, "float32": 5e-6}
"""Norm-relative. Summation order alone differs; a router's softmax is float32 also in the float64
models, on both sides."""


@pytest.fixture(scope="session")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judged")
    save_models(folder)
    save_judges(folder)
    return folder


@pytest.mark.corpus
@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_objective_equals_its_plain_implementation(
    processes: int, ranks: RankGroups, judged: Path, tmp_path: Path
) -> None:
    result = tmp_path / "result.json"
    ranks.run("objective_cases.py", processes, judged, result)
    results = json.loads(result.read_text())
    assert set(results) == {case.name for case in cases_for(processes)}
    wrong = {
        case.name: results[case.name]
        for case in cases_for(processes)
        if "error" in results[case.name]
        or max(results[case.name][what] for what in ("loss", "gradient")) > TOLERANCE[case.dtype]
    }
    assert not wrong, json.dumps(wrong, indent=1)

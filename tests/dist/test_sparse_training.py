"""Training with block-sparse attention on 1, 2 and 4 gloo processes, shared by heads and by a ring:
loss and every gradient are those of plain models with a dense mask, one document at a time.
"""

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the data plane needs the train extra")
sys.path.insert(0, str(Path(__file__).parent))

from rank_groups import RankGroups
from sparse_training_cases import DEGREES, cases_for, save_model

TOLERANCE = {"float64": 1e-10, "float32": 5e-6}
"""Norm-relative."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return folder


@pytest.mark.corpus
@pytest.mark.by_turns
@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", DEGREES)
def test_block_sparse_training_equals_a_dense_mask_in_plain_transformers(
    processes: int, ranks: RankGroups, model: Path, tmp_path: Path
) -> None:
    result = tmp_path / "result.json"
    ranks.run("sparse_training_cases.py", processes, model, result)
    results, cases = json.loads(result.read_text()), cases_for(processes)
    assert set(results) == {case.name for case in cases}
    wrong = {
        case.name: results[case.name]
        for case in cases
        if "error" in results[case.name]
        or max(results[case.name][what] for what in ("loss", "norm", "gradient"))
        > TOLERANCE[case.dtype]
    }
    assert not wrong, json.dumps(wrong, indent=1)

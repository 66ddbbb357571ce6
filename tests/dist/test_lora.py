"""LoRA on 1, 2 and 4 gloo processes: loss and every gradient are peft's on the family's own class,
one document at a time.
"""

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the data plane needs the train extra")
pytest.importorskip("peft", reason="LoRA needs the lora extra")
sys.path.insert(0, str(Path(__file__).parent))

import lora_objective_cases
from lora_cases import LAYOUTS, cases_for, save_models
from rank_groups import RankGroups

TOLERANCE = {"float64": 1e-10, "float32": 2e-5}
"""Norm-relative. In float32 both sides round, and of A's gradient both of its products."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


@pytest.mark.corpus
@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", LAYOUTS)
def test_adapters_are_trained_as_peft_trains_them(
    processes: int, ranks: RankGroups, models: Path, tmp_path: Path
) -> None:
    result = tmp_path / "result.json"
    ranks.run("lora_cases.py", processes, models, result)
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


@pytest.mark.corpus
@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", [1, 2])
def test_every_objective_trains_what_merged_weights_would_have(
    processes: int, ranks: RankGroups, tmp_path: Path
) -> None:
    lora_objective_cases.save_models(tmp_path)
    result = tmp_path / "result.json"
    ranks.run("lora_objective_cases.py", processes, tmp_path, result)
    results = json.loads(result.read_text())
    assert set(results) == {case.name for case in lora_objective_cases.cases_for(processes)}
    wrong = {
        name: found
        for name, found in results.items()
        if "error" in found or max(found["loss"], found["gradient"]) > TOLERANCE["float64"]
    }
    assert not wrong, json.dumps(wrong, indent=1)

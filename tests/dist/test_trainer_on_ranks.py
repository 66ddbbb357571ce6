"""A loop around Trainer trains the same on ranks; what one cannot do, all are told. Ranks agree by
JSON: what another machine sends is read, and never run.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from rank_groups import RankGroups
from safetensors.torch import load_file
from trainer_cases import CASES, LENGTHS, MICRO_BATCHES, OWN, STEPS, micro_batch
from transformers import Qwen3Config

from engine_models import save_random
from tiny_models import SIZES

pytestmark = pytest.mark.timeout(300)
LOSS, NORM, WEIGHTS = 1e-6, 1e-5, 1e-4
"""Relative, in float32: sums are taken in another order, and AdamW divides by their like. Weights
are compared by how far they went."""
SUMMED = 1e-8
"""Relative: what the loop adds is summed in float64."""


def test_a_loop_on_ranks_trains_what_it_trains_alone(ranks, tmp_path):
    sizes = SIZES | {"head_dim": 16, "max_position_embeddings": 128}
    start = save_random(Qwen3Config(**sizes, tie_word_embeddings=False), tmp_path / "model")
    for processes in CASES:
        (tmp_path / str(processes)).mkdir()
        ranks.run("trainer_cases.py", processes, tmp_path / "model", tmp_path / str(processes))
    (alone,) = _told(tmp_path / "1", 1)
    expected, weights = alone["alone"], load_file(tmp_path / "1" / "alone" / "model.safetensors")
    assert all(of_step[2] == MICRO_BATCHES * sum(LENGTHS) for of_step in expected["steps"])
    for name in CASES[2]:
        told = [of_rank[name] for of_rank in _told(tmp_path / "2", 2)]
        shares = name != "data parallel"
        assert [one["degree"] for one in told] == ([1, 1] if shares else [2, 2])
        assert [one["data_rank"] for one in told] == ([0, 0] if shares else [0, 1])
        assert told[0]["steps"] == told[1]["steps"], "every rank is told the same"
        for found, wanted in zip(told[0]["steps"], expected["steps"], strict=True):
            assert found[0] == pytest.approx(wanted[0], rel=LOSS), name
            assert found[1] == pytest.approx(wanted[1], rel=NORM), name
            assert found[2] == wanted[2], name
        assert len(told[0]["steps"]) == STEPS
        _check_statistics(told, expected["told"])
        assert told[0]["evaluation"][0] == pytest.approx(expected["evaluation"][0], rel=NORM)
        assert told[0]["evaluation"][1] == expected["evaluation"][1]
        saved = load_file(tmp_path / "2" / name / "model.safetensors")
        assert set(saved) == set(weights)
        for parameter, weight in weights.items():
            moved = (weight - start[parameter]).norm()
            assert moved > 0
            assert (saved[parameter] - weight).norm() < WEIGHTS * moved, (name, parameter)
        _check_refusals(told, shares=shares)


def _check_statistics(told: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    """The loop's own numbers are those of one process, and of the documents there were."""
    for step, wanted in enumerate(alone):
        documents = [one for turn in range(2) for one in micro_batch(step * MICRO_BATCHES + turn)]
        roots = [math.sqrt(of) for one in documents for of in one["labels"] if of >= 0]
        assert wanted["root"] == pytest.approx(sum(roots), rel=SUMMED)
        assert wanted["root_of_a_token"] == pytest.approx(sum(roots) / len(roots), rel=SUMMED)
        assert (wanted["smallest_root"], wanted["largest_root"]) == (min(roots), max(roots))
        assert wanted["length"] == pytest.approx(sum(LENGTHS) / len(LENGTHS), rel=SUMMED)
        assert wanted["long"] == 4
        assert wanted["root_of_a_long_one"] == pytest.approx(sum(roots) / 4, rel=SUMMED)
        for of_rank in told:
            found = of_rank["told"][step]
            assert found.keys() == wanted.keys()
            assert {"loss", "gradient_norm", "nll", "ppl_max", "logit_max_avg"} < found.keys()
            for name in wanted:
                if not name.endswith("_by_rank"):
                    near = SUMMED if name in OWN else NORM
                    assert found[name] == pytest.approx(wanted[name], rel=near), name


def _check_refusals(told: list[dict[str, Any]], *, shares: bool) -> None:
    first, second = (one["refused"] for one in told)
    assert "rank 1 cannot go on" in first["a token outside"]
    assert "token ids outside" in second["a token outside"]
    for one in (first, second):
        assert "micro-batches, and all go through as many" in one["another number"]
        assert (one["other documents"] is None) is not shares
    if shares:
        assert "were given different ones" in first["other documents"]
        assert first["other documents"] == second["other documents"]
    for one in told:
        assert one["after"] == one["evaluation"], "what was refused has trained nothing"
    assert "holds something" in told[0]["saved twice"]
    assert "rank 0 cannot go on" in told[1]["saved twice"]


def _told(folder: Path, processes: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def mark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that is there only if a pickle was run."""
    return tmp_path_factory.mktemp("mark") / "it ran"


@pytest.fixture(scope="module")
def found(
    ranks: RankGroups, mark: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    return ranks.results("agreement_cases", 2, mark, timeout_s=120)


@pytest.mark.parametrize(
    "sent", ["pickle", "old pickle", "half", "no text", "another kind", "nothing"]
)
def test_what_a_rank_sends_and_is_no_json_of_the_kind_is_refused_and_never_run(sent, found, mark):
    kind, problem, hint = found[sent]
    assert kind == "MachineError"
    assert problem.startswith("rank 1 ")
    assert "highwater --version" in hint
    assert not mark.exists()


def test_records_of_ranks_come_whole_and_in_their_order(found):
    assert found["records"] is True


def test_an_error_of_one_rank_is_the_same_error_on_the_other(found):
    assert found["usage"] == ["UsageError", r"no room for '\udcff'", "`ls`"]
    assert found["machine"] == ["MachineError", "the disk is full", "`df -h`"]
    assert found["bug"][0] == "RuntimeError"
    assert "rank 1: KeyError" in found["bug"][1]
    assert found["nobody"] == "agreed"

"""Ranks agree by JSON: what another machine sends is read, and never run."""

from pathlib import Path
from typing import Any

import pytest
from rank_groups import RankGroups

LIMIT_S = 120


@pytest.fixture(scope="module")
def mark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that is there only if a pickle was run."""
    return tmp_path_factory.mktemp("mark") / "it ran"


@pytest.fixture(scope="module")
def found(
    ranks: RankGroups, mark: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    return ranks.results("agreement_cases", 2, mark, timeout_s=LIMIT_S)


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize(
    "sent", ["pickle", "old pickle", "half", "no text", "another kind", "nothing"]
)
def test_what_a_rank_sends_and_is_no_json_of_the_kind_is_refused_and_never_run(sent, found, mark):
    kind, problem, hint = found[sent]
    assert kind == "MachineError"
    assert problem.startswith("rank 1 ")
    assert "highwater --version" in hint
    assert not mark.exists()


@pytest.mark.timeout(LIMIT_S + 60)
def test_records_of_ranks_come_whole_and_in_their_order(found):
    assert found["records"] is True


@pytest.mark.timeout(LIMIT_S + 60)
def test_an_error_of_one_rank_is_the_same_error_on_the_other(found):
    assert found["usage"] == ["UsageError", r"no room for '\udcff'", "`ls`"]
    assert found["machine"] == ["MachineError", "the disk is full", "`df -h`"]
    assert found["bug"][0] == "RuntimeError"
    assert "rank 1: KeyError" in found["bug"][1]
    assert found["nobody"] == "agreed"

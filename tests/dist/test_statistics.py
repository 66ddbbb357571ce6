"""Statistics and evaluations do not depend on the topology."""

import json
import math
from typing import Any

import pytest
from statistics_cases import LAYOUTS, cases_for, save_models

from tables import deep

TOLERANCE = 1e-10
"""Relative, or of 1 where a number is smaller: summation order alone differs, all is float64."""
COUNTS = (
    *("n_tokens", "n_valid_tokens", "prompt_tokens", "n_documents", "n_valid_documents"),
    *("evaluated", "label_sum", "rewarded"),
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("processes", "extent"),
    [
        *((processes, "pairs") for processes in (2, 4)),
        *deep((3, "pairs"), *((processes, "all") for processes in LAYOUTS)),
    ],
)
def test_statistics_are_those_of_plain_documents_on_any_number_of_ranks(processes, extent, ranks):
    results = ranks.results("statistics_cases", processes, ranks.models(save_models), extent)
    assert set(results) == {case.name for case in cases_for(processes, extent)}
    wrong = {name: found for name, of in results.items() if (found := _deviations(of))}
    assert not wrong, json.dumps(wrong, indent=1)
    for case in cases_for(processes, extent):
        found = results[case.name]["ranks"]
        _check_groups(found, case.layout.context_degree)
        _check_sent(found)


def _deviations(of: dict[str, Any]) -> dict[str, Any]:
    if "error" in of:
        return of
    expected, wrong = of["expected"], {}
    for rank, found in enumerate(of["ranks"]):
        exported = found["exported"]
        reduced = {name for name in exported if not name.endswith("_by_rank")}
        if reduced != set(expected):
            return {"names": sorted(reduced ^ set(expected))}
        for name, wanted in expected.items():
            if not (wanted is not None and math.isfinite(wanted) and exported[name] is not None):
                off = 0 if repr(exported[name]) == repr(wanted) else math.inf
            elif not math.isfinite(exported[name]):
                off = math.inf
            else:
                off = abs(exported[name] - wanted)
            if off > (0 if name in COUNTS else TOLERANCE * max(1.0, abs(wanted or 0))):
                wrong[f"rank {rank}: {name}"] = (exported[name], wanted)
    return wrong


def _check_groups(found: list[dict[str, Any]], sharing: int) -> None:
    """A rank's own numbers add up to those of all."""
    of_ranks = [one["parts"] for one in found]
    for rank, one in enumerate(found):
        exported, overridden = one["exported"], one["overridden"]
        assert exported["n_valid_tokens_by_rank"] == [of["n_valid_tokens"] for of in of_ranks]
        for name in ("n_tokens", "n_valid_tokens", "prompt_tokens"):
            assert sum(exported[f"{name}_by_rank"]) == exported[name]
        same_place = of_ranks[rank % sharing :: sharing]
        assert overridden["n_valid_tokens"] == sum(of["n_valid_tokens"] for of in same_place)
        if "nll" not in exported:
            continue
        first = rank // sharing * sharing
        _check_mean("nll", overridden, of_ranks[first : first + sharing])
        _check_mean("entropy", overridden, of_ranks[rank : rank + 1])


def _check_sent(found: list[dict[str, Any]]) -> None:
    """A step's statistics are one sum over all ranks and nothing else, as wide on each of them."""
    widths = [[width for _, width in one["sent"]] for one in found]
    assert widths.count(widths[0]) == len(widths)
    for one in found:
        for begun, width in one["sent"]:
            assert begun == ([["allreduce_", width]] if len(found) > 1 else [])


def _check_mean(name: str, overridden: dict[str, Any], parts: list[dict[str, float]]) -> None:
    tokens = sum(of["n_valid_tokens"] for of in parts)
    wanted = sum(of[name] for of in parts) / tokens if tokens else None
    assert overridden[name] == (wanted if wanted is None else pytest.approx(wanted, rel=TOLERANCE))

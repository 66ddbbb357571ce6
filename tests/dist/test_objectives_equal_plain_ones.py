"""Every objective on 1 to 4 gloo processes against its plain float64 implementation, around a ring
in float32: loss and every gradient.
"""

from pathlib import Path

import pytest
from objective_cases import cases_for
from plain_objectives import save_judges
from rank_groups import RankGroups, assert_close
from reference import save_models

from tables import deep

TOLERANCE = {"float64": 1e-10, "float32": 5e-6}
"""Norm-relative. Summation order alone differs; a router's softmax is float32 also in the float64
models, on both sides."""


@pytest.fixture(scope="session")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judged")
    save_models(folder)
    save_judges(folder)
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [1, 2, *deep(4)])
def test_every_objective_equals_its_plain_implementation(processes, ranks, judged):
    assert_equal(ranks, processes, "sliced", judged)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("extent", ["rings", *deep("all rings")])
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_every_objective_equals_its_plain_implementation_around_a_ring_in_float32(
    processes, extent, ranks, judged
):
    assert_equal(ranks, processes, extent, judged)


def assert_equal(ranks: RankGroups, processes: int, extent: str, judged: Path) -> None:
    results = ranks.results("objective_cases.py", processes, judged, extent)
    tolerances = {case.name: TOLERANCE[case.dtype] for case in cases_for(processes, extent)}
    assert_close(results, tolerances, of=("loss", "gradient"))

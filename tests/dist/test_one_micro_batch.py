"""Steps of one micro-batch: bit by bit those whose gradients lie there from the start."""

from pathlib import Path

import pytest
from cover_cases import save_models
from one_micro_batch_cases import STEPS, cases_for


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    save_models(folder)
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_one_micro_batch_trains_as_with_gradients_from_the_start(processes, ranks, weights):
    found = ranks.results("one_micro_batch_cases", processes, weights)
    cases = cases_for(processes)
    assert set(found) == {case.name for case in cases}
    for case in cases:
        passes = STEPS * (2 if case.critic else 1) + 1
        for rank in found[case.name]:
            assert rank["same numbers"], case.name
            assert rank["made"] == [0] * passes, "of a critic none while the policy goes forward"
            assert rank["kept"][0] > 0, case.name
            assert rank["kept"] == [rank["kept"][0]] * passes, case.name

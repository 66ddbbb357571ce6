"""Block-sparse training on 1, 2 and 4 gloo processes: loss and gradients of a dense mask."""

from pathlib import Path

import pytest
from rank_groups import assert_close
from sparse_training_cases import DEGREES, cases_for, save_model

TOLERANCE = {"float64": 1e-10, "float32": 5e-6}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", DEGREES)
def test_block_sparse_training_equals_a_dense_mask_in_plain_transformers(processes, ranks, model):
    results = ranks.results("sparse_training_cases", processes, model)
    assert_close(results, {case.name: TOLERANCE[case.dtype] for case in cases_for(processes)})

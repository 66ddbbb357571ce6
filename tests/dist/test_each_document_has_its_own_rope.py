"""RoPE of every kind on 1 to 6 gloo processes: each document's loss and gradients are as alone."""

import pytest
from document_rope_cases import DEGREES, MORE_DEGREES, cases_for, save_models
from rank_groups import assert_close

from tables import deep

TOLERANCE = {"float64": 1e-10, "float32": 5e-6}
"""Norm-relative. transformers computes cosines in float32 also in a float64 model; of the same
numbers here as there."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("processes", "extent"),
    [
        *((processes, "pairs") for processes in DEGREES if processes != 3),
        (6, "kinds"),
        *deep(
            (4, "kinds"),
            *((processes, "every") for processes in DEGREES),
            *((processes, "every more") for processes in MORE_DEGREES),
        ),
    ],
)
def test_each_document_is_trained_as_it_is_alone(processes, extent, ranks):
    results, cases = (
        ranks.results("document_rope_cases", processes, ranks.models(save_models), extent),
        cases_for(processes, extent),
    )
    assert_close(results, {case.name: TOLERANCE[case.dtype] for case in cases})

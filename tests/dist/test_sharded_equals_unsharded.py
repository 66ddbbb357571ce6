"""FSDP1 and FSDP2 on 1, 2 and 4 gloo processes against the unsharded reference; steps of one
micro-batch against those whose gradients lie there from the start; block-sparse training against a
dense mask.
"""

import cover_cases
import one_micro_batch_cases
import pytest
import sparse_training_cases
from cases import BUILD, COVER, FILLED, PRODUCTS, cases_for, random_ways
from rank_groups import assert_close
from reference import save_models

from tables import deep

TOLERANCE = {"float64": 1e-10, "float32": 5e-6, "bfloat16": 0.1}
"""Norm-relative. Summation order alone differs; a router's softmax is float32 also in the float64
models, on both sides.

Computed in bfloat16 it is rounding to 8 bits through two layers, at the worst parameter: enough to
see a wrong scale."""


WORLDS = [pytest.param(n, marks=pytest.mark.xdist_group(f"world-{n}")) for n in (1, 2, 4)]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", [COVER, *deep(*PRODUCTS)])
@pytest.mark.parametrize("processes", WORLDS)
def test_sharded_training_equals_unsharded_training(processes, part, ranks):
    results = ranks.results("cases", processes, ranks.models(save_models), part, timeout_s=1100)
    if part == COVER:
        built = results.pop(BUILD)
        assert built["random"] == 0, (
            "FSDP1 starts from the same random numbers on any number of processes"
        )
        assert built["held"] <= 1.01, "besides its shards, padded, a rank holds one unit at a time"
    assert_close(
        results, {case.name: TOLERANCE[case.precision] for case in cases_for(processes, part)}
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", WORLDS)
def test_every_parameter_is_filled_with_the_same_values_in_every_layout(processes, ranks):
    """Random ones by their place in the whole model."""
    found = ranks.results("cases", processes, ranks.models(save_models), FILLED)
    assert len(found["random"]) == len(random_ways())
    assert set(found["random"].values()) == {0.0}, found["random"]
    assert len(found["saved"]) == 4
    # Its own code sums those in float32, and rounds their gradient for each document.
    assert max(found["saved"].values()) < TOLERANCE["float32"], found["saved"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_one_micro_batch_trains_as_with_gradients_from_the_start(processes, ranks):
    found = ranks.results("one_micro_batch_cases", processes, ranks.models(cover_cases.save_models))
    cases = one_micro_batch_cases.cases_for(processes)
    assert set(found) == {case.name for case in cases}
    for case in cases:
        passes = one_micro_batch_cases.STEPS * (2 if case.critic else 1) + 1
        for rank in found[case.name]:
            assert rank["same numbers"], case.name
            assert rank["made"] == [0] * passes, "of a critic none while the policy goes forward"
            assert rank["kept"][0] > 0, case.name
            assert rank["kept"] == [rank["kept"][0]] * passes, case.name


@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", sparse_training_cases.DEGREES)
def test_block_sparse_training_equals_a_dense_mask_in_plain_transformers(processes, ranks):
    models = ranks.models(sparse_training_cases.save_models)
    results = ranks.results("sparse_training_cases", processes, models)
    cases = sparse_training_cases.cases_for(processes)
    assert_close(results, {case.name: TOLERANCE[case.dtype] for case in cases})

"""Whole models whose sequences 1 to 4 gloo processes share, by a ring and by Ulysses around one.

Changing one document changes no log-probability of another by a bit, whatever shares them. In a
mixture of experts it does, on a single process too: how many tokens an expert has is the shape of
its matrix product, which decides in which order a kernel sums. In float64 that stays below 1e-14.
With RoPE of every kind each document's loss and gradients are as alone.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import shared_model_cases as cases
from document_rope_cases import DEGREES, MORE_DEGREES, cases_for, save_models
from rank_groups import RankGroups, assert_close

from tables import deep

pytestmark = pytest.mark.timeout(600)
OF_EXPERTS = 1e-14
"""In float64: a rounding or two of a log-probability around 4."""
Found = Callable[[int], list[dict[str, Any]]]
SHARED = [processes for processes in cases.DEGREES if processes > 1]


@pytest.fixture(scope="module")
def found(ranks: RankGroups, tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("shared models")
    cases.save_models(folder / "weights")

    def of(processes: int) -> list[dict[str, Any]]:
        return ranks.results("shared_model_cases", processes, folder / "weights")["ranks"]

    return cache(of)


@pytest.mark.parametrize("processes", cases.DEGREES)
def test_changing_one_document_changes_no_log_probability_of_another_by_a_bit(processes, found):
    for rank in found(processes):
        for dtype in cases.DTYPES:
            of = rank["dense"][dtype]
            assert of["compared"] > 0
            assert of["not as before"] == 0, dtype
            assert of["unchanged"] == 0, "which it does change"


@pytest.mark.parametrize("processes", cases.DEGREES)
def test_one_document_changes_others_by_a_rounding_where_experts_take_them(processes, found):
    for rank in found(processes):
        assert rank["moe"]["compared"] > 0
        assert rank["moe"]["largest"] < OF_EXPERTS
        assert rank["moe"]["unchanged"] == 0


@pytest.mark.parametrize("recompute", cases.RECOMPUTES)
@pytest.mark.parametrize("processes", SHARED)
def test_keys_and_values_travel_once_each_way_unless_attention_is_recomputed(
    processes, recompute, found
):
    """Their gradients come home with them: one step more, from the last rank to the first."""
    ulysses, ring = cases.DEGREES[processes]
    forward = cases.LAYERS * 2 * (ring - 1)
    backward = forward + cases.LAYERS * 2 * ring + (forward if recompute == "layer" else 0)
    for rank in found(processes):
        of = rank["travelled"][recompute]
        numbers = of["tokens"] * ulysses * (cases.KV_HEADS // ulysses) * cases.HEAD_SIZE
        assert of["sent"] == {"forward": forward, "backward": backward}
        assert of["numbers"] == {"forward": forward * numbers, "backward": backward * numbers}


@pytest.mark.parametrize("recompute", cases.RECOMPUTES)
@pytest.mark.parametrize("processes", SHARED)
def test_heads_are_exchanged_once_more_wherever_a_layer_is_recomputed(processes, recompute, found):
    """Queries, keys, values and what is attended; going backward the gradient of each."""
    ulysses, _ = cases.DEGREES[processes]
    each = 4 * cases.LAYERS
    wanted = {"forward": each, "backward": each if recompute == "none" else 2 * each}
    for rank in found(processes):
        assert rank["travelled"][recompute]["exchanges"] == (wanted if ulysses > 1 else {})


def test_dropout_around_a_ring_is_drawn_as_it_was_again_and_in_a_recomputation_and_trains(found):
    """Each rank has a stream of its own: no other layout drops the same."""
    for rank in found(cases.DRAWS):
        assert rank["dropout"]["equal"] == {
            "again": True,
            "layer": True,
            "all-but-attention": True,
            "another step": False,
            "another stream": False,
        }
        losses = rank["dropout"]["losses"]
        assert len(losses) == cases.STEPS
        assert losses[-1] < 0.8 * losses[0]


TOLERANCE = {"float64": 1e-10, "float32": 5e-6}
"""Norm-relative. transformers computes cosines in float32 also in a float64 model; of the same
numbers here as there."""


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

"""The planner: of all plans of every cell it takes one that is as fast as any that fits, or as
light, as counting all of them says.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import highwater
from highwater.errors import UsageError
from highwater.memory.capacity import CellPrediction, MemoryLimit
from highwater.memory.question import predicted_question
from highwater.memory.trainers import calibration_of, predict_by_formula
from highwater.nouns.cluster import cluster
from highwater.nouns.recommendation import Aim, Recommendation
from highwater.nouns.study import Cell
from highwater.nouns.trainer import OURS
from highwater.units import GIB, MIB
from tiny_models import WIDE_HEADS, write_model

LAYERS = 5
QUESTIONS = (
    (1, 8, 2.5, 1),
    (2, 8, 3.0, 4),
    (2, 32, 4.5, 16),
    (1, 32, 7.0, 1),
    (4, 128, 7.5, 64),
    (4, 512, 3.0, 64),
)
"""GPUs, thousands of tokens, GiB of each GPU and of the host: often only some plans fit."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = {"num_hidden_layers": LAYERS, "max_position_embeddings": 1_000_000}
    return str(write_model(tmp_path_factory.mktemp("model"), WIDE_HEADS, **sizes))


def every_plan(cells: tuple[Cell, ...], kv_heads: int) -> Iterator[Cell]:
    """Each cell with each recomputation, number of head groups and of last layers on the GPU."""
    for cell in cells:
        heads = kv_heads // cell.layout.ulysses_degree
        groups = [each for each in range(1, heads + 1) if heads % each == 0]
        counts = range(1, LAYERS + 1) if cell.settings.activations == "host" else (1,)
        kinds = itertools.product(("layer", "all-but-attention"), groups, counts)
        for recompute, number, layers in kinds:
            yield cell.changed(
                recompute=recompute, attention_head_groups=number, layers_on_gpu=layers
            )


def all_that_fit(
    model: str, gpus: int, length: int, gpu_bytes: int, host_bytes: int
) -> list[CellPrediction]:
    where = cluster(f"{gpus}xH100", gpu_memory_bytes=gpu_bytes, machine=None)
    question, _ = predicted_question(model, where, OURS, length, {"sequences_per_micro_batch": 1})
    cells = tuple(every_plan(question.cells, question.model.shape.kv_heads))
    question = msgspec.structs.replace(question, cells=cells)
    limit = MemoryLimit(device_bytes=gpu_bytes, host_bytes=host_bytes)
    known = calibration_of(question, OURS)
    found = predict_by_formula(question, limit, OURS, known, asked="fit")
    return [each for each in found if each.capacity_tokens]


def test_the_best_plan_is_the_best_of_all_plans(model: str):
    seen: set[str] = set()
    for gpus, thousands, gpu_gib, host_gib in QUESTIONS:
        length, gpu_bytes = thousands * 1024, round(gpu_gib * GIB)
        host_bytes = host_gib * GIB + 300 * MIB
        plans = all_that_fit(model, gpus, length, gpu_bytes, host_bytes)
        aims: tuple[Aim, ...] = ("fastest", "lightest")
        where = {"gpus": f"{gpus}xH100", "gpu_memory": gpu_bytes, "host_memory": host_bytes}
        asked = {"length": length, "sequences_per_micro_batch": 1, **where}
        found: dict[Aim, Recommendation] = {
            aim: highwater.recommend(model, **asked, aim=aim) for aim in aims
        }
        if not plans:
            assert not any(each.chosen and each.chosen.risk == "safe" for each in found.values())
            seen.add("nothing")
            continue
        fastest, lightest = found["fastest"].chosen, found["lightest"].chosen
        assert fastest is not None
        assert fastest.step_time is not None
        assert lightest is not None
        rates = [plan.step.tokens_per_s for plan in plans if plan.step]
        assert fastest.step_time.tokens_per_s == pytest.approx(max(rates), rel=1e-9)
        by_cell = {plan.cell: plan.device_used_bytes for plan in plans}
        assert by_cell[lightest.cell] == min(by_cell.values())
        assert fastest.cell in by_cell
        seen |= {fastest.cell.settings.recompute, fastest.cell.settings.activations}
        seen |= {"groups"} if lightest.cell.settings.attention_head_groups > 1 else set()
    assert seen >= {"all-but-attention", "gpu", "host", "groups", "nothing"}


def test_what_is_named_stays(model: str):
    found = highwater.recommend(
        model, length="32k", gpus="2xH100", aim="lightest", recompute="layer", activations="gpu"
    )
    assert {c.cell.settings.recompute for c in found.candidates} == {"layer"}
    assert {c.cell.settings.activations for c in found.candidates} == {"gpu"}


@pytest.mark.parametrize("aim", ["fastest", "lightest"])
def test_candidates_are_sorted_by_what_is_aimed_at(aim: Aim):
    found = highwater.recommend("Qwen3-8B", length="128k", gpus="4xH100", aim=aim)
    fitting = [each for each in found.candidates if each.fits]
    assert len(fitting) > 4
    assert found.chosen is not None
    assert found.chosen is fitting[0]
    every = [(each.cell.settings, each.cell.layout) for each in found.candidates]
    kinds = {(it.offload, it.activations, it.recompute, layout) for it, layout in every}
    assert len(kinds) == len(every)
    if aim == "fastest":
        rates = [each.step_time.tokens_per_s for each in fitting if each.step_time]
        assert rates == sorted(rates, reverse=True)
        assert found.chosen.cell.settings.recompute == "all-but-attention"


def test_what_nobody_knows_is_refused(tmp_path: Path):
    asked = {"length": "8k", "gpus": "4xH100"}
    for problem, more in (
        ("nobody knows how fast", {"gpu_memory": "70GiB", "gpus": "2", "aim": "fastest"}),
        ("plans are of our own step", {"trainer": "trl", "aim": "lightest"}),
        ("studies tell of a few", {"studies": [tmp_path / "study.json"], "aim": "fastest"}),
    ):
        with pytest.raises(UsageError, match=problem):
            highwater.recommend("Qwen3-8B", **asked | more)

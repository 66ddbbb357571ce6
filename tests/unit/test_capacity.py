import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import highwater
from highwater.errors import UsageError
from highwater.memory.capacity import MemoryLimit
from highwater.memory.formula.constants import Footprint
from highwater.memory.formula.layers import Step
from highwater.memory.interval.calibration import calibrate
from highwater.memory.interval.residuals import bundled_residuals
from highwater.memory.predictor import predict_cell, predict_cells
from highwater.memory.trace.replay import ScaledTrace
from highwater.memory.trainers import MEMORY
from highwater.model.model import load_model
from highwater.nouns.cluster import card_memory, cluster
from highwater.nouns.hardware import gpu_catalog
from highwater.nouns.layout import Layout
from highwater.nouns.objective import adapter_parameters
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell
from highwater.pages.table import plain_table
from highwater.trainers import trinity as trinity
from highwater.trainers.trinity import MEMORY as TRINITY
from highwater.trainers.trinity import covers, footprint
from highwater.units import GIB, parse_memory
from table_accuracy import accuracy_table, read_capacity_table, table_accuracy
from tables import table
from tiny_models import write_model

PUBLISHED_A100 = Path(__file__).parents[1] / "data" / "published_capacity_a100_80gb.csv"


@pytest.mark.corpus
@pytest.mark.parametrize(
    ("model", "vanilla", "env", "offloaded", "closed"),
    [
        ("Qwen3-0.6B", (8, 8), (8, 8), (8, 8), (4, 6, 8)),
        ("Qwen3-1.7B", (8, 8), (8, 8), (8, 8), (6, 8, 8)),
        ("Qwen3-4B", (7, 8), (7, 8), (7, 8), (7, 6, 7)),
        ("Qwen3-8B", (6, 8), (8, 8), (8, 8), (8, 6, 8)),
        ("Qwen3-14B", (5, 6), (8, 8), (4, 8), (5, 8, 4)),
    ],
)
def test_the_published_table_is_explained_by_replay_and_less_well_in_closed_form(
    tmp_path, model, vanilla, env, offloaded, closed
):
    """Cells that are exact and within one step, of 8 for each of a model's settings."""
    heading, *rows = PUBLISHED_A100.read_text(encoding="utf-8").splitlines()
    table = tmp_path / "table.csv"
    table.write_text("\n".join((heading, *(row for row in rows if f",{model}," in row))))
    scored = table_accuracy(read_capacity_table(table), "trinity")
    alone = {row.settings: (row.exact, row.within_one_step) for row in scored.closed_form}
    settings = ("vanilla", "env", "env+offload+never")
    assert alone == {name: (exact, 8) for name, exact in zip(settings, closed, strict=True)}
    found = {row.settings: (row.exact, row.within_one_step) for row in scored.per_settings}
    assert found == dict(zip(settings, (vanilla, env, offloaded), strict=True))
    assert offloaded[0] == closed[2], "no trace of it is bundled"
    assert scored.replayed_cells == 16
    far = [miss.cell for miss in scored.misses if miss.steps_off not in (-1, 1)]
    odd = {(cell.layout.gpus, cell.settings.allocator) for cell in far}
    assert odd == ({(4, "native")} if model == "Qwen3-14B" else set())


def test_a_score_says_how_many_cells_are_replayed_and_names_those_that_differ(tmp_path):
    heading, *rows = PUBLISHED_A100.read_text(encoding="utf-8").splitlines()
    small = [row for row in rows if re.search(r",1,1,Qwen3-(0\.6|1\.7)B,", row)]
    tiny = write_model(tmp_path / "tiny")
    other = write_model(tmp_path / "other" / "tiny", num_hidden_layers=4)
    three = [f"A100-80GB,vanilla,3,1,{model},4096" for model in ("Qwen3-4B", tiny, other)]
    table = tmp_path / "few.csv"
    for lines, replayed, by_formula, said in (
        (small, 4, 2, "4 of 6 cells"),
        (three, 0, 3, "no cell by replay of"),
    ):
        table.write_text("\n".join((heading, *lines)))
        scored = table_accuracy(read_capacity_table(table), "trinity")
        assert (scored.replayed_cells, scored.formula_cells) == (replayed, by_formula)
        shown = plain_table(accuracy_table(scored, name="few"))
        assert said in shown
        for miss in scored.misses:
            assert f", {miss.model_name}, {miss.cell.layout.gpus} GPU" in shown
    assert {str(tiny), str(other)} <= {miss.model_name for miss in scored.misses}


def test_a_replayed_cell_heeds_the_hosts_memory_and_says_what_would_be_needed_where_nothing_fits():
    asked = {"trainer": "trinity", "gpus": "1xA100-80GB"}
    bound = highwater.predict("Qwen3-0.6B", host_memory="1GiB", **asked)
    assert {(cell.binding, cell.capacity_tokens) for cell in bound.cells} == {("host", 0)}
    small = highwater.predict("Qwen3-0.6B", gpu_memory="6GiB", allocator="native", **asked)
    none, _ = [cell for cell in small.cells if cell.cell.settings.allocator == "native"]
    assert none.replayed is not None
    assert none.capacity_tokens == 0
    assert none.headroom_bytes < 0


@pytest.mark.parametrize(
    ("gpus", "ulysses", "budget", "longest"),
    [("1", 1, 20480, 20480), ("1", 1, 36864, 20480), ("1", 1, 45056, 0), ("2", 2, 36864, 40960)],
)
def test_a_token_budget_hides_no_length_that_a_shipped_trace_fits(gpus, ulysses, budget, longest):
    """Shorter lengths fill it, and need more than one that leaves almost half of it empty: 20,480
    alone of 36,864 on one GPU.
    """
    asked = {"gpus": f"{gpus}xA100-80GB", "gpu_memory": "40GiB", "trainer": "trinity"}
    asked |= {"ulysses": [ulysses], "token_budget": budget, "allocator": "native", "offload": False}
    (found,) = highwater.predict("Qwen3-0.6B", max_length=ulysses * budget, **asked).cells
    fit = [
        length
        for length in range(4096, ulysses * budget + 1, 4096)
        if highwater.predict("Qwen3-0.6B", length=length, **asked).cells[0].capacity_tokens
    ]
    assert found.capacity_tokens == max(fit, default=0) == longest
    assert found.replayed.fits == bool(fit)
    assert found.does_not_fit_tokens not in fit


@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen3-8B"])
def test_a_length_that_is_not_replayed_would_not_have_fit(model, monkeypatch):
    """On a grid so fine that a bound that is 1 % too high shows in a capacity."""
    asked = {"gpus": "1xA100-80GB", "trainer": "trinity", "resolution": 256}
    first = highwater.predict(model, **asked)
    trinity._replays.cache_clear()
    monkeypatch.setattr(ScaledTrace, "least_bytes", lambda *_: 0)
    assert highwater.predict(model, **asked) == first


def test_every_rung_is_predicted_offload_last():
    prediction = highwater.predict("Qwen3-8B", gpus="4xA100-80GB")
    cells = [each.cell for each in prediction.cells]
    labels = [(cell.layout.ulysses_degree, cell.settings.label) for cell in cells]
    assert labels[:3] == [(1, "vanilla"), (1, "Env"), (1, "Env + chunked")]
    assert labels[-1] == (4, "Env + Offload + activations-on-host + chunked")
    kinds = ("Offload-states", "Offload")
    kinds = (*kinds, *(f"{kind} + activations-on-host" for kind in kinds))
    ladder = [f"Env + {kind}{loss}" for kind in kinds for loss in ("", " + chunked")]
    assert [label for degree, label in labels if degree == 1 and "Offload" in label] == ladder
    assert len(labels) == 39
    capacities = dict(zip(labels, (each.capacity_tokens for each in prediction.cells), strict=True))
    assert capacities[4, "Env"] > capacities[2, "Env"] > capacities[1, "Env"] > 0
    assert capacities[4, "Env + chunked"] > capacities[4, "Env"] >= capacities[4, "vanilla"]


@pytest.mark.parametrize("asked", [{}, {"offload": True}])
def test_offload_of_the_trainer_trinity_has_the_allocator_that_was_published_with_it(asked):
    prediction = highwater.predict("Qwen3-8B", gpus="2xA100-80GB", trainer="trinity", **asked)
    assert {
        cell.cell.settings.label for cell in prediction.cells if cell.cell.settings.offload
    } == {"Env + Offload"}


def test_a_capacity_is_the_longest_length_that_fits():
    asked = {"gpus": "H200-141GB", "activations": "gpu"}  # on the host its memory may end them
    prediction = highwater.predict("Qwen3-4B", **asked)
    for cell in prediction.cells:
        lengths = (cell.capacity_tokens, cell.does_not_fit_tokens)
        assert None not in lengths
        fits = [highwater.predict("Qwen3-4B", length=length, **asked).cells for length in lengths]
        found = [next(each for each in cells if each.cell == cell.cell) for cells in fits]
        assert [bool(each.capacity_tokens) for each in found] == [True, False]
        assert found[0].headroom_bytes == cell.headroom_bytes >= prediction.margin_bytes
        assert found[0].lacks_bytes is None
        assert (found[1].lacks_bytes or 0) > 0


def test_a_length_fits_where_the_upper_end_of_its_interval_does():
    asked = {"gpus": "H200-141GB", "headroom": "2GiB", "activations": "gpu"}
    prediction = highwater.predict("Qwen3-4B", **asked)
    memory_limit = prediction.memory_limit.device_bytes
    for cell in prediction.cells:
        low, high = cell.interval.low_bytes, cell.interval.high_bytes
        assert low <= cell.device_used_bytes <= high <= memory_limit
        assert cell.headroom_bytes == memory_limit - cell.footprint.needed_bytes >= 2 * GIB
        for length in (cell.does_not_fit_tokens, cell.likely_tokens):
            beyond = highwater.predict("Qwen3-4B", length=length, **asked)
            found = next(each for each in beyond.cells if each.cell == cell.cell)
            is_sure, is_likely = length <= cell.capacity_tokens, length <= cell.likely_tokens
            assert (found.interval.high_bytes <= memory_limit) is is_sure
            assert bool(found.capacity_tokens) is is_sure
            assert (found.device_used_bytes <= memory_limit) is is_likely
            assert bool(found.likely_tokens) is is_likely


@pytest.mark.parametrize("objective", ["sft", "rw"])
@pytest.mark.parametrize("budget", ["20k", "50k", "96k", "200k"])
def test_a_token_budget_hides_no_length_that_the_formula_fits(budget, objective):
    """The lengths one by one from the longest, which takes minutes on a fine grid."""
    asked = {"gpus": "2xA100-40GB", "token_budget": budget, "objective": objective}
    asked |= {"offload": False, "model": "Qwen3-1.7B"}
    at = cache(lambda length: {x.cell: x for x in highwater.predict(length=length, **asked).cells})
    found = highwater.predict(resolution=2000, start_length=3000, max_length=400_000, **asked)
    for cell in found.cells:
        longest = cell.cell.settings.longest_tokens(context_degree=cell.cell.layout.context_degree)
        lengths = [length for length in range(399_000, 2999, -2000) if length <= longest]
        for name in ("capacity_tokens", "likely_tokens"):
            fitting = (length for length in lengths if getattr(at(length)[cell.cell], name))
            assert getattr(cell, name) == next(fitting, 0)


@pytest.mark.timeout(60)
def test_a_large_token_budget_on_a_fine_grid_is_answered_at_once():
    asked = {"gpus": "16xB200", "token_budget": "1m", "resolution": 64, "max_length": "4m"}
    asked |= {"loss": "full", "allocator": "native"}
    assert len(highwater.predict("Qwen3-32B", **asked).cells) == 5


def test_a_search_begins_where_the_prediction_itself_fits():
    question = highwater.find(
        "Qwen3-4B", gpus=[1], memory="79.15GiB", device="cuda", dry_run=True, max_length="64k"
    ).question
    memory_limit = MemoryLimit(device_bytes=question.memory_budget_bytes)
    known = calibrate(question, "formula", bundled=bundled_residuals())
    ours = MEMORY["highwater"].predictor
    every = predict_cells(question, memory_limit, ours, known)
    for cell, sure in zip(question.cells, every, strict=True):
        likely = predict_cell(ours(question, cell, memory_limit))
        assert likely.interval is None
        assert sure.likely_tokens == likely.likely_tokens == likely.capacity_tokens
        assert likely.capacity_tokens >= sure.capacity_tokens


def test_a_trainer_whose_trials_nobody_recorded_has_no_interval_and_says_so():
    prediction = highwater.predict("Llama-3.1-8B", gpus="4xA100-80GB", trainer="trinity")
    assert prediction.calibration is None
    assert {cell.interval for cell in prediction.cells} == {None}
    whole = highwater.predict("Llama-3.1-8B", gpus="4xA100-80GB", trainer="trinity", headroom=0)
    assert all(cell.likely_tokens == cell.capacity_tokens for cell in whole.cells)
    likely, without = ([cell.likely_tokens for cell in it.cells] for it in (prediction, whole))
    assert likely == without
    assert "without an interval" in prediction.accuracy


def test_what_no_recorded_trial_had_is_named():
    def unlike(model, gpus, **settings):
        asked = {"activations": "gpu", **settings}
        return highwater.predict(model, gpus=gpus, **asked).calibration.unlike

    assert unlike("Qwen3-4B", "H200-141GB", offload=False) == ()
    narrow = {"optimizer": "adamw-8bit", "parameters": "bf16", "micro_batches": 1}
    states = unlike("Qwen3-4B", "NVIDIA H200", offload=False, **narrow)
    assert {"optimizer adamw-8bit", "parameters in bf16", "one micro-batch a step"} <= set(states)
    assert "LoRA" in unlike("Qwen3-4B", "NVIDIA H200", offload=False, lora=32)
    named = ("A100-80GB", "Qwen3-8B", "2 GPUs", "ppo", "recompute none", "Ulysses")
    found = unlike("Qwen3-8B", "2xA100-80GB", objective="ppo", recompute="none")
    assert found == (*named, "moments on host", "states on host")


def test_what_is_reserved_for_others_shortens():
    asked = {"gpus": "H200-141GB", "activations": "gpu"}
    free, shared = (
        highwater.predict("Qwen3-4B", reserved=reserved, **asked).cells for reserved in (0, "40GiB")
    )
    assert all(a.capacity_tokens > b.capacity_tokens for a, b in zip(free, shared, strict=True))


@pytest.mark.parametrize(
    ("text", "gpus", "name"), table("capacity", "gpus_are_named_as_the_catalog_or_a_driver")
)
def test_gpus_are_named_as_the_catalog_or_a_driver_names_them(text, gpus, name):
    found = cluster(text, gpu_memory_bytes=None, machine=None)
    assert (found.gpus, found.device_name) == (gpus, name)
    assert len(found.machine().gpus) == gpus


def test_a_catalogs_card_is_what_a_driver_reports_and_amds_unmeasured():
    for kind in gpu_catalog():
        for nominal in map(int, re.findall(r"-(\d+)GB", kind.name)):
            usable_gib = (kind.usable_bytes or 0) / GIB
            assert not usable_gib or 0.9 * nominal < usable_gib < nominal, kind.name
    found = highwater.predict("Qwen3-0.6B", gpus="8xMI300X", length="32k")
    assert [note for note in found.notes if "MI300X" in note and "AMD" in note]
    of_nvidia = highwater.predict("Qwen3-0.6B", gpus="H200").notes
    assert not [note for note in of_nvidia if "AMD" in note]


@pytest.mark.parametrize(("text", "hints"), table("capacity", "gpus_not_read_and_what_is_near"))
def test_what_is_not_read_names_those_that_are_near_or_the_memory(text, hints):
    with pytest.raises(UsageError) as error:
        cluster(text, gpu_memory_bytes=None, machine=None)
    assert all(hint in error.value.hint for hint in hints)


@pytest.mark.parametrize(
    ("sold", "cards"),
    [
        ("24GB", ("RTX-4090", "RTX-3090", "L4-24GB")),
        ("80 gb", ("A100-80GB", "H100-80GB")),
        ("48G", ("L40S", "A6000-48GB")),
        ("32GB", ("RTX-5090",)),
    ],
)
def test_a_memory_that_cards_are_sold_by_names_what_their_drivers_report(sold, cards):
    with pytest.raises(UsageError) as error:
        highwater.predict("Qwen3-0.6B", gpus=1, gpu_memory=sold)
    said = dict(re.findall(r"`([\d.]+GiB)` of ([\w-]+)", error.value.hint))
    assert set(cards) <= set(said.values())
    for size, card in said.items():
        found = cluster(card, gpu_memory_bytes=None, machine=None)
        assert card_memory(size) == found.device_bytes


@pytest.mark.parametrize("size", ["24GiB", "23.64 GiB", "17GB", "24", "24TB"])
def test_another_memory_is_read_or_refused_as_everywhere(size):
    try:
        known = parse_memory(size)
    except UsageError as refused:
        with pytest.raises(UsageError, match=re.escape(refused.problem)):
            card_memory(size)
    else:
        assert card_memory(size) == known


SHAPE = load_model("Qwen3-4B").shape
RANK = 16


def footprint_of(**settings: Any) -> Footprint:
    asked = Settings(objective="grpo", entropy="full", **settings)
    return footprint(Step(SHAPE, asked, Layout(gpus=4), length_tokens=16_384))


def peak_terms(of: Footprint) -> dict[str, int]:
    return {term.name: term.bytes for term in of.peak.terms}


def test_adapters_alone_have_states_and_offload_moves_all_of_it():
    of_whole, of_adapted = (peak_terms(footprint_of(lora=lora)) for lora in (None, RANK))
    lora = Settings(lora=RANK).adapters
    assert lora is not None
    trained = adapter_parameters(SHAPE, lora)
    assert of_adapted.pop("states") == (4 * SHAPE.parameters + 16 * trained) // 4
    assert of_whole.pop("states") == 16 * SHAPE.parameters // 4
    assert of_adapted == of_whole
    on_gpus, on_host = (footprint_of(lora=RANK, offload=offload) for offload in (False, True))
    states = peak_terms(on_gpus)["states"]
    assert peak_terms(on_host)["states"] == 0
    assert on_gpus.host_bytes == 0
    assert 4 * states < on_host.host_bytes < 5 * states  # in pinned blocks of powers of two


@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen3-8B"])
def test_no_bundled_trace_speaks_of_adapters(model):
    asked = {"gpus": "4xA100-80GB", "trainer": "trinity"}
    whole, adapted = (highwater.predict(model, **asked, **lora) for lora in ({}, {"lora": RANK}))
    assert any(cell.replayed for cell in whole.cells)
    assert not any(cell.replayed for cell in adapted.cells)
    assert {cell.cell.settings.strategy for cell in adapted.cells} == {"fsdp2"}
    assert TRINITY.of_adapters is not None
    assert TRINITY.of_adapters in adapted.accuracy
    assert TRINITY.of_adapters not in whole.accuracy
    shape = load_model(model).shape
    of_whole = whole.cells[0].cell
    assert covers(shape, of_whole)
    assert not covers(shape, Cell(layout=of_whole.layout, settings=Settings(lora=RANK)))

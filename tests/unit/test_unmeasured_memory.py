"""Memory of other trainers that nobody measured here: paged optimizers and DeepSpeed's ZeRO beside
Hugging Face's step, by their source; public reports, as predicted or by what they lack.
"""

import runpy
from pathlib import Path
from typing import Any

import pytest

import highwater
from highwater.errors import UsageError
from highwater.memory.capacity import CellPrediction
from highwater.memory.formula.constants import Footprint, Phase
from highwater.model.model import load_model
from highwater.pages.prediction_tables import prediction_answer

HIDDEN, WIDTH, KEYS, LAYERS, WORDS = 4096, 14_336, 1024, 32, 128_256
"""Sizes of Llama-3.1-8B."""
MATRICES = LAYERS * (2 * HIDDEN * HIDDEN + 2 * KEYS * HIDDEN + 3 * HIDDEN * WIDTH)
TABLE = WORDS * HIDDEN
USUAL: dict[str, Any] = {"loss": "chunked", "activations": "gpu"}
USUAL |= {"allocator": "expandable", "micro_batches": 1}


def footprint(gpus: str = "1xH100-80GB", **named: Any) -> Footprint:
    """One step of Llama-3.1-8B in 4,096 tokens with Liger's kernels."""
    asked = {"length": "4k", **USUAL, **named}
    (found,) = highwater.predict("Llama-3.1-8B", gpus=gpus, trainer="transformers", **asked).cells
    return found.footprint


def saved(**named: Any) -> int:
    """Bytes that a GPU has less of where moments are paged."""
    return footprint(**named).allocated_bytes - footprint(**named, paged=True).allocated_bytes


def test_moments_leave_the_gpu_but_for_norms_scales_and_embeddings():
    assert saved() == 8 * (MATRICES + 2 * TABLE)
    assert footprint(paged=True).host_bytes == 8 * (MATRICES + 2 * TABLE)
    norms = load_model("Llama-3.1-8B").shape.parameters - MATRICES - 2 * TABLE
    assert norms == (2 * LAYERS + 1) * HIDDEN
    assert saved(optimizer="adamw-8bit") == 2 * (MATRICES + 2 * TABLE)
    host = footprint(optimizer="adamw-8bit", paged=True).host_bytes
    assert host == 2 * (MATRICES + TABLE) + 8 * TABLE


@pytest.mark.parametrize(
    ("rank", "of_hidden", "of_width"), [(6, 0, 0), (8, 0, 3), (24, 0, 3), (32, 9, 3)]
)
def test_adapters_of_few_numbers_stay_on_the_gpu(rank: int, of_hidden: int, of_width: int):
    """In a layer three matrices are as long as its MLP is wide: B of gate and up, A of down. Nine
    are as long as its hidden size: A of q, k, v, o, gate and up, and B of q, o and down.
    """
    numbers = LAYERS * rank * (of_hidden * HIDDEN + of_width * WIDTH)
    assert saved(lora=rank) == 8 * numbers


def test_each_copy_has_its_own_on_the_host():
    alone, two = footprint(lora=32, paged=True), footprint("2xH100-80GB", copies=[2], **LORA)
    assert two.host_bytes == 2 * alone.host_bytes


LORA: dict[str, Any] = {"lora": 32, "paged": True}
REFUSED: dict[str, dict[str, Any]] = {
    "no shards of FSDP2": {"gpus": "2xH100-80GB"},
    "adamw-bf16 is torchao's": {"optimizer": "adamw-bf16"},
    "DeepSpeed": {"deepspeed": "zero3"},
    "are not traced": {"exact": True},
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_pages_nothing_is_refused_by_name(why: str):
    with pytest.raises(UsageError, match=why):
        footprint(**REFUSED[why], paged=True)


def test_who_never_measured_it_says_so():
    found = highwater.predict("Qwen3-8B", gpus="1xH100-80GB", trainer="transformers", paged=True)
    assert any("never measured" in note and "bitsandbytes 0.50" in note for note in found.notes)
    with pytest.raises(UsageError, match="`--paged`"):
        highwater.predict("Qwen3-8B", gpus="1xH100-80GB", paged=True)


ROOT = Path(__file__).parents[2]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "docs/results/other_trainers/reports.py"))
WITHIN = 0.10
"""Of a figure that was read off a driver or an allocator, by whoever reported it."""


def test_every_report_is_near_what_is_predicted_or_what_it_lacks_is_named():
    ran_out = [each for each in SCRIPT["compared"]() if "OUT_OF" in each.reported["outcome"]]
    assert len(ran_out) == 7
    assert [each.fits for each in ran_out] == [False] * 7
    every = SCRIPT["compared"]()
    figures = [each for each in every if each.reported["peak_gib"]]
    assert all(each.off is not None or each.missing for each in figures)
    near = [each.off for each in figures if each.off is not None]
    assert len(near) == 3
    assert max(map(abs, near)) <= WITHIN
    assert all(each.fits is not None or each.missing for each in every)


def test_of_ligers_kernels_the_loss_alone_is_between_all_of_them_and_none():
    asked = (
        "Llama-3.1-8B --gpus 1xH200-141GB --trainer transformers --lora 32 --length 65536 "
        "--allocator expandable --activations gpu --loss "
    )
    kernels = ("chunked", "chunked --liger loss", "full")
    found = [SCRIPT["predicted"](asked + words).cells[0].footprint for words in kernels]
    assert found == sorted(found, key=lambda each: each.allocated_bytes)
    assert len({each.allocated_bytes for each in found}) == 3


BILLION = 1_000_000_000
FORMS = ("zero2", "zero2-offload", "zero3", "zero3-optimizer-offload", "zero3-offload")


def cell(form: str, model: str = "Qwen3-8B", gpus: int = 4, **named: Any) -> CellPrediction:
    """One cell of a step in 16,384 tokens with Liger's kernels."""
    asked = {"length": "16k", "deepspeed": form, **USUAL, **named}
    gpus_ = f"{gpus}xH100-80GB"
    (found,) = highwater.predict(model, gpus=gpus_, trainer="transformers", **asked).cells
    return found


def held(found: CellPrediction, phase: str = "backward of the last layer") -> dict[str, int]:
    (each,) = (each for each in phases(found) if each.name == phase)
    return {term.name: term.bytes for term in each.terms}


def phases(found: CellPrediction) -> tuple[Phase, ...]:
    return found.footprint.phases


def needed(form: str, **named: Any) -> int:
    return cell(form, **named).footprint.allocated_bytes


def host(form: str, **named: Any) -> int:
    return cell(form, **named).footprint.host_bytes


def test_a_parameter_takes_sixteen_bytes_among_gpus_by_zero_3_and_is_whole_by_zero_2():
    """ZeRO's table: 2 for parameters, 2 for gradients, 12 for AdamW; and the fp32 gradient."""
    number = load_model("Qwen3-8B").shape.parameters
    found = cell("zero3")
    states = held(found)
    own = [states[name] for name in ("parameters", "gradients", "float32 parameters and moments")]
    assert sum(own) == pytest.approx(16 * number / 4, rel=1e-6)
    group = min(number / 4, BILLION)  # `sub_group_size`: what is updated at once
    assert held(found, "update")["gradients in both forms"] == pytest.approx(6 * group, rel=1e-6)
    number = load_model("Qwen3-8B").shape.parameters
    states = held(cell("zero2"))
    assert states["parameters"] == 2 * number
    assert "parameters, gathered" not in states


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_of_zero_2_are_there_once_and_none_at_the_first_loss(micro_batches: int):
    """Bytes a number that DeepSpeed held in a process alone: 14 at the loss, 16 at the second
    micro-batch's, 22 for a moment of each update.
    """
    found, part = cell("zero2", micro_batches=micro_batches), load_model("Qwen3-8B").shape
    own = part.parameters / 4
    at_the_loss, update = held(found, "loss"), held(found, "update")
    earlier = 2 * own * (micro_batches - 1)
    assert at_the_loss.get("gradients", 0) == pytest.approx(earlier, rel=1e-6)
    assert held(found)["gradients of this micro-batch"] == pytest.approx(2 * own, rel=1e-6)
    states = update["float32 parameters and moments"] + update["gradients in both forms"]
    assert states + update.get("gradients", 0) == pytest.approx(20 * own, rel=1e-6)


@pytest.mark.parametrize(("form", "per_parameter"), [("zero2-offload", 18), ("zero3-offload", 20)])
def test_the_host_holds_deepspeeds_estimate_before_rounding_up(form: str, per_parameter: int):
    """``estimate_zero3_model_states_mem_needs``: 16 or 18 bytes, and up to half of it for buffers;
    pinned blocks are powers of two.
    """
    number = load_model("Qwen3-8B").shape.parameters
    assert number * (per_parameter - 2) <= host(form) <= number * per_parameter * 1.5


def test_offload_takes_the_optimizer_then_the_parameters_off_the_gpu():
    assert needed("zero2") > needed("zero2-offload") > needed("zero3-optimizer-offload")
    assert needed("zero3") > needed("zero3-optimizer-offload") > needed("zero3-offload")
    assert host("zero2") == host("zero3") == 0


@pytest.mark.parametrize("form", FORMS)
def test_more_gpus_and_shorter_sequences_never_take_more(form: str):
    assert needed(form, gpus=8) <= needed(form, gpus=4) <= needed(form, gpus=2)
    assert needed(form, length="8k") < needed(form)


def test_the_bucket_is_two_bytes_a_number_and_a_second_copy_while_it_is_reduced():
    small, large = (cell("zero3", deepspeed_bucket=each) for each in (BILLION // 4, BILLION))
    more = 2 * (BILLION - BILLION // 4)
    assert held(large)["bucket of gradients"] - held(small)["bucket of gradients"] == more
    full = "a full bucket reduced"
    copies = [held(each, f"backward, {full}")[full] for each in (small, large)]
    assert copies == [2 * BILLION // 4, 2 * BILLION]
    usual = held(cell("zero3"))["bucket of gradients"]
    assert usual == 2 * load_model("Qwen3-8B").shape.hidden_size ** 2  # `auto`
    assert full not in {term.name for each in phases(cell("zero3")) for term in each.terms}


@pytest.mark.parametrize(
    ("model", "loss", "at_the_loss", "later"),
    [
        ("Qwen3-0.6B", "chunked", 596, 0),
        ("Qwen3-1.7B", "chunked", 1003, 0),
        ("Qwen3-1.7B", "full", 1003, 1305),
        ("Qwen3-4B", "full", 1019, 1373),
        ("Qwen3-8B", "full", 1008, 1612),
        ("Llama-3.1-8B", "chunked", 1020, 1512),
        ("Llama-3.1-70B", "chunked", 1755, 0),
        ("Llama-3.1-70B", "full", 1051, 1990),
    ],
)
def test_zero_3_gathers_a_billion_numbers(model: str, loss: str, at_the_loss: int, later: int):
    """Million numbers, which DeepSpeed 0.19.6 had gathered of a model of these proportions, by its
    coordinator's count, with all limits scaled alike. The law is up to one matrix above it.
    """
    found = cell("zero3", model=model, gpus=8, loss=loss)
    whole = max(each.rows * each.row_size for each in load_model(model).shape.runs[0].kind.matrices)
    gathered = held(found)["parameters, gathered"]
    assert held(found, "loss")["parameters, gathered"] == gathered
    assert 0 <= gathered / 2 - at_the_loss * 1e6 + 1e6 <= whole + 2e6
    again = "embedding fetched again"
    phase = f"backward, {again}"
    assert (phase in {each.name for each in phases(found)}) == (later > 0)
    if later:
        most = (gathered + held(found, phase)[again]) / 2
        assert later * 1e6 <= most <= later * 1e6 + 2 * whole


def test_adapters_share_their_states_and_a_frozen_model_is_cut_by_zero_3_alone():
    whole, cut = held(cell("zero2", lora=16)), held(cell("zero3", lora=16))
    number = load_model("Qwen3-8B").shape.parameters
    assert whole["parameters"] == pytest.approx(2 * number, rel=0.01)
    assert cut["parameters"] == pytest.approx(2 * number / 4, rel=0.01)


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ({"optimizer": "adamw-8bit"}, "AdamW's states in float32"),
        ({"lora": 16, "lora_base": "nf4"}, "shares next to nothing"),
        ({"copies": [2]}, "no copies"),
        ({"deepspeed": "none", "deepspeed_bucket": 7}, "no DeepSpeed"),
    ],
)
def test_what_it_is_not_predicted_with_is_refused_by_name(named: dict[str, Any], why: str):
    with pytest.raises(UsageError, match=why):
        cell(**({"form": named.pop("deepspeed", "zero3")} | named))


def test_this_packages_engine_has_no_deepspeed_and_no_trace_answers_for_it():
    with pytest.raises(UsageError, match="deepspeed"):
        highwater.predict("Qwen3-8B", gpus="4xH100-80GB", deepspeed="zero3")
    with pytest.raises(UsageError, match="DeepSpeed are not traced"):
        cell("zero3-offload", gpus=1, exact=True)


def test_trls_pairs_beside_zero_3_are_answered_as_fsdp2_and_that_is_said():
    asked: dict[str, Any] = {"objective": "dpo", "length": "8k", "gpus": "4xA100-80GB"}
    found = highwater.predict("Mistral-7B-v0.3", trainer="trl", deepspeed="zero3", **asked)
    assert any("taken as FSDP2" in note for note in found.notes)
    assert not any("off its source" in note for note in found.notes)
    assert "`precompute_ref_log_probs: true`" in prediction_answer(found)
    sharded = highwater.predict("Mistral-7B-v0.3", trainer="trl", **asked)
    assert found.cells == sharded.cells
    ringless = highwater.predict("Qwen3-8B", gpus="8xH100-80GB", trainer="trl", deepspeed="zero3")
    assert {each.cell.layout.ring_degree for each in ringless.cells} == {1}

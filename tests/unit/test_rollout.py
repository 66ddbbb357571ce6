"""vLLM beside a training, on paper: by hand, of Qwen3-8B on H100s.

Qwen3-8B has 36 layers, 8 key heads of 128 numbers, a hidden size of 4,096, MLPs of 12,288, 151,936
words and 8,190,735,360 parameters.
"""

import math
import re
from typing import Any

import pytest

import highwater
from highwater.errors import HighwaterError, UsageError
from highwater.memory.capacity import CellPrediction, Prediction
from highwater.memory.formula import rollout as paper
from highwater.memory.formula.constants import RolloutMemory
from highwater.memory.formula.layers import Step
from highwater.model.model import load_model
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.study import Cell
from highwater.pages import prediction_tables
from highwater.pages.recommendation_tables import reason
from highwater.units import GIB, MIB

TOKEN_BYTES = 36 * 2 * 8 * 128 * 2
WEIGHT_BYTES = 2 * 8_190_735_360
ALWAYS = {"CUDA graphs of vLLM": paper.GRAPHS_BYTES, "libraries of vLLM": paper.LIBRARIES_BYTES}
STATES = "states without gradients"
ASKED: dict[str, Any] = {"gpus": "8xH100-80GB", "trainer": "trl", "objective": "grpo"}
HALF: dict[str, Any] = {"gpu_memory_utilization": 0.5, "sleep_level": 2, "rollout_sequences": 64}


def predicted(length: int | None = 32_768, **more: Any) -> Prediction:
    asked: dict[str, Any] = {**ASKED, "rollout": "vllm", **more}
    return highwater.predict("Qwen3-8B", length=length, **asked)


def simplest(length: int = 32_768, **more: Any) -> CellPrediction:
    return predicted(length, **more).cells[0]


def beside(cell: CellPrediction) -> RolloutMemory:
    rollout = cell.footprint.rollout
    assert rollout is not None
    return rollout


def terms(cell: CellPrediction, bar: str) -> dict[str, int]:
    return {term.name: term.bytes for term in getattr(beside(cell), bar)}


def share(cell: CellPrediction) -> int:
    awake = terms(cell, "awake")
    return sum(size for name, size in awake.items() if not name.startswith(("context", "NCCL")))


def at_once(cell: CellPrediction) -> int:
    return beside(cell).sequences // beside(cell).engines


@pytest.mark.parametrize(("degree", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_gpus_that_share_the_model_share_its_key_heads_if_any(degree: int, heads: int):
    step = Step(load_model("Qwen3-8B").shape, Settings(), Layout(), 4096)
    assert paper.token_bytes(step, degree) == 36 * 2 * heads * 128 * 2
    assert paper.token_bytes(step, 1) == TOKEN_BYTES == 144 * 1024


def test_the_cache_has_what_the_share_leaves_and_holds_whole_sequences():
    cell, total = simplest(**HALF), predicted(**HALF).device_bytes
    # TRL has 4,096 tokens in a batch: two hidden sizes and three widths of an MLP for each, more
    # than 18 bytes of the logits of 64 sequences
    computed = 2 * 4096 * (2 * 4096 + 3 * 12_288)
    assert computed > 18 * 64 * 151_936
    cache = (
        math.ceil(total / 2) - WEIGHT_BYTES - computed - paper.GRAPHS_BYTES - paper.LIBRARIES_BYTES
    )
    kept = {"weights of vLLM": WEIGHT_BYTES, "profile run of vLLM": computed, "KV cache": cache}
    assert terms(cell, "awake") == ALWAYS | kept
    blocks = cache // (paper.BLOCK_TOKENS * TOKEN_BYTES)
    assert at_once(cell) == blocks // (32_768 // paper.BLOCK_TOKENS) == 5
    assert beside(cell).engines == 8


def test_no_more_sequences_run_than_were_asked_for_and_many_take_more_than_a_batch():
    assert at_once(simplest(gpu_memory_utilization=0.5, rollout_sequences=3)) == 3
    of_a_step = simplest(gpu_memory_utilization=0.5)  # 8 completions on 8 GPUs, as TRL shares them
    assert at_once(of_a_step) == 1
    many = simplest(gpu_memory_utilization=0.5, rollout_sequences=1024)
    assert terms(many, "awake")["profile run of vLLM"] == 18 * 1024 * 151_936


def test_the_larger_bar_decides_and_the_two_are_never_added():
    for utilization, length in ((0.3, 40_960), (0.8, 32_768)):
        cell = simplest(length, sleep_level=2, gpu_memory_utilization=utilization)
        footprint, rollout = cell.footprint, beside(cell)
        training = footprint.device_used_bytes - footprint.cached_bytes
        assert footprint.needed_bytes == max(training, rollout.bytes)
        assert footprint.needed_bytes < training + rollout.bytes
        assert (rollout.bytes > training) == (utilization == 0.8)


def test_training_keeps_states_while_vllm_generates_which_asleep_leaves_its_share():
    assert terms(simplest(), "resting")[STATES] == 12 * 8_190_735_360 // 8
    assert STATES not in terms(simplest(offload=True), "resting")
    awake, asleep = simplest(sleep_level=0), simplest(sleep_level=2)
    assert terms(awake, "asleep") == terms(awake, "awake")
    assert terms(asleep, "asleep") == ALWAYS
    alone, found = simplest(rollout=None).footprint, asleep.footprint
    phases = [each.bytes for each in alone.phases if each.name != "generation of completions"]
    training = round(max(phases) / alone.filled_share) + alone.outside_bytes
    kept = paper.GRAPHS_BYTES + paper.LIBRARIES_BYTES
    assert found.device_used_bytes - found.cached_bytes == training + kept


def test_another_process_has_a_context_of_its_own():
    cell = simplest(trainer="highwater")
    assert terms(cell, "asleep")["context of vLLM"] > 700 * MIB
    assert share(cell) == math.ceil(0.5 * predicted().device_bytes)
    assert "context of vLLM" not in terms(simplest(sleep_level=2), "asleep")
    shared = simplest(trainer="highwater", rollout_tensor_parallel=2)
    assert "NCCL of vLLM" in terms(shared, "asleep")
    assert terms(shared, "awake")["weights of vLLM"] == WEIGHT_BYTES // 2
    assert beside(shared).engines == 4


def test_weights_of_level_1_sleep_in_host_memory_of_a_machine():
    named: dict[str, Any] = {"trainer": "highwater", "rollout_tensor_parallel": 2}
    level_1 = simplest(sleep_level=1, **named).footprint
    level_2 = simplest(sleep_level=2, **named).footprint
    pinned = level_1.host_bytes - level_2.host_bytes
    # eight GPUs are four copies, whose tensors take powers of two: no less, and not twice as much
    assert 4 * WEIGHT_BYTES <= pinned < 8 * WEIGHT_BYTES
    short = predicted(sleep_level=1, host_memory=f"{pinned // GIB}GiB", **named)
    assert short.answer is None
    assert short.cells[0].binding == "host"


def test_without_room_for_one_sequence_vllm_does_not_start():
    named: dict[str, Any] = {"gpu_memory_utilization": 0.25, "sleep_level": 2}
    found = predicted(131_072, **named)
    cell = found.cells[0]
    assert cell.lacks_bytes == 131_072 * TOKEN_BYTES - terms(cell, "awake")["KV cache"]
    assert (cell.binding, cell.risk, found.answer) == ("rollout", None, None)
    assert beside(cell).sequences == 0
    longest = predicted(None, **named).cells[0]
    assert longest.binding == "rollout"
    assert longest.does_not_fit_tokens is not None
    blocks = terms(longest, "awake")["KV cache"] // (paper.BLOCK_TOKENS * TOKEN_BYTES)
    assert longest.capacity_tokens <= blocks * paper.BLOCK_TOKENS < longest.does_not_fit_tokens


def test_a_recommendation_says_that_vllm_has_no_room():
    asked: dict[str, Any] = {"gpus": "8xH20-96GB", "objective": "grpo", "rollout": "vllm"}
    found = highwater.recommend("Qwen3-32B", length=4096, **asked)
    assert found.chosen is None
    with_room = [each for each in found.candidates if (each.headroom_bytes or -1) >= 0]
    assert {reason(each) for each in with_room} == {"vLLM's share holds no such sequence"}


def test_on_gpus_of_its_own_it_changes_no_training():
    def headroom(found: Prediction) -> dict[Cell, int]:
        return {each.cell: each.headroom_bytes for each in found.cells if each.capacity_tokens}

    found = predicted(65_536, trainer="highwater", rollout_gpus=4, rollout_sequences=1)
    alone = predicted(65_536, trainer="highwater", gpus="4xH100-80GB", rollout=None)
    assert found.gpus == 4
    assert headroom(found) == headroom(alone)
    cell = found.explained
    assert share(cell) == math.ceil(0.92 * found.device_bytes)
    assert (beside(cell).asleep, beside(cell).resting, beside(cell).engines) == ((), (), 4)


def test_the_first_sentence_says_what_trains_and_what_the_rollout_holds_there():
    said = prediction_tables.prediction_answer(predicted(**HALF))
    assert said.startswith("Yes: Qwen3-8B trains 32,768 tokens (prompt and response) on 8 x H100")
    assert "vLLM holds 40 such sequences at once" in said
    assert re.search(r"TRL 1.16, micro-batch 1: safe, peak [\d.]+ GiB, .* left\..* With ", said)
    native = prediction_tables.prediction_answer(predicted(None, **HALF))
    assert re.search(r" \(prompt and response, longest: .* while vLLM generates, .* left", native)
    assert f" {paper.ON_PAPER} TRL's own default is 8" in said
    found = highwater.recommend("Qwen3-8B", length="32k", **ASKED, rollout="vllm", **HALF)
    typed = found.chosen.found_in
    assert "--rollout vllm --gpu-memory-utilization 0.5 --sleep-level 2" in typed
    assert "--rollout-sequences 64" in typed
    said = prediction_tables.recommendation_answer(found)
    assert "vLLM holds 40 such sequences at once" in said
    assert said.endswith(paper.ON_PAPER)
    assert not prediction_tables.rollout_tables(predicted(rollout=None))


@pytest.mark.parametrize("length", [17_408, None])
def test_the_share_that_nobody_typed_is_said_and_up_to_which_the_same_settings_fit(length):
    asked: dict[str, Any] = {"trainer": "highwater", "prompt_tokens": 1024}
    found = predicted(length, **asked)
    first = found.native or found.explained
    told = prediction_tables.prediction_answer(found)
    said = re.search(r"on 8 x H100-80GB beside vLLM at 0\.5 \(up to ([\d.]+) fits\):", told)
    most, length = float(said[1]), first.capacity_tokens
    fits = {
        each: next(c for c in told.cells if c.cell == first.cell).capacity_tokens == length
        for each in (most, round(most + 0.05, 2))
        for told in (predicted(length, **asked, gpu_memory_utilization=each),)
    }
    assert list(fits.values()) == [True, False]
    typed = predicted(length, **asked, gpu_memory_utilization=0.5)
    assert "beside vLLM" not in prediction_tables.prediction_answer(typed)
    again = highwater.recommend("Qwen3-8B", length=length, **{**ASKED, **asked}, rollout="vllm")
    assert said[0] in prediction_tables.recommendation_answer(again)


@pytest.mark.parametrize(("gpus", "said"), [(3, " (no more fits): safe"), (2, ", 8.69 GiB short")])
def test_the_share_is_said_too_where_no_more_fits_or_nothing_does(gpus, said):
    asked: dict[str, Any] = {"trainer": "highwater", "offload": False, "gpus": f"{gpus}xH100-80GB"}
    told = prediction_tables.prediction_answer(predicted(8192, **asked))
    assert f" on {gpus} x H100-80GB beside vLLM at 0.5{said}" in told


REFUSED: dict[str, dict[str, Any]] = {
    "sft trains on what is there": {"objective": "sft"},
    "windows": {"model": "gemma-3-4b", "trainer": "highwater"},
    "up to 1": {"gpu_memory_utilization": 1.5},
    "above 0": {"gpu_memory_utilization": 0},
    "level 0 or 1 or 2": {"sleep_level": 3, "trainer": "highwater"},
    "level 0 or 2": {"sleep_level": 1},
    "a sequence or more": {"rollout_sequences": 0},
    "do not divide": {"rollout_tensor_parallel": 3},
    "no rollout": {"rollout": None, "sleep_level": 2},
    "beside a formula": {"trainer": "highwater", "exact": True, "gpus": "1xH100-80GB"},
    "predicted with `--objective`": {"trainer": "transformers"},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_with_a_way_out(what: str):
    asked: dict[str, Any] = {"model": "Qwen3-8B", **ASKED, "rollout": "vllm", **REFUSED[what]}
    with pytest.raises(UsageError, match=what) as refused:
        highwater.predict(**asked)
    assert "`" in str(refused.value.hint)


def test_no_trial_has_a_rollout():
    with pytest.raises(UsageError, match="no trial"):
        highwater.find("Qwen3-0.6B", rollout="vllm", dry_run=True, memory="80GiB", device="cuda")
    with pytest.raises(HighwaterError, match="takes no rollout"):
        highwater.find("Qwen3-0.6B", rollout="vllm", trainer="trl")

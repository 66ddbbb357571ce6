"""The sentence that a prediction begins with: every number of it is the prediction's, and the words
are those of its settings.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest

import highwater
from highwater import recommend
from highwater.nouns.hardware import THIS_MACHINE
from highwater.pages.answer_sentence import assumed_host, prediction_answer, recommendation_answer
from highwater.pages.prediction_tables import prediction_table
from highwater.recommendation.recommend import what_would_fit
from highwater.units import format_bytes, format_tokens


def test_the_longest_length_comes_first_with_its_settings_and_what_is_left():
    found = highwater.predict("Qwen3-4B", gpus="1xH100-80GB")
    best = max(found.cells, key=lambda cell: cell.capacity_tokens)
    said = prediction_answer(found)
    assert said.startswith(
        f"Qwen3-4B trains up to {format_tokens(best.capacity_tokens)} tokens on 1 x H100-80GB "
        "with expandable segments, a chunked loss, all states in host memory and YaRN: safe, "
    )
    assert format_bytes(best.footprint.host_bytes) in said
    assert f"{format_bytes(best.headroom_bytes)} of each GPU left" in said
    assert best.step is not None
    assert f"{best.step.tokens_per_s:,.0f} tokens/s" in said
    on_gpu = max(c.capacity_tokens for c in found.cells if c.cell.settings.offload is False)
    assert said.endswith(f"With everything on the GPUs: {format_tokens(on_gpu)}.")


def test_at_one_length_it_is_yes_with_the_simplest_settings():
    found = highwater.predict("Qwen3-8B", gpus="4xA100-80GB", length="64k")
    first = next(cell for cell in found.cells if cell.capacity_tokens)
    said = prediction_answer(found)
    assert said.startswith("Yes: Qwen3-8B trains 65,536 tokens on 4 x A100-80GB with ")
    assert ("expandable segments" in said) == (first.cell.settings.allocator == "expandable")


def test_where_nothing_fits_it_is_no_and_what_the_nearest_lacks():
    found = highwater.predict("Qwen3-32B", gpus="1xH100-80GB", length="64k", offload=False)
    assert not any(cell.capacity_tokens for cell in found.cells)
    least = min(cell.lacks_bytes for cell in found.cells)
    said = prediction_answer(found)
    assert said.startswith("No: Qwen3-32B does not train at 65,536 tokens on 1 x H100-80GB")
    assert said.endswith(f"lacks {format_bytes(least)} of each GPU.")
    everywhere = prediction_answer(highwater.predict("Qwen3-32B", gpus="1xRTX-3090", offload=False))
    assert everywhere.startswith("No: Qwen3-32B does not train at any length")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, "nothing set"),
        ({"lora": 16, "lora_base": "nf4"}, "LoRA of rank 16 beside a model in NF4"),
        (
            {"optimizer": "adamw-8bit", "parameters": "bf16", "micro_batches": 1},
            "AdamW with moments of 8 bits, parameters in bf16",
        ),
        ({"recompute": "all-but-attention"}, "attention's outputs kept"),
        ({"recompute": "none"}, "no recomputation"),
        ({"offload": "states"}, "the optimizer's moments in host memory"),
        ({"offload": True}, "all states in host memory"),
    ],
)
def test_settings_are_said_in_words(asked, words):
    plain = {"loss": "full", "allocator": "native"}
    found = highwater.predict("Qwen3-0.6B", gpus="1xH200-141GB", length=4096, **plain | asked)
    assert words in prediction_answer(found)


def test_degrees_are_said_in_words():
    asked = {"ulysses": [2], "ring": [2], "copies": [2], "length": 8192}
    said = prediction_answer(highwater.predict("Qwen3-4B", gpus="4xH200-141GB", **asked))
    assert (
        "each sequence shared by 2 GPUs (Ulysses), a ring of 2 and 2 copies of the states" in said
    )


def test_the_longest_that_may_fit_has_its_own_figures():
    """Where no length leaves the headroom, what is told is not of the shortest."""
    one: dict[str, Any] = {"loss": "full", "allocator": "native", "host_memory": "8GiB"}
    gpu: dict[str, Any] = {"gpus": 1, "gpu_memory": "12964MiB"}
    found = highwater.predict("Qwen3-0.6B", **gpu, **one, start_length=256, resolution=256)
    answer = found.answer
    assert answer is not None
    assert answer.capacity_tokens == 0 < answer.likely_edge_tokens
    (alone,) = highwater.predict("Qwen3-0.6B", **gpu, **one, length=answer.likely_edge_tokens).cells
    assert (answer.risk, answer.headroom_bytes) == (alone.risk, alone.headroom_bytes)
    assert answer.risk in ("likely", "tight")
    assert " may train up to " in prediction_answer(found)


def test_nothing_is_called_safe_that_leaves_less_than_was_asked_for():
    found = highwater.predict(
        "Qwen3-8B", gpus="4xA100-80GB", length="150k", headroom="30GiB", offload=False
    )
    fits = [row[2] for row in prediction_table(found).rows]
    for cell, said in zip(found.cells, fits, strict=True):
        assert (said == "safe") == bool(cell.capacity_tokens)
    assert prediction_answer(found).startswith("No: ") == ("safe" not in fits)


def test_what_would_fit_has_the_micro_batch_that_was_asked_for():
    asked: dict[str, Any] = {"gpus": "1xA100-80GB", "sequences_per_micro_batch": 4}
    would = what_would_fit("Qwen3-8B", length_tokens=102_400, **asked)
    assert would
    for each in would:
        if each.cell is not None:
            assert each.cell.settings.sequences_per_micro_batch == 4
    lowered = recommend("Qwen3-8B", length=102_400, **asked)
    assert lowered.chosen is not None
    assert lowered.chosen.is_lowered
    assert "1 sequence a micro-batch" in recommendation_answer(lowered)


def test_host_memory_that_was_read_or_named_is_not_called_assumed():
    usual = highwater.predict("Qwen3-8B", gpus="1xA100-80GB", offload=True)
    named = highwater.predict("Qwen3-8B", gpus="1xA100-80GB", offload=True, host_memory="144GiB")
    assert usual.memory_limit.usual_host is not None
    assert usual.memory_limit.host_bytes == named.memory_limit.host_bytes
    assert ", assumed)" in prediction_answer(usual)
    assert ", assumed)" not in prediction_answer(named)
    own = msgspec.structs.replace(usual.memory_limit, usual_host=THIS_MACHINE)
    read = msgspec.structs.replace(usual, memory_limit=own)
    assert ", assumed)" not in prediction_answer(read)
    (said,) = assumed_host(own.host_bytes, own.usual_host)
    assert "this machine's" in said


def test_gpus_for_rollout_stand_beside_those_that_train():
    for length in ("16k", "300k"):
        said = recommendation_answer(
            recommend("Qwen3-8B", gpus="4xA100-80GB", length=length, rollout_gpus=3)
        )
        assert " on 1 x A100-80GB and 3 for rollout" in said


def test_host_memory_that_nobody_said_is_named_as_such_where_states_live_there():
    said = prediction_answer(highwater.predict("Qwen3-235B-A22B", gpus="8xH20-96GB"))
    assert "of host memory (how much there is nobody said: `--host-memory`)" in said
    named = highwater.predict("Qwen3-235B-A22B", gpus="8xH20-96GB", host_memory="4TiB")
    assert "nobody said" not in prediction_answer(named)


def test_what_trials_measured_is_neither_safe_nor_tight():
    study = Path(__file__).parents[2] / "docs/results/find/qwen3-4b-card-full.jsonl"
    found = recommend("Qwen3-4B", gpus="1xH200-141GB", length="128k", studies=[study])
    assert found.chosen is not None
    assert (found.chosen.source, found.chosen.risk) == ("measured", None)
    said = recommendation_answer(found)
    assert said.startswith("Yes: ")
    assert "YaRN: 309.1 MiB of each GPU left" in said
    assert said.endswith(" Measured.")

"""The sentence that a prediction begins with: every number of it is the prediction's, and the words
are those of its settings.
"""

import pytest

import highwater
from highwater.pages.answer_sentence import prediction_answer
from highwater.units import format_bytes, format_tokens


def test_the_longest_length_comes_first_with_its_settings_and_what_is_left() -> None:
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


def test_at_one_length_it_is_yes_with_the_simplest_settings() -> None:
    found = highwater.predict("Qwen3-8B", gpus="4xA100-80GB", length="64k")
    first = next(cell for cell in found.cells if cell.capacity_tokens)
    said = prediction_answer(found)
    assert said.startswith("Yes: Qwen3-8B trains 65,536 tokens on 4 x A100-80GB with ")
    assert ("expandable segments" in said) == (first.cell.settings.allocator == "expandable")


def test_where_nothing_fits_it_is_no_and_what_the_nearest_lacks() -> None:
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
def test_settings_are_said_in_words(asked: dict[str, object], words: str) -> None:
    plain = {"loss": "full", "allocator": "native"}
    found = highwater.predict("Qwen3-0.6B", gpus="1xH200-141GB", length=4096, **plain | asked)
    assert words in prediction_answer(found)


def test_degrees_are_said_in_words() -> None:
    asked = {"ulysses": [2], "ring": [2], "copies": [2], "length": 8192}
    said = prediction_answer(highwater.predict("Qwen3-4B", gpus="4xH200-141GB", **asked))
    assert (
        "each sequence shared by 2 GPUs (Ulysses), a ring of 2 and 2 copies of the states" in said
    )

"""bitsandbytes' paged optimizers beside Hugging Face's step: by their source, on paper."""

from typing import Any

import pytest

import highwater
from highwater.errors import UsageError
from highwater.memory.formula.constants import Footprint
from highwater.model.model import load_model

HIDDEN, WIDTH, KEYS, LAYERS, WORDS = 4096, 14_336, 1024, 32, 128_256
"""Sizes of Llama-3.1-8B."""
MATRICES = LAYERS * (2 * HIDDEN * HIDDEN + 2 * KEYS * HIDDEN + 3 * HIDDEN * WIDTH)
TABLE = WORDS * HIDDEN


def footprint(gpus: str = "1xH100-80GB", **named: Any) -> Footprint:
    """One step of Llama-3.1-8B in 4,096 tokens with Liger's kernels."""
    usual: dict[str, Any] = {"length": "4k", "loss": "chunked", "activations": "gpu"}
    asked = {"allocator": "expandable", "micro_batches": 1, **usual, **named}
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

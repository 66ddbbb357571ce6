"""One process of a group: RoPE that depends on a document's length, packed and sharded, against
each document alone.

``torchrun --nproc-per-node N document_rope_cases.py RESULT FOLDER EXTENT``: writes, as rank 0, one
JSON object {case name: deviations}.
"""

import sys
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from rank_steps import Fields, built, deviations, each, first_step, place_of, results_in
from reference import load_textbook
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
)

from highwater.engine.data.batches import Document, pack, share_of
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout

VOCABULARY = 97
BORDER_TOKENS = 16
"""Documents up to here have one set of frequencies, longer ones another: for ``dynamic``, one for
each length."""
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 4.0, 6.0, 8.0],
}
BATCHES = {
    "alone": ((31,), (31,)),
    "both-sides": ((11, 41), (41, 11)),
    "many": ((16, 17, 1, 33, 33, 2), (17,)),
    "short-after-long": ((64,), (5, 9)),
}
"""Lengths of the documents of two micro-batches. Two ranks share the last of them in the middle, or
with padding."""
DEGREES = {1: [(1, 1, 1)], 2: [(2, 1, 1), (1, 2, 1)], 3: [(1, 3, 1)], 4: [(2, 2, 1)]}
"""Degrees of Ulysses and of the ring, and copies, by the number of processes."""
KINDS = ("phi3", "llama3", "yarn")
"""Models of each kind of RoPE that users have past the native length; phi3's is longrope."""
MORE_DEGREES = {4: [(1, 4, 1), (1, 2, 2)], 6: [(2, 3, 2), (2, 3, 1)]}
"""Degrees that those kinds meet with many documents, the first of each; and the rest, with every
model and batch, where a test is slow."""


@dataclass(frozen=True, kw_only=True)
class Case(Fields):
    """A model, documents, and a way to train them."""

    model: str
    batch: str
    strategy: str
    recompute: str
    ulysses: int
    ring: int
    copies: int
    dtype: str


def cases_for(processes: int, extent: str) -> list[Case]:
    """``every``: models with batches, in float64 and in another way; ``kinds`` and ``every more``:
    with more degrees, few or all of them in float64.
    """
    ways = [
        ("fsdp2", "layer", "float64"),
        ("fsdp", "none", "float64"),
        ("fsdp2", "none", "float32"),
    ]
    if extent == "kinds":
        every = list(product(KINDS, ["many"], MORE_DEGREES[processes][:1]))
    else:
        degrees = DEGREES if extent == "every" else MORE_DEGREES
        every = list(product(MODELS, BATCHES, degrees[processes]))
    return [
        Case(
            model=model,
            batch=batch,
            ulysses=ulysses,
            ring=ring,
            copies=copies,
            strategy=strategy,
            recompute=recompute,
            dtype=dtype,
        )
        for index, (model, batch, (ulysses, ring, copies)) in enumerate(every)
        for strategy, recompute, dtype in (
            (ways[0], ways[1 + index % 2]) if extent == "every" else ways[:1]
        )
    ]


def phi3() -> PreTrainedModel:
    rope = {**LONGROPE, "rope_theta": 1e4}
    longest = {"max_position_embeddings": 64, "original_max_position_embeddings": BORDER_TOKENS}
    return Phi3ForCausalLM(Phi3Config(**SHAPE, **longest, rope_parameters=rope))


def llama() -> PreTrainedModel:
    rope = {
        **LONGROPE,
        "rope_theta": 1e4,
        "original_max_position_embeddings": BORDER_TOKENS,
        "attention_factor": 1.3,
    }
    return LlamaForCausalLM(LlamaConfig(**SHAPE, max_position_embeddings=64, rope_parameters=rope))


def dynamic() -> PreTrainedModel:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}
    return LlamaForCausalLM(
        LlamaConfig(**SHAPE, max_position_embeddings=BORDER_TOKENS, rope_parameters=rope)
    )


def olmo3() -> PreTrainedModel:
    """One kind of RoPE for each kind of layer; the window holds every document."""
    own = {
        "full_attention": {
            **LONGROPE,
            "rope_theta": 1e4,
            "original_max_position_embeddings": BORDER_TOKENS,
        }
    }
    rope = {**own, "sliding_attention": {"rope_type": "default", "rope_theta": 1e3}}
    kinds = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}
    return Olmo3ForCausalLM(
        Olmo3Config(**SHAPE, **kinds, max_position_embeddings=64, rope_parameters=rope)
    )


def llama3() -> PreTrainedModel:
    borders = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {
        **borders,
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": BORDER_TOKENS,
    }
    return LlamaForCausalLM(LlamaConfig(**SHAPE, max_position_embeddings=64, rope_parameters=rope))


def yarn() -> PreTrainedModel:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": BORDER_TOKENS,
    }
    return LlamaForCausalLM(LlamaConfig(**SHAPE, max_position_embeddings=64, rope_parameters=rope))


MODELS = {
    "phi3": phi3,
    "llama": llama,
    "dynamic": dynamic,
    "olmo3": olmo3,
    "llama3": llama3,
    "yarn": yarn,
}


def save_models(folder: Path) -> None:
    """Each model with random float64 weights, as safetensors."""
    torch.manual_seed(0)
    for name, make in MODELS.items():
        make().double().save_pretrained(folder / name)


def main() -> None:
    result, folder, extent = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    with results_in(result) as results:
        results |= each(
            cases_for(dist.get_world_size(), extent), lambda case: run(case, folder / case.model)
        )


def run(case: Case, directory: Path) -> dict[str, float | str]:
    layout = Layout(
        gpus=dist.get_world_size(),
        ulysses_degree=case.ulysses,
        ring_degree=case.ring,
        replicate_degree=case.copies,
    )
    mesh, shared = place_of(layout)
    dtype, data_rank = getattr(torch, case.dtype), dist.get_rank() // layout.context_degree
    own = [
        share_of(pack([Document(ids, ids) for ids in documents(lengths, data_rank)]), shared)
        for lengths in BATCHES[case.batch]
    ]
    model = built(
        directory, mesh, dtype, shared=shared, strategy=case.strategy, recompute=case.recompute
    )
    return deviations(
        first_step(model, (mesh, shared), own, copies=case.copies),
        alone(directory, dtype, case.batch, layout.data_parallel_degree),
    )


def documents(lengths: tuple[int, ...], data_rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * data_rank + sum(lengths))
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]


@cache
def alone(
    directory: Path, dtype: torch.dtype, batch: str, data_ranks: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The mean loss over all documents, each through a plain model that has seen no other one;
    norm; clipped gradients.
    """
    model = load_textbook(directory, dtype)
    everything = [
        ids
        for rank in range(data_ranks)
        for lengths in BATCHES[batch]
        for ids in documents(lengths, rank)
    ]
    trained = sum(len(ids) - 1 for ids in everything)
    loss = torch.zeros((), dtype=dtype)
    for ids in everything:
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        loss = loss + nn.functional.cross_entropy(logits, ids[1:], reduction="sum") / trained
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), Hyperparameters().max_grad_norm)
    return loss.detach(), norm, {name: p.grad for name, p in model.named_parameters()}


if __name__ == "__main__":
    main()

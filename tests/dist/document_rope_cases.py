"""One process of a group: RoPE that depends on a document's length, against each document alone."""

from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import rank_steps
import torch
import torch.distributed as dist
from reference import SHAPE, load_textbook
from transformers import LlamaForCausalLM, Olmo3ForCausalLM, Phi3ForCausalLM, PreTrainedModel

from combinatorial import cover
from engine_models import built
from highwater.nouns.layout import Layout

BORDER_TOKENS = 16
"""Documents up to here have one set of frequencies, longer ones another: for ``dynamic``, one for
each length."""
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
DEGREES = {1: ["1 1 1"], 2: ["2 1 1", "1 2 1"], 3: ["1 3 1"], 4: ["2 2 1"]}
WAYS = ("fsdp2 layer float64", "fsdp none float64", "fsdp2 none float32")
KINDS = ("phi3", "llama3", "yarn")
"""Models of each kind of RoPE that users have past the native length; phi3's is longrope."""
MORE_DEGREES = {4: ["1 4 1", "1 2 2"], 6: ["2 3 2", "2 3 1"]}
"""Degrees that those kinds meet with many documents, the first of each; and the rest, with every
model and batch, where a test is slow."""


@dataclass(frozen=True, kw_only=True)
class Case(rank_steps.Fields):
    model: str
    batch: str
    strategy: str
    recompute: str
    ulysses: int
    ring: int
    copies: int
    dtype: str


def cases_for(processes: int, extent: str) -> list[Case]:
    """``pairs``: on one process and two every two of models, batches, degrees and ways meet, on
    more each stands in a case; ``every``: all of them in every way; ``kinds`` and
    ``every more``: with more degrees, few or all of them in float64.
    """
    degrees = DEGREES if extent in ("pairs", "every") else MORE_DEGREES
    factors = {
        "model": tuple(MODELS),
        "batch": tuple(BATCHES),
        "degrees": degrees[processes],
        "way": WAYS,
    }
    if extent == "pairs":
        chosen = cover([factors], strength=2 if processes <= 2 else 1, seed=0)
        every = [tuple(case[factor] for factor in factors) for case in chosen]
    else:
        if extent == "kinds":
            factors |= {"model": KINDS, "batch": ("many",), "degrees": degrees[processes][:1]}
        every = [
            case for case in product(*factors.values()) if extent == "every" or case[3] == WAYS[0]
        ]
    return [_case(*values) for values in every]


def _case(model: str, batch: str, degrees: str, way: str) -> Case:
    ulysses, ring, copies = map(int, degrees.split())
    strategy, recompute, dtype = way.split()
    return Case(
        model=model,
        batch=batch,
        ulysses=ulysses,
        ring=ring,
        copies=copies,
        strategy=strategy,
        recompute=recompute,
        dtype=dtype,
    )


_BORDER = {"rope_theta": 1e4, "original_max_position_embeddings": BORDER_TOKENS}
_OF_LAYERS = {
    "full_attention": {**LONGROPE, **_BORDER},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
MODELS: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "phi3": (
        Phi3ForCausalLM,
        {
            "original_max_position_embeddings": BORDER_TOKENS,
            "rope_parameters": {**LONGROPE, "rope_theta": 1e4},
        },
    ),
    "llama": (
        LlamaForCausalLM,
        {"rope_parameters": {**LONGROPE, **_BORDER, "attention_factor": 1.3}},
    ),
    "dynamic": (
        LlamaForCausalLM,
        {
            "max_position_embeddings": BORDER_TOKENS,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0},
        },
    ),
    # one kind of RoPE for each kind of layer; the window holds every document
    "olmo3": (
        Olmo3ForCausalLM,
        {"layer_types": list(_OF_LAYERS), "sliding_window": 64, "rope_parameters": _OF_LAYERS},
    ),
    "llama3": (
        LlamaForCausalLM,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                **_BORDER,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
        },
    ),
    "yarn": (
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, **_BORDER}},
    ),
}


def save_models(folder: Path) -> None:
    torch.manual_seed(0)
    for name, (kind, own) in MODELS.items():
        config = kind.config_class(**{**SHAPE, "pad_token_id": 0, **own})
        kind(config).double().save_pretrained(folder / name)


def results(folder: str, extent: str) -> dict[str, Any]:
    cases = cases_for(dist.get_world_size(), extent)
    return rank_steps.each(cases, lambda case: run(case, Path(folder, case.model)))


def run(case: Case, directory: Path) -> dict[str, float | str]:
    layout = Layout(
        gpus=dist.get_world_size(),
        ulysses_degree=case.ulysses,
        ring_degree=case.ring,
        replicate_degree=case.copies,
    )
    mesh, shared = rank_steps.place_of(layout)
    dtype = getattr(torch, case.dtype)
    own = rank_steps.micro_batches(BATCHES[case.batch], layout, shared)
    model = built(
        directory, mesh, dtype, shared=shared, strategy=case.strategy, recompute=case.recompute
    )
    return rank_steps.deviations(
        rank_steps.first_step(model, (mesh, shared), own, copies=case.copies),
        lambda: alone(directory, dtype, case.batch, layout.data_parallel_degree),
    )


@cache
def alone(directory: Path, dtype: torch.dtype, batch: str, data_ranks: int) -> rank_steps.Step:
    model = load_textbook(directory, dtype)
    rotary = type(model.model.rotary_emb)

    def anew() -> None:
        model.model.rotary_emb = rotary(model.config)

    return rank_steps.plain_step(model, BATCHES[batch], data_ranks, before=anew)

"""One process of a group: block-sparse training against plain Hugging Face with a dense mask."""

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import rank_steps
import torch
import torch.distributed as dist
from reference import SHAPE, load_textbook
from torch import Tensor, nn
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

from combinatorial import in_pairs
from engine_models import built
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.sparse_pattern import PatternType, SparsePatternConfig
from references.sparse_masks import dense, mask

BLOCK = 4
LENGTHS = ((33, 1, 33, 2, 41), (50, 7), (48, 32))
"""Of the documents of micro-batches: some are cut in the middle of a block, and padded; the last
ones are of whole blocks."""
PATTERNS: dict[str, dict[str, Any]] = {
    "dilated_sparse": {"sparsity_ratio": 0.4},
    "strided": {"sparsity_ratio": 0.4},
    "random": {"sparsity_ratio": 0.4},
    "local_window": {"local_window_size": 9},
    "global_local": {"local_window_size": 9, "global_tokens": 6},
    "block_top_k": {"sparsity_ratio": 0.4},
}
DEGREES = {1: [(1, 1)], 2: [(1, 1), (2, 1), (1, 2)], 4: [(2, 2), (1, 4)]}


@dataclass(frozen=True, kw_only=True)
class Case(rank_steps.Fields):
    pattern_type: PatternType
    recompute: str
    ulysses: int
    ring: int
    dtype: str

    @property
    def pattern(self) -> SparsePatternConfig:
        own = {"block_size": BLOCK, **PATTERNS[self.pattern_type]}
        pattern = Settings(attention="block_sparse", pattern_type=self.pattern_type, **own).pattern
        assert pattern is not None
        return pattern


def cases_for(processes: int) -> list[Case]:
    ways = [("layer", "float64"), ("none", "float32")]
    return [
        Case(pattern_type=kind, ulysses=ulysses, ring=ring, recompute=recompute, dtype=dtype)
        for kind, (ulysses, ring), (recompute, dtype) in in_pairs(
            list(PATTERNS), DEGREES[processes], ways
        )
        if kind != "block_top_k" or ring == 1
    ]


def save_models(folder: Path) -> None:
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE)).double().save_pretrained(folder)


def results(folder: str) -> dict[str, Any]:
    return rank_steps.each(cases_for(dist.get_world_size()), lambda case: run(case, Path(folder)))


def run(case: Case, directory: Path) -> dict[str, float | str]:
    layout = Layout(gpus=dist.get_world_size(), ulysses_degree=case.ulysses, ring_degree=case.ring)
    mesh, shared = rank_steps.place_of(layout)
    dtype = getattr(torch, case.dtype)
    model = built(
        directory, mesh, dtype, shared=shared, sparse=case.pattern, recompute=case.recompute
    )
    return rank_steps.deviations(
        rank_steps.first_step(
            model, (mesh, shared), rank_steps.micro_batches(LENGTHS, layout, shared)
        ),
        lambda: alone(directory, dtype, case.pattern, layout.data_parallel_degree),
    )


@cache
def alone(
    directory: Path, dtype: torch.dtype, pattern: SparsePatternConfig, data_ranks: int
) -> rank_steps.Step:
    """By a plain model with a mask of its own for each document."""
    model = load_textbook(directory, dtype)
    AttentionInterface.register("masked", partial(masked, pattern=pattern))
    model.set_attn_implementation("masked")
    return rank_steps.plain_step(model, LENGTHS, data_ranks)


def masked(
    _: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    __: Any,
    *,
    scaling: float,
    pattern: SparsePatternConfig,
    **___: Any,
) -> tuple[Tensor, None]:
    """Textbook attention with the whole mask, for each head."""
    seen = mask(pattern, query, key).repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return dense(query, key, value, seen, scaling)[0].transpose(1, 2), None

"""One process of a group: training with block-sparse attention, packed and sharded, against plain
Hugging Face with a dense mask, one document at a time.

``torchrun --nproc-per-node N sparse_training_cases.py FOLDER RESULT``: writes, as rank 0, one JSON
object {case name: deviations}.
"""

import json
import math
import sys
import traceback
from dataclasses import dataclass, fields
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import RecordGradients, _whole
from reference import SHAPE, load_textbook
from torch import Tensor, nn
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from highwater.engine.attention.registry import register
from highwater.engine.data.batches import Document, pack, share_of
from highwater.engine.models.build import build, read_config
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.training.step import Training, train_step
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.sparse_pattern import PatternType, SparsePatternConfig
from references.sparse_masks import mask

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
"""Degrees of Ulysses and of the ring, by the number of processes."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pattern, and a way to train with it."""

    pattern_type: PatternType
    recompute: str
    ulysses: int
    ring: int
    dtype: str

    @property
    def name(self) -> str:
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

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
        for kind, (ulysses, ring), (recompute, dtype) in product(PATTERNS, DEGREES[processes], ways)
        if kind != "block_top_k" or ring == 1
    ]


def save_model(folder: Path) -> None:
    """A model with random float64 weights, as safetensors."""
    torch.manual_seed(0)
    config = Qwen3Config(**SHAPE, intermediate_size=48, tie_word_embeddings=False)
    Qwen3ForCausalLM(config).double().save_pretrained(folder)


def main() -> None:
    folder, result = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    device = torch.device("cpu")
    process_mesh.join(device)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = process_mesh.shard_mesh(Layout(gpus=world), device)
    results = {}
    for case in cases_for(world):
        try:
            results[case.name] = run(case, folder, mesh, rank, world)
        except Exception:  # noqa: BLE001 -- one case's failure is its result, and the others go on
            results[case.name] = {"error": traceback.format_exc()}
    if rank == 0:
        result.write_text(json.dumps(results))
    process_mesh.leave()


def run(
    case: Case, directory: Path, mesh: dist.DeviceMesh, rank: int, world: int
) -> dict[str, float | str]:
    """Norm-relative deviations: loss, gradient norm, and the worst parameter's gradient."""
    dtype = getattr(torch, case.dtype)
    shared = process_mesh.sequence_groups(
        Layout(gpus=world, ulysses_degree=case.ulysses, ring_degree=case.ring), mesh
    )
    sharing = case.ulysses * case.ring
    model = build(
        read_config(str(directory), length_tokens=64, rope="auto"),
        directory=str(directory),
        mesh=mesh,
        attention=register("flash", shared=shared, sparse=case.pattern),
        loss="full",
        recompute=case.recompute,
        compute_dtype=dtype,
        master_dtype=dtype,
    )
    optimizer = RecordGradients(model.parameters(), lr=0.0)
    own = [
        share_of(pack([Document(ids, ids) for ids in documents(lengths, rank // sharing)]), shared)
        for lengths in LENGTHS
    ]
    loss, (norm, *_) = train_step(Training(policy=model, optimizer=optimizer, mesh=mesh), own)
    found = _whole(model, optimizer.gradients)
    expected_loss, expected_norm, expected = alone(directory, dtype, case.pattern, world // sharing)
    assert set(found) == set(expected)
    deviations = {
        n: float((found[n].view_as(expected[n]) - expected[n]).norm() / expected[n].norm())
        for n in expected
    }
    worst = max(deviations, key=deviations.__getitem__)
    return {
        "loss": abs(float(loss) / float(expected_loss) - 1),
        "norm": abs(float(norm) / float(expected_norm) - 1),
        "gradient": deviations[worst],
        "worst": worst,
    }


def documents(lengths: tuple[int, ...], data_rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * data_rank + sum(lengths))
    return [torch.randint(1, 97, (length,), generator=generator) for length in lengths]


@cache
def alone(
    directory: Path, dtype: torch.dtype, pattern: SparsePatternConfig, data_ranks: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The mean loss over all documents, each through a plain model with a mask of its own; norm;
    clipped gradients.
    """
    model = load_textbook(directory, dtype)
    AttentionInterface.register("masked", partial(masked, pattern=pattern))
    model.set_attn_implementation("masked")
    everything = [
        ids for rank in range(data_ranks) for lengths in LENGTHS for ids in documents(lengths, rank)
    ]
    trained = sum(len(ids) - 1 for ids in everything)
    loss = torch.zeros((), dtype=dtype)
    for ids in everything:
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        loss = loss + nn.functional.cross_entropy(logits, ids[1:], reduction="sum") / trained
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), Hyperparameters().max_grad_norm)
    return loss.detach(), norm, {name: p.grad for name, p in model.named_parameters()}


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
    seen = mask(pattern, query, key)
    groups = query.shape[1] // key.shape[1]
    key, value, seen = (each.repeat_interleave(groups, dim=1) for each in (key, value, seen))
    scores = (query @ key.mT * scaling).masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2), None


if __name__ == "__main__":
    main()

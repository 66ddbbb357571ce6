"""Run by test_models_that_ranks_share.py on each rank."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from collective_log import CollectiveLog
from cover_cases import VOCABULARY, lift_float32_casts, save_models
from rank_steps import of_all, place_of
from reference import SHAPE
from torch import Tensor
from transformers import SeedOssConfig

from engine_models import built, packed
from highwater.engine.activations.recompute import seeded
from highwater.engine.data.batches import Batch, share_of
from highwater.engine.models.decoder import Decoder
from highwater.engine.parallel.fsdp2 import local_shard
from highwater.engine.training.experience import forward_batch
from highwater.engine.training.step import Training, backward_of, train_step
from highwater.nouns.layout import Layout

__all__ = ["save_models"]

CPU = torch.device("cpu")
DEGREES = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2)}
LENGTHS = (5, 13, 1, 30, 8, 2)
CHANGED = (0, 3, 5)
"""Documents that are made others: the first, the longest, the last."""
LAYERS, KV_HEADS, HEAD_SIZE = (
    SHAPE[name] for name in ("num_hidden_layers", "num_key_value_heads", "head_dim")
)
DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16}
RECOMPUTES = ("none", "layer", "all-but-attention")
DRAWS = 2
STEPS = 12
DROPOUT = SeedOssConfig(**SHAPE, attention_dropout=0.0, residual_dropout=0.3)


def results(weights: str) -> dict[str, Any]:
    ulysses, ring = DEGREES[dist.get_world_size()]
    layout = Layout(gpus=ulysses * ring, ulysses_degree=ulysses, ring_degree=ring)
    ranks = Ranks(Path(weights), layout)
    own = {
        "dense": {name: changed_by_others(ranks, "dense", dtype) for name, dtype in DTYPES.items()},
        "moe": changed_by_others(ranks, "moe", torch.float64),
        "travelled": {recompute: travelled(ranks, recompute) for recompute in RECOMPUTES},
        "dropout": dropout(ranks) if layout.gpus == DRAWS else None,
    }
    return {"ranks": of_all(own)}


class Ranks:
    """The mesh, and models on it."""

    def __init__(self, weights: Path, layout: Layout) -> None:
        self.weights = weights
        self.mesh, self.shared = place_of(layout)

    def saved(self, name: str, dtype: torch.dtype, *, recompute: Any = "none") -> Decoder:
        model = self._built(self.weights / name, dtype, recompute)
        if dtype == torch.float64:
            lift_float32_casts(model)
        return model

    def with_dropout(self, recompute: Any) -> Decoder:
        with TemporaryDirectory() as empty:
            return self._built(empty, torch.float32, recompute, config=DROPOUT)

    def _built(
        self, folder: str | Path, dtype: torch.dtype, recompute: Any, *, config: Any = None
    ) -> Decoder:
        return built(
            folder,
            self.mesh,
            dtype,
            shared=self.shared,
            config=config,
            loss="chunked",
            recompute=recompute,
            master_dtype=torch.promote_types(dtype, torch.float32),
        )

    def training(self, model: Decoder) -> Training:
        return Training(
            policy=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            mesh=self.mesh,
            sequence=self.shared and self.shared.every,
        )

    def share(self, documents: list[Tensor]) -> Batch:
        return share_of(packed(*documents), self.shared)


def texts(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def changed_by_others(ranks: Ranks, name: str, dtype: torch.dtype) -> dict[str, float]:
    """For some documents in turn, each made another one: log-probabilities of this rank's tokens
    of all others that are not as before to the bit, and the largest difference; and of the tokens
    of its own those that are as before.
    """
    model = ranks.saved(name, dtype)
    texts_before, texts_after = texts(0), texts(1)

    def logprobs(documents: list[Tensor]) -> tuple[Tensor, Tensor]:
        batch = ranks.share(documents)
        (logprobs_N,) = forward_batch(model, [batch], device=CPU)
        return logprobs_N, batch.documents_N

    before_N, documents_N = logprobs(texts_before)
    found = {"compared": 0, "not as before": 0, "largest": 0.0, "unchanged": 0}
    for changed in CHANGED:
        others = (texts_before[:changed], texts_before[changed + 1 :])
        after_N, _ = logprobs([*others[0], texts_after[changed], *others[1]])
        others_N = documents_N != changed
        off = (after_N - before_N).abs()[others_N]
        found["compared"] += len(off)
        found["not as before"] += int(off.count_nonzero())
        found["largest"] = max(found["largest"], float(off.max()) if len(off) else 0.0)
        found["unchanged"] += int((after_N == before_N)[~others_N].sum())
    return found


def travelled(ranks: Ranks, recompute: str) -> dict[str, Any]:
    """What was begun in the two passes of a step."""
    model = ranks.saved("dense", torch.float64, recompute=recompute)
    batch = ranks.share(texts(0))
    with CollectiveLog() as log:

        def enter(phase: str) -> None:
            log.within = phase

        backward_of(ranks.training(model), [batch], enter=enter)
    return {
        "sent": log.counts("send"),
        "numbers": log.numbers("send"),
        "exchanges": log.counts("alltoall_base_"),
        "tokens": len(batch.input_ids_T),
    }


def dropout(ranks: Ranks) -> dict[str, Any]:
    """Whether a step is the same again, and when it recomputes."""
    batch, rank = ranks.share(texts(0)), dist.get_rank()

    def numbers(recompute: str = "none", *, step: int = 1, stream: int = rank) -> list[Tensor]:
        model = ranks.with_dropout(recompute)
        with seeded(seed=0, rank=stream, step=step, device=CPU):
            loss = backward_of(ranks.training(model), [batch])
        return [loss, *(local_shard(p.grad) for p in model.parameters() if p.grad is not None)]

    plain = numbers()
    others = {
        "again": numbers(),
        "layer": numbers("layer"),
        "all-but-attention": numbers("all-but-attention"),
        "another step": numbers(step=2),
        "another stream": numbers(stream=rank + dist.get_world_size()),
    }
    return {
        "equal": {name: all(map(torch.equal, plain, other)) for name, other in others.items()},
        "losses": losses(ranks, batch),
    }


def losses(ranks: Ranks, batch: Batch) -> list[float]:
    training = ranks.training(ranks.with_dropout("all-but-attention"))
    found: list[float] = []
    for step in range(STEPS):
        with seeded(seed=0, rank=dist.get_rank(), step=step, device=CPU):
            found.append(float(train_step(training, [batch])[0]))
    return found

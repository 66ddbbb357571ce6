"""One process of a group: steps of one micro-batch, whose gradients lie there from the start."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_steps import of_all, place_of
from torch import Tensor

from combinatorial import in_pairs
from engine_models import built
from highwater.engine.data.batches import Batch, Document, pack, share_of
from highwater.engine.models.decoder import Decoder
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.parallel.fsdp2 import local_shard
from highwater.engine.training.optimizers import make_optimizer
from highwater.engine.training.rank_run import rehearse
from highwater.engine.training.step import Training, train_step
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout

STEPS = 2
HYPERPARAMETERS = Hyperparameters(learning_rate=0.01, max_grad_norm=0.5)


@dataclass(frozen=True, kw_only=True)
class Case:
    strategy: str
    offload: bool
    critic: bool
    layout: Layout

    @property
    def name(self) -> str:
        words = f"{self.strategy}{' offload' * self.offload}{' critic' * self.critic}"
        return f"{words}{self.layout.suffix}"


SHARED = [
    Case(strategy="fsdp2", offload=False, critic=True, layout=Layout(gpus=2, ring_degree=2)),
    Case(strategy="fsdp", offload=True, critic=False, layout=Layout(gpus=2, ring_degree=2)),
    Case(strategy="fsdp2", offload=True, critic=False, layout=Layout(gpus=2, ulysses_degree=2)),
    Case(strategy="fsdp2", offload=True, critic=True, layout=Layout(gpus=2, replicate_degree=2)),
    Case(
        strategy="fsdp2",
        offload=False,
        critic=False,
        layout=Layout(gpus=4, ulysses_degree=2, ring_degree=2, replicate_degree=2),
    ),
]


def cases_for(processes: int) -> list[Case]:
    ways = in_pairs(("fsdp", "fsdp2"), (False, True), (False, True)) if processes <= 2 else ()
    return [
        *(
            Case(strategy=strategy, offload=offload, critic=critic, layout=Layout(gpus=processes))
            for strategy, offload, critic in ways
        ),
        *(case for case in SHARED if case.layout.gpus == processes),
    ]


def results(weights: str) -> dict[str, Any]:
    return {
        case.name: of_all(run(case, Path(weights), *place_of(case.layout)))
        for case in cases_for(dist.get_world_size())
    }


def run(
    case: Case, weights: Path, mesh: dist.DeviceMesh, shared: process_mesh.SequenceGroups | None
) -> dict[str, object]:
    kept, made = (
        train(training(case, weights, mesh, shared, keeps_gradients=keeps), shared)
        for keeps in (True, False)
    )
    return {
        "same numbers": len(kept.numbers) == len(made.numbers)
        and all(map(torch.equal, kept.numbers, made.numbers)),
        "kept": kept.gradients,
        "made": made.gradients,
    }


@dataclass(frozen=True)
class Trained:
    numbers: list[Tensor]
    gradients: list[int]
    """Gradients of all models before each forward pass, and after the last step."""


def train(trained: Training, shared: process_mesh.SequenceGroups | None) -> Trained:
    """Rehearse, and take some steps of one micro-batch."""
    numbers: list[Tensor] = []
    counts: list[int] = []
    models = [model for model, _ in trained.trained]

    def enter(phase: str) -> None:
        if phase == "forward":
            counts.append(gradients(models))

    rehearse(trained, batch(0, shared))
    for step in range(STEPS):
        loss, norms = train_step(trained, [batch(step, shared)], enter=enter)
        numbers += [loss, *norms]
    counts.append(gradients(models))
    return Trained(
        [*numbers, *(local_shard(p).detach() for model in models for p in model.parameters())],
        counts,
    )


def gradients(models: list[Decoder]) -> int:
    return sum(p.grad is not None for model in models for p in model.parameters())


def training(
    case: Case,
    weights: Path,
    mesh: dist.DeviceMesh,
    shared: process_mesh.SequenceGroups | None,
    *,
    keeps_gradients: bool,
) -> Training:
    def model(name: str, loss: str | None) -> Decoder:
        return built(
            weights / name,
            mesh,
            torch.bfloat16,
            shared=shared,
            loss=loss,
            master_dtype=torch.float32,
            strategy=case.strategy,
            offload=case.offload,
        )

    policy = model("dense", "chunked")
    critic = model("critic", None) if case.critic else None
    keeps = keeps_gradients
    return Training(
        policy=policy,
        optimizer=make_optimizer(policy, HYPERPARAMETERS, keeps_gradients=keeps),
        mesh=mesh,
        sequence=shared and shared.every,
        objective="ppo" if case.critic else "sft",
        critic=critic,
        critic_optimizer=None
        if critic is None
        else make_optimizer(critic, HYPERPARAMETERS, keeps_gradients=keeps),
        hyperparameters=HYPERPARAMETERS,
        keeps_gradients=keeps,
    )


def batch(step: int, shared: process_mesh.SequenceGroups) -> Batch:
    """Another document in every step, and on every rank or group of ranks that share one."""
    data_rank = dist.get_rank() // shared.degree
    generator = torch.Generator().manual_seed(10 * step + data_rank)
    ids = torch.randint(97, (24 + step,), generator=generator)
    return share_of(pack([Document(ids, ids, reward=float(step))]), shared)

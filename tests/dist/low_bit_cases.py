"""One process of a group: optimizers with moments of few bits, beside AdamW in float32."""

from pathlib import Path
from typing import Any

import host_state_cases
import torch
import torch.distributed as dist
from rank_steps import CPU, load_by_torch, of_all, place_of, same_states, state_bytes

from engine_models import built
from highwater.engine.data.batches import Batch, Document, pack
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.parallel.fsdp2 import local_shard
from highwater.engine.training.checkpoint import save_sharded
from highwater.engine.training.optimizers import fill_missing_gradients, make_optimizer
from highwater.engine.training.step import Training, backward_of, train_step
from highwater.model.held_bytes import device_state_bytes
from highwater.model.model import load_model
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings

LOSSY = {
    f"{optimizer}, {parameters}": Settings(
        optimizer=optimizer, parameters=parameters, accumulates=parameters == "float32"
    )
    for optimizer in ("adamw-8bit", "adamw-bf16")
    for parameters in ("float32", "bf16")
}
CONFIG = {**host_state_cases.CONFIG, "vocab_size": 256}
"""Of its matrices some have 8 bits as a whole and not as halves, and one never has."""
NUMBERS = Hyperparameters(learning_rate=0.01)
STEPS = 2


def results(path: str) -> dict[str, Any]:
    folder, (mesh, _) = Path(path), place_of(Layout(gpus=dist.get_world_size()))
    return {
        name: of_all(
            {"same gradients": gradients_are_adamws(settings, folder, mesh)}
            | {"copies": copies_are_equal(settings, folder, CPU)}
            | states(settings, folder, mesh)
            | resumed(settings, folder, mesh)
        )
        for name, settings in LOSSY.items()
    }


def training(settings: Settings, folder: Path, mesh: dist.DeviceMesh, *, seed: int = 1) -> Training:
    keeps = settings.keeps_gradients
    model = built(
        folder,
        mesh,
        torch.float32,
        loss="chunked",
        master_dtype=torch.float32 if settings.parameters == "float32" else torch.bfloat16,
        seed=seed,
    )
    return Training(
        policy=model,
        optimizer=make_optimizer(model, NUMBERS, name=settings.optimizer, keeps_gradients=keeps),
        mesh=mesh,
        hyperparameters=NUMBERS,
        keeps_gradients=keeps,
    )


def batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    ids = torch.randint(97, (24,), generator=generator)
    return pack([Document(ids, ids)])


def gradients_are_adamws(settings: Settings, folder: Path, mesh: dist.DeviceMesh) -> bool:
    """Whether gradients are bit by bit AdamW's with the same weights, rounded once in bfloat16."""
    own, exact = training(settings, folder, mesh), training(Settings(), folder, mesh)
    pairs = list(zip(own.policy.parameters(), exact.policy.parameters(), strict=True))
    with torch.no_grad():
        for mine, theirs in pairs:
            local_shard(theirs).copy_(local_shard(mine))
    for trained in (own, exact):
        backward_of(trained, [batch(0), batch(1)] if settings.accumulates else [batch(0)])
    return all(
        mine.grad is not None
        and theirs.grad is not None
        and torch.equal(local_shard(mine.grad), local_shard(theirs.grad).to(mine.dtype))
        for mine, theirs in pairs
    )


def states(settings: Settings, folder: Path, mesh: dist.DeviceMesh) -> dict[str, Any]:
    """Bytes that this rank's states take as the update begins, and those that are counted."""
    trained = training(settings, folder, mesh)
    fill_missing_gradients(trained.optimizer)
    shape = load_model(str(folder)).shape
    counted = device_state_bytes(shape, settings, device="cpu", shards=mesh.size())
    return {"allocated": state_bytes(trained), "counted": counted / mesh.size()}


def resumed(settings: Settings, folder: Path, mesh: dist.DeviceMesh) -> dict[str, Any]:
    went_on = training(settings, folder, mesh)
    for step in range(STEPS):
        train_step(went_on, [batch(step)])
    target = folder / f"sharded-{settings.label}-{mesh.size()}"
    written = save_sharded(went_on.policy, went_on.optimizer, target, mesh=mesh)
    fresh = training(settings, folder, mesh, seed=2)
    load_by_torch(fresh.policy, fresh.optimizer, target)
    loaded = same_states(went_on, fresh)
    for trained in (went_on, fresh):
        for step in range(STEPS, 2 * STEPS):
            train_step(trained, [batch(step)])
    return {"written": written, "loaded": loaded, "goes on": same_states(went_on, fresh)}


def copies_are_equal(settings: Settings, folder: Path, device: torch.device) -> bool:
    """Whether copies of the shards hold the same numbers after some steps of different tokens."""
    gpus = dist.get_world_size()
    if gpus == 1:
        return True
    mesh = process_mesh.shard_mesh(Layout(gpus=gpus, replicate_degree=gpus), device)
    trained = training(settings, folder, mesh)
    for step in range(STEPS):
        train_step(trained, [batch(step)])
    own = torch.cat([local_shard(p.detach()).flatten() for p in trained.policy.parameters()])
    every = [torch.empty_like(own) for _ in range(gpus)]
    dist.all_gather(every, own)
    return all(torch.equal(own, each) for each in every)

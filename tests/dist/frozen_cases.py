"""One process of a group: what steps change in a model with parameters that are not trained."""

from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_steps import gradients, place_of, values, whole

from engine_models import built
from highwater.engine.data.batches import Document, pack
from highwater.engine.training.optimizers import make_optimizer
from highwater.engine.training.step import Training, train_step
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout

CASES = {
    f"{strategy}{' offload' * offload}": (strategy, offload)
    for strategy, offload in product(("fsdp2", "fsdp"), (False, True))
}
HYPERPARAMETERS = Hyperparameters(learning_rate=0.1, weight_decay=0.5)
"""So that whatever decays shows."""
STEPS = 2


def results(weights: str) -> dict[str, Any]:
    mesh, _ = place_of(Layout(gpus=dist.get_world_size()))
    return {
        name: run(Path(weights), mesh, strategy, offload=offload)
        for name, (strategy, offload) in CASES.items()
    }


def run(
    weights: Path, mesh: dist.DeviceMesh, strategy: str, *, offload: bool
) -> dict[str, list[str]]:
    """Names of the parameters that steps changed, that have gradients after them."""
    model = built(weights, mesh, torch.float32, strategy=strategy, offload=offload)
    before = values(model)
    optimizer = make_optimizer(model, HYPERPARAMETERS)
    made = Training(policy=model, optimizer=optimizer, mesh=mesh, hyperparameters=HYPERPARAMETERS)
    ids = torch.arange(20) + dist.get_rank()
    for _ in range(STEPS):
        train_step(made, [pack([Document(ids, ids)]), pack([Document(ids[3:], ids[3:])])])
    after = values(model)
    states = {
        name: optimizer.state[p]["exp_avg"] if p in optimizer.state else None
        for name, p in model.named_parameters()
    }
    return {
        "changed": [name for name in before if not torch.equal(before[name], after[name])],
        "gradients": list(gradients(model)),
        "states": list(whole(states)),
    }

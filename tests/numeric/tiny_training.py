"""A training of the tiny model on one process, random weights and a small vocabulary."""

from pathlib import Path
from typing import Any

import torch

from engine_models import built
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.training.step import Training
from highwater.nouns.layout import Layout
from tiny_models import config_of, write_model


def trained(folder: Path, objective: Any) -> Training:
    write_model(folder, config_of("tiny"), vocab_size=64)
    mesh = process_mesh.shard_mesh(Layout(), torch.device("cpu"))

    def model(loss: Any) -> Any:
        return built(folder, mesh, torch.float32, loss=loss)

    policy = model(None if objective == "rw" else "chunked")
    return Training(
        policy=policy,
        optimizer=torch.optim.SGD(policy.parameters()),
        mesh=mesh,
        objective=objective,
        reference=model("chunked").requires_grad_(False) if objective in ("grpo", "dpo") else None,
    )

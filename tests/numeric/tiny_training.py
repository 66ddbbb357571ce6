"""A training of the tiny model on one process, random weights and a small vocabulary."""

import json
from pathlib import Path
from typing import Any

import torch

from highwater.engine.attention.registry import register
from highwater.engine.models.build import build, read_config
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.training.step import Training
from highwater.model.model import load_model
from highwater.nouns.layout import Layout


def trained(folder: Path, objective: Any) -> Training:
    """In the group that this process is in; ``folder`` gets the config."""
    tiny = load_model("tiny").directory
    config = json.loads(Path(tiny, "config.json").read_text()) | {"vocab_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    mesh = process_mesh.shard_mesh(Layout(), torch.device("cpu"))

    def model(loss: Any) -> Any:
        return build(
            read_config(str(folder), length_tokens=64, rope="auto"),
            directory=str(folder),
            mesh=mesh,
            attention=register("flash"),
            loss=loss,
            recompute="layer",
            compute_dtype=torch.float32,
        )

    policy = model(None if objective == "rw" else "chunked")
    return Training(
        policy=policy,
        optimizer=torch.optim.SGD(policy.parameters()),
        mesh=mesh,
        objective=objective,
        reference=model("chunked").requires_grad_(False) if objective in ("grpo", "dpo") else None,
    )

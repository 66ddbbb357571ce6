"""One process of a group: what some steps change in a model with parameters that its family does
not train. Started by ``rank_server.py`` or torchrun.

``torchrun --nproc-per-node N frozen_cases.py WEIGHTS RESULT``: writes, as rank 0, one JSON object
{case name: what was found}.
"""

import json
import sys
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from highwater.engine.attention.registry import register
from highwater.engine.data.batches import Document, pack
from highwater.engine.models.build import build, read_config
from highwater.engine.models.weights import name_in_files
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.parallel.fsdp2 import local_shard
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


def main() -> None:
    weights, result = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    device = torch.device("cpu")
    process_mesh.join(device)
    mesh = process_mesh.shard_mesh(Layout(gpus=dist.get_world_size()), device)
    found = {
        name: run(weights, mesh, strategy, offload=offload)
        for name, (strategy, offload) in CASES.items()
    }
    if dist.get_rank() == 0:
        result.write_text(json.dumps(found))
    process_mesh.leave()


def run(
    weights: Path, mesh: dist.DeviceMesh, strategy: str, *, offload: bool
) -> dict[str, list[str]]:
    """Names of the parameters that steps changed, that have gradients after them, and that the
    optimizer has states of.
    """
    model = build(
        read_config(str(weights), length_tokens=64, rope="auto"),
        directory=str(weights),
        mesh=mesh,
        attention=register("flash"),
        loss="full",
        recompute="layer",
        compute_dtype=torch.float32,
        strategy=strategy,
        offload=offload,
    )
    before = whole(model, [p.detach().clone() for p in model.parameters()])
    optimizer = make_optimizer(model, HYPERPARAMETERS)
    training = Training(
        policy=model, optimizer=optimizer, mesh=mesh, hyperparameters=HYPERPARAMETERS
    )
    ids = torch.arange(20) + dist.get_rank()
    for _ in range(STEPS):
        train_step(training, [pack([Document(ids, ids)]), pack([Document(ids[3:], ids[3:])])])
    after = whole(model, [p.detach() for p in model.parameters()])
    parameters = list(model.parameters())
    return {
        "changed": [name for name in before if not torch.equal(before[name], after[name])],
        "gradients": list(whole(model, [p.grad for p in parameters])),
        "states": list(
            whole(
                model,
                [
                    optimizer.state[p]["exp_avg"] if p in optimizer.state else None
                    for p in parameters
                ],
            )
        ),
    }


def whole(model: nn.Module, of_parameters: list[Tensor | None]) -> dict[str, Tensor]:
    """By the names that files have, put together from all ranks, flat; without what no rank has."""
    own = [None if tensor is None else local_shard(tensor).flatten() for tensor in of_parameters]
    ranks: list[list[Tensor | None]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, own)
    names = [name_in_files(name) for name, _ in model.named_parameters()]
    parts = {
        name: [p for p in of_ranks if p is not None]
        for name, of_ranks in zip(names, zip(*ranks, strict=True), strict=True)
    }
    return {name: torch.cat(found) for name, found in parts.items() if found}


if __name__ == "__main__":
    main()

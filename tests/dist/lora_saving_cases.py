"""One process of a group that trains adapters and saves them. Started by ``rank_groups.py`` or
torchrun.

``torchrun --nproc-per-node N lora_saving_cases.py FOLDER MODE``: ``save`` trains a step, saves
shards, adapters and merged weights, and trains another; ``resume`` loads the shards into a fresh
model and trains the other step. Each writes the adapters that it ends with.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lora_cases import fill_adapters
from rank_steps import built, documents
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from highwater.engine.data.batches import Document, pack
from highwater.engine.models.adapters import name_for_peft
from highwater.engine.models.decoder import Decoder
from highwater.engine.models.weights import name_in_files
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.parallel.fsdp2 import local_shard
from highwater.engine.training.checkpoint import save_pretrained, save_sharded
from highwater.engine.training.optimizers import make_optimizer
from highwater.engine.training.step import Training, train_step
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout
from highwater.nouns.objective import Lora

LORA = Lora(rank=4, alpha=8)
PACKED = Lora(rank=4, alpha=8, base="nf4")
EXPERTS = Lora(rank=4, alpha=8, targets="q_proj,gate_proj,up_proj,down_proj")
MODELS = ("llama", "phi3", "scalar", "packed", "qwen3_moe")
UNMERGED = ("packed", "qwen3_moe")
LENGTHS = (17, 9, 24, 8)
TOKENS = tuple(range(3, 40))


def main() -> None:
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    process_mesh.join(torch.device("cpu"))
    ranks = dist.get_world_size()
    for name in MODELS:
        # of a model in NF4 each rank has all
        layout = Layout(gpus=ranks, replicate_degree=ranks if name == "packed" else 1)
        mesh = process_mesh.shard_mesh(layout, torch.device("cpu"))
        {"save": save, "resume": resume}[mode](name, folder, mesh)
    process_mesh.leave()


def save(name: str, folder: Path, mesh: dist.DeviceMesh) -> None:
    model, optimizer = made(name, folder, mesh)
    train(model, optimizer, mesh)
    save_sharded(model, optimizer, folder / f"shards-{name}", mesh=mesh)
    how: dict[str, Any] = {"mesh": mesh, "dtype": torch.float32, "source": folder / name}
    written = save_pretrained(model, folder / f"adapter-{name}", **how)
    merged = 0
    if name not in UNMERGED:
        merged = save_pretrained(model, folder / f"merged-{name}", **how, merged=True)
    if dist.get_rank() == 0:
        (folder / f"bytes-{name}").write_text(f"{written} {merged}")
        save_file({"told": told(model)}, folder / f"told-{name}.safetensors")
    else:
        told(model)
    train(model, optimizer, mesh)
    write(model, optimizer, folder / f"went-on-{name}.safetensors")


def resume(name: str, folder: Path, mesh: dist.DeviceMesh) -> None:
    model, optimizer = made(name, folder, mesh)
    options = StateDictOptions(ignore_frozen_params=True)
    state: dict[str, Any] = {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.load(state, checkpoint_id=folder / f"shards-{name}", no_dist=mesh.size() == 1)
    set_model_state_dict(model, state["model"], options=StateDictOptions(strict=False))
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    train(model, optimizer, mesh)
    write(model, optimizer, folder / f"resumed-{name}.safetensors")


def made(name: str, folder: Path, mesh: dist.DeviceMesh) -> tuple[Decoder, torch.optim.Optimizer]:
    model = built(
        folder / name,
        mesh,
        torch.float32,
        loss=None if name == "scalar" else "chunked",
        lora={"packed": PACKED, "qwen3_moe": EXPERTS}.get(name, LORA),
    )
    fill_adapters(model, lambda each: name_for_peft(name_in_files(each)))
    return model, make_optimizer(model, Hyperparameters(learning_rate=0.01))


def train(model: Decoder, optimizer: torch.optim.Optimizer, mesh: dist.DeviceMesh) -> None:
    """A step on this rank's part of the same micro-batches, whatever the number of ranks."""
    every = [
        pack([Document(ids, ids, reward=1.0) for ids in documents((length, length - 2), 0)])
        for length in LENGTHS
    ]
    own = every[dist.get_rank() :: mesh.size()]
    objective = "rw" if model.gives_scalars else "sft"
    train_step(Training(policy=model, optimizer=optimizer, mesh=mesh, objective=objective), own)


@torch.no_grad()
def told(model: Decoder) -> torch.Tensor:
    """Log-probabilities of all tokens but the first, or the number of the last one."""
    ids, positions = torch.tensor(TOKENS), torch.arange(len(TOKENS))
    if model.gives_scalars:
        return model(ids, positions, positions[-1:], (len(TOKENS),))
    return model(ids, positions, positions[:-1], ids[1:], (len(TOKENS),)).logprobs_N


def write(model: Decoder, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Everything trained and both its moments, whole."""
    own = {
        f"{name_in_files(name)} {kind}": local_shard(each).flatten()
        for name, p in model.named_parameters()
        if p.requires_grad
        for kind, each in (
            ("value", p.detach()),
            *((key, optimizer.state[p][key]) for key in ("exp_avg", "exp_avg_sq")),
        )
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    if dist.get_rank() == 0:
        is_packed = model.lora is not None and model.lora.base == "nf4"
        shards = ranks[:1] if is_packed else ranks
        save_file({name: torch.cat([each[name] for each in shards]) for name in own}, path)


if __name__ == "__main__":
    main()

"""One process of a group that trains adapters and saves them: by a folder and a mode.

``save`` trains a step, saves shards, adapters and merged weights, and trains another; ``resume``
loads the shards into a fresh model and trains the other step. Each writes its last adapters.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lora_cases import fill_adapters
from rank_steps import documents, load_by_torch, place_of, write_states
from safetensors.torch import save_file

from engine_models import built
from highwater.engine.data.batches import Document, pack
from highwater.engine.models.adapters import name_for_peft
from highwater.engine.models.decoder import Decoder
from highwater.engine.models.weights import name_in_files
from highwater.engine.training.checkpoint import save_pretrained, save_sharded
from highwater.engine.training.optimizers import make_optimizer
from highwater.engine.training.step import Training, train_step
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout
from highwater.nouns.objective import Lora

LORA = Lora(rank=4, alpha=8)
PACKED = Lora(rank=4, alpha=8, base="nf4")
EXPERTS = Lora(rank=4, alpha=8, targets="q_proj,gate_proj,up_proj,down_proj")
MODELS = ("llama", "phi3", "scalar", "packed", "qwen3_moe", "gemma4_text")
UNMERGED = ("packed", "qwen3_moe")
LENGTHS = (17, 9, 24, 8)
TOKENS = tuple(range(3, 40))


def results(folder: str, mode: str) -> None:
    mesh, _ = place_of(Layout(gpus=dist.get_world_size()))
    for name in MODELS:
        {"save": save, "resume": resume}[mode](name, Path(folder), mesh)


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
    write_states(model, optimizer, folder / f"went-on-{name}.safetensors", mesh)


def resume(name: str, folder: Path, mesh: dist.DeviceMesh) -> None:
    model, optimizer = made(name, folder, mesh)
    load_by_torch(model, optimizer, folder / f"shards-{name}", strict=False)
    train(model, optimizer, mesh)
    write_states(model, optimizer, folder / f"resumed-{name}.safetensors", mesh)


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
    ids, positions = torch.tensor(TOKENS), torch.arange(len(TOKENS))
    if model.gives_scalars:
        return model(ids, positions, positions[-1:], (len(TOKENS),))
    return model(ids, positions, positions[:-1], ids[1:], (len(TOKENS),)).logprobs_N

"""One process of a group that saves, or goes on from what another group saved. Started by torchrun with a mode and a folder.

``save``     trains a step, saves the shards, trains another; writes the end of it as ``went-on-<model>-<processes>``.
``resume N`` loads the shards that N processes saved into a fresh model, trains the other step; writes ``resumed-<model>-<N>-<M>``.
``hf``       trains a step past the native length and saves Hugging Face weights; writes the logits of the model in memory.

Loading is by torch alone: the shards are torch.distributed.checkpoint's, and read without this project.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from cases import VOCABULARY, documents
from logits import TOKENS
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from highwater.attention.dense import register
from highwater.engine import pretrained
from highwater.engine.checkpoint import save_pretrained, save_sharded
from highwater.engine.data import Batch, Document, pack
from highwater.engine.model import LanguageModel, build, read_config
from highwater.engine.step import Trainer, make_optimizer, train_step
from highwater.parallel import mesh as process_mesh
from highwater.spec.layout import Layout

MODELS = ("dense", "tied", "moe")
MICRO_BATCHES = 4
"""Of a step, over all ranks."""
LENGTH = 200
"""Of the Hugging Face weights; the native length is 64."""
NARROW = 24 * 1024
"""Bytes of a weights file: several for each model."""


def main() -> None:
    mode, folder, rest = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    device = torch.device("cpu")
    process_mesh.join(device)
    world = torch.distributed.get_world_size()
    mesh = process_mesh.shard_mesh(Layout(gpus=world), device)
    for name in MODELS:
        {"save": save, "resume": resume, "hf": hf}[mode](name, folder, mesh, *map(int, rest))
    process_mesh.leave()


def save(name: str, folder: Path, mesh: torch.distributed.DeviceMesh) -> None:
    model = built(folder / "weights" / name, mesh, torch.float64, length=64, recompute="layer")
    optimizer = make_optimizer(model)
    train_step(Trainer(policy=model, optimizer=optimizer, mesh=mesh), micro_batches(mesh))
    save_sharded(model, optimizer, folder / f"sharded-{name}-{mesh.size()}", mesh=mesh)
    train_step(Trainer(policy=model, optimizer=optimizer, mesh=mesh), micro_batches(mesh))
    write_state(model, optimizer, folder / f"went-on-{name}-{mesh.size()}")


def resume(name: str, folder: Path, mesh: torch.distributed.DeviceMesh, saved_by: int) -> None:
    """A model with other weights, and without recompute: neither is in what was saved."""
    model = built(folder / "configs" / name, mesh, torch.float64, length=64, recompute="none")
    optimizer = make_optimizer(model)
    weights = get_model_state_dict(model)
    if name == "tied":
        del weights["causal_lm.lm_head.weight"]
    state: dict[str, Any] = {"model": weights, "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder / f"sharded-{name}-{saved_by}", no_dist=mesh.size() == 1)
    set_model_state_dict(model, state["model"], options=StateDictOptions(strict=name != "tied"))
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train_step(Trainer(policy=model, optimizer=optimizer, mesh=mesh), micro_batches(mesh))
    write_state(model, optimizer, folder / f"resumed-{name}-{saved_by}-{mesh.size()}")


def hf(name: str, folder: Path, mesh: torch.distributed.DeviceMesh) -> None:
    source, target = folder / "weights" / name, folder / f"hf-{name}"
    pretrained.FILE_BYTES = NARROW
    model = built(source, mesh, torch.float32, length=LENGTH, recompute="layer")
    train_step(Trainer(policy=model, optimizer=make_optimizer(model), mesh=mesh), micro_batches(mesh))
    for _ in range(2):  # the second overwrites the first
        save_pretrained(model, target, mesh=mesh, dtype=torch.float32, source=source)
    ids = torch.arange(LENGTH) * 7 % VOCABULARY
    with torch.no_grad():
        statistics = model(ids, torch.arange(LENGTH), torch.arange(LENGTH - 1), ids[1:], (LENGTH,))
    weights = {key.removeprefix("causal_lm."): whole(shard) for key, shard in get_model_state_dict(model).items()}
    if torch.distributed.get_rank() == 0:
        config = read_config(str(source), length_tokens=LENGTH, rope="auto")
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        plain.load_state_dict(weights)
        with torch.no_grad():
            logits = plain.eval()(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
        save_file({"logits": logits, "engine_logprobs": statistics.logprobs_N}, folder / f"expected-{name}.safetensors")


def built(directory: Path, mesh: torch.distributed.DeviceMesh, dtype: torch.dtype, *, length: int, recompute: Any) -> LanguageModel:
    return build(
        read_config(str(directory), length_tokens=length, rope="auto"),
        directory=str(directory),
        mesh=mesh,
        attention=register("flash"),
        loss="full",
        recompute=recompute,
        mlp_tiles=None if directory.name == "moe" else 1,  # by default recomputation changes the order of the MLP's sums
        compute_dtype=dtype,
        master_dtype=dtype,
        seed=1,
    )


def micro_batches(mesh: torch.distributed.DeviceMesh) -> list[Batch]:
    """This rank's part of the same micro-batches, whatever the number of ranks."""
    every = [pack([Document(*pair) for pair in documents("packed", 0, number)]) for number in range(MICRO_BATCHES)]
    return every[mesh.get_local_rank() :: mesh.size()]


def write_state(model: LanguageModel, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Every parameter and moment, whole."""
    state = {}
    for name, parameter in model.named_parameters():
        plain = name.replace("_checkpoint_wrapped_module.", "")
        state[plain] = whole(parameter.detach())
        state |= {f"{plain} {key}": whole(value) for key, value in optimizer.state[parameter].items()}
    if torch.distributed.get_rank() == 0:
        save_file(state, path)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


if __name__ == "__main__":
    main()

"""One process of a group that saves, or goes on from what another group saved: by a mode and a
folder.

``save``     trains a step, saves the shards, trains another; writes the end of it as
``went-on-<case>-<processes>``. ``resume N`` loads the shards that N processes saved into a fresh
model, trains the other step; writes ``resumed-<case>-<N>-<M>``. ``hf``       trains a step past the
native length and saves Hugging Face weights; writes the logits of the model in memory. A mode that
ends in ``-copies`` is of two copies of the shards, by FSDP2 alone. ``load N`` has the engine load
what N processes saved, by the same strategy and by the other; writes what was loaded as
``loaded-<case>-<strategy>-<N>-<M>``, where ``save`` writes it as ``saved-<case>-<N>``.

``resume`` loads by torch alone: the shards are torch.distributed.checkpoint's, and read without
this project.
"""

from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import documents
from logits import TOKENS
from rank_steps import load_by_torch, place_of, values, write_states
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from engine_models import built
from highwater.engine.data.batches import Batch, Document, pack
from highwater.engine.models import pretrained
from highwater.engine.models.build import read_config
from highwater.engine.models.decoder import Decoder
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.parallel.fsdp2 import local_shard
from highwater.engine.training.checkpoint import load_sharded, save_pretrained, save_sharded
from highwater.engine.training.optimizers import make_optimizer
from highwater.engine.training.step import Training, train_step
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout
from tables import deep

REWARD = "reward"
MODELS = ("dense", "tied", "moe", REWARD)
STRATEGIES = ("fsdp2", "fsdp")
CASES = [f"{model}-{strategy}" for model, strategy in product(MODELS, STRATEGIES)]
COPIED = ("tied-fsdp2", "moe-fsdp2", *deep("reward-fsdp2"))
MICRO_BATCHES = 4
LENGTH = 200
"""Of the Hugging Face weights; the native length is 64."""
NARROW = 24 * 1024
"""Bytes of a weights file: several for each model."""


def results(mode: str, folder: str, *rest: str) -> None:
    mode, _, copied = mode.partition("-")
    layout = Layout(gpus=dist.get_world_size(), replicate_degree=2 if copied else 1)
    mesh, _ = place_of(layout)
    for case in COPIED if copied else CASES:
        {"save": save, "resume": resume, "load": load, "hf": hf}[mode](
            case, Path(folder), mesh, *map(int, rest)
        )


def save(case: str, folder: Path, mesh: dist.DeviceMesh) -> None:
    model = model_of(case, folder / "weights", mesh)
    optimizer = make_optimizer(model, Hyperparameters())
    train(model, optimizer, mesh)
    save_sharded(model, optimizer, folder / f"sharded-{case}-{mesh.size()}", mesh=mesh)
    write_states(model, optimizer, folder / f"saved-{case}-{mesh.size()}", mesh)
    train(model, optimizer, mesh)
    write_states(model, optimizer, folder / f"went-on-{case}-{mesh.size()}", mesh)


def resume(case: str, folder: Path, mesh: dist.DeviceMesh, saved_by: int) -> None:
    """A model with other weights, and without recompute: neither is in what was saved."""
    model = model_of(case, folder / "configs", mesh, recompute="none")
    optimizer = make_optimizer(model, Hyperparameters())
    tied = "causal_lm.lm_head.weight" if case.startswith("tied") else ""
    load_by_torch(model, optimizer, folder / f"sharded-{case}-{saved_by}", without=tied)
    train(model, optimizer, mesh)
    write_states(model, optimizer, folder / f"resumed-{case}-{saved_by}-{mesh.size()}", mesh)


def load(case: str, folder: Path, mesh: dist.DeviceMesh, saved_by: int) -> None:
    name = case.partition("-")[0]
    for strategy in loading(case, mesh.size()) if mesh.ndim == 1 else ("fsdp2",):
        model = model_of(f"{name}-{strategy}", folder / "configs", mesh, recompute="none")
        optimizer = make_optimizer(model, Hyperparameters())
        places = storages(model, optimizer)
        load_sharded(model, optimizer, folder / f"sharded-{case}-{saved_by}", mesh=mesh)
        assert storages(model, optimizer) == places, "nothing is allocated anew"
        target = folder / f"loaded-{case}-{strategy}-{saved_by}-{mesh.size()}"
        write_states(model, optimizer, target, mesh)


def loading(case: str, processes: int) -> tuple[str, ...]:
    """Strategies by which so many processes load what a case saved."""
    other = case.endswith("fsdp2") == (processes == 2)
    return deep(*STRATEGIES) or (STRATEGIES[other],)


def storages(model: Decoder, optimizer: torch.optim.Optimizer) -> list[int]:
    """Where this rank's weights and moments lie."""
    return [
        local_shard(each).untyped_storage().data_ptr()
        for parameter in model.parameters()
        for each in (parameter.detach(), *optimizer.state[parameter].values())
    ]


def hf(case: str, folder: Path, mesh: dist.DeviceMesh) -> None:
    source, target = folder / "weights" / case.partition("-")[0], folder / f"hf-{case}"
    pretrained.FILE_BYTES = NARROW
    model = model_of(case, folder / "weights", mesh, torch.float32, length_tokens=LENGTH)
    train(model, make_optimizer(model, Hyperparameters()), mesh)
    for _ in range(2):  # the second overwrites the first
        save_pretrained(model, target, mesh=mesh, dtype=torch.float32, source=source)
    # Before a forward pass without a backward pass, which leaves what it gathered.
    weights = values(model, copies=process_mesh.copies(mesh))
    told = engine_told(model)
    if dist.get_rank() == 0:
        logits = logits_of(weights, source, gives_scalars=model.gives_scalars)
        save_file({"logits": logits, "engine": told}, folder / f"expected-{case}.safetensors")


def engine_told(model: Decoder) -> Tensor:
    """Log-probabilities of all tokens but the first, or a reward model's number of the last one."""
    ids, positions = torch.tensor(TOKENS), torch.arange(LENGTH)
    with torch.no_grad():
        if model.gives_scalars:
            return model(ids, positions, positions[-1:], (LENGTH,))
        return model(ids, positions, positions[:-1], ids[1:], (LENGTH,)).logprobs_N


def logits_of(weights: dict[str, Tensor], source: Path, *, gives_scalars: bool) -> Tensor:
    """What plain transformers makes of the weights, flat."""
    config = read_config(str(source), length_tokens=LENGTH, rope="auto")
    if gives_scalars:
        config.num_labels = 1
    kind = AutoModelForSequenceClassification if gives_scalars else AutoModelForCausalLM
    plain = kind.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(weights[name].view_as(parameter))
        return plain(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]


def model_of(
    case: str,
    directories: Path,
    mesh: dist.DeviceMesh,
    dtype: torch.dtype = torch.float64,
    **how: Any,
) -> Decoder:
    name, _, strategy = case.partition("-")
    # by default recomputation changes the order of the MLP's sums
    how |= {"mlp_tiles": None if name == "moe" else 1, "loss": None if name == REWARD else "full"}
    return built(directories / name, mesh, dtype, strategy=strategy, seed=1, **how)


def train(model: Decoder, optimizer: torch.optim.Optimizer, mesh: dist.DeviceMesh) -> None:
    """A step on this rank's part of the same micro-batches, whatever the number of ranks."""
    every = [
        pack([Document(*pair) for pair in documents("packed", 0, number)[:4]])
        for number in range(MICRO_BATCHES)
    ]
    own: list[Batch] = every[dist.get_rank() :: mesh.size()]
    objective = "rw" if model.gives_scalars else "sft"
    train_step(Training(policy=model, optimizer=optimizer, mesh=mesh, objective=objective), own)

"""One process of a group: AdamW with its moments in host memory, beside AdamW without."""

from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_steps import load_by_torch, of_all, same_states, state_bytes
from torch import Tensor

from dispatched import Dispatched
from engine_models import assembled
from highwater.engine.data.batches import Batch, Document, pack
from highwater.engine.training.checkpoint import save_sharded
from highwater.engine.training.host_states import HostStateAdamW
from highwater.engine.training.step import Training, train_step
from highwater.model.held_bytes import device_state_bytes, update_bytes
from highwater.model.model import load_model
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from tables import deep
from tiny_models import TINY
from trial_specs import trial_in

CASES: dict[str, dict[str, Any]] = {
    "several micro-batches": {},
    "one micro-batch": {"accumulates": False},
    "critic": {"objective": "ppo", "critic": True},
    "critic, one micro-batch": {"objective": "ppo", "critic": True, "accumulates": False},
    "copies": {},
}
if find_spec("peft") is not None:
    CASES["LoRA"] = {"lora": 4}
CONFIG = {
    **TINY,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 251,
    "intermediate_size": 144,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
"""The vocabulary, which no number of ranks divides, leaves the last one fewer rows."""
NUMBERS = Hyperparameters(learning_rate=0.01, max_grad_norm=0.1)
"""Every step is clipped."""
STEPS = 2
PIECE = 1024
"""Numbers of a piece: shards of one piece, of several, and of a part of one."""
WAYS = {"resident": False, "on the host": True}
SAVED_AS_OTHERS = ("one micro-batch", "critic, one micro-batch")
"""Cases that differ from others in how they are trained alone; `make test-all` saves them, too."""


def cases_for(processes: int) -> list[str]:
    """A process alone has no copies."""
    return [name for name in CASES if processes > 1 or name != "copies"]


def results(folder: str) -> dict[str, Any]:
    return {name: of_all(run(name, Path(folder))) for name in cases_for(dist.get_world_size())}


def run(name: str, folder: Path) -> dict[str, Any]:
    resident, on_host = (training(name, folder, on_host=on_host) for on_host in WAYS.values())
    norms = [[norms_of(each, step) for step in range(STEPS)] for each in (resident, on_host)]
    found: dict[str, Any] = {
        "optimizers": [type(optimizer).__name__ for _, optimizer in on_host.trained],
        "same norms": norms[0] == norms[1],
        "clipped": all(norm > NUMBERS.max_grad_norm for step in norms[0] for norm in step),
        "same": same_states(resident, on_host),
    }
    if name in SAVED_AS_OTHERS and not deep(name):
        return found | memory(name, folder)
    saved = dict(zip(WAYS, (resident, on_host), strict=True))
    where = {way: folder / f"{way}-{name}-{dist.get_world_size()}" for way in saved}
    for way, each in saved.items():
        save_sharded(each.policy, each.optimizer, where[way], mesh=each.mesh)
    fresh: dict[str, Training] = {}
    for way, other in product(WAYS, WAYS):
        resumed = fresh[f"{way}, then {other}"] = training(
            name, folder, on_host=WAYS[other], seed=1 if name == "LoRA" else 2
        )
        load_by_torch(resumed.policy, resumed.optimizer, where[way], strict=False)
    found["loaded"] = {way: same_states(resident, each, models=1) for way, each in fresh.items()}
    found["goes on"] = {}
    if resident.critic is None:  # which is saved by itself
        norms_of(resident, STEPS)
        for way, each in fresh.items():
            norms_of(each, STEPS)
            found["goes on"][way] = same_states(resident, each)
    return found | memory(name, folder)


def training(name: str, folder: Path, *, on_host: bool, seed: int = 1) -> Training:
    copies = dist.get_world_size() if name == "copies" else 1
    settings = settings_of(name, on_host=on_host)
    layout = Layout(gpus=dist.get_world_size(), replicate_degree=copies)
    fields = {"layout": layout, "settings": settings, "hyperparameters": NUMBERS, "seed": seed}
    micro_batches = 2 if settings.accumulates else 1
    trained = assembled(trial_in(folder, micro_batches=micro_batches, **fields))
    for _, optimizer in trained.trained:
        if isinstance(optimizer, HostStateAdamW):
            optimizer._piece = PIECE
    return trained


def settings_of(name: str, *, on_host: bool) -> Settings:
    return Settings(loss="chunked", offload="states" if on_host else False, **CASES[name])


def norms_of(trained: Training, step: int) -> list[float]:
    count = 2 if trained.keeps_gradients else 1
    _, norms = train_step(trained, [batch(10 * step + number) for number in range(count)])
    return [float(norm) for norm in norms]


def batch(number: int) -> Batch:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    ids = torch.randint(97, (24,), generator=generator)
    return pack([Document(ids, ids, reward=float(number % 3))])


def memory(name: str, folder: Path) -> dict[str, Any]:
    """Bytes of this rank's states."""
    trained, settings = training(name, folder, on_host=True), settings_of(name, on_host=True)
    made: list[int] = []

    def see(func: object, _args: object, found: object) -> None:
        """The bytes of empty tensors that are made."""
        if func is torch.ops.aten.new_empty.default and isinstance(found, Tensor):
            made.append(found.untyped_storage().nbytes())

    for model, optimizer in trained.trained:
        assert isinstance(optimizer, HostStateAdamW)
        optimizer._piece = 2**22
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    with Dispatched(see):
        trained.optimizer.step()
    shape, shards = load_model(str(folder)).shape, trained.mesh.size(trained.mesh.ndim - 1)
    counted = device_state_bytes(shape, settings, device="cpu", shards=shards) / shards
    buffers = update_bytes(shape, settings, shards=shards)
    return {"states": [state_bytes(trained), counted], "buffers": [sum(made), buffers]}

"""One process of a group that trains, saves checkpoints of a run and goes on from them.
``save FOLDER`` trains two steps of each case, saves, and trains two more; ``resume FOLDER WAY...``
goes on from what was saved in each way that is named, and writes the same. ``damaged FOLDER`` has
every rank meet a checkpoint that only the last of them finds damaged. ``export FOLDER`` writes a
model for others twice.
"""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from host_state_cases import CONFIG
from rank_steps import of_all, states
from safetensors.torch import save_file
from torch import Tensor

from engine_models import assembled
from highwater.engine.data.batches import Document, pack
from highwater.engine.training.export import export
from highwater.engine.training.run_checkpoints import RunCheckpoints
from highwater.engine.training.step import Training, train_step
from highwater.errors import HighwaterError
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.training import RunState
from tables import deep
from tiny_models import write_model
from trial_specs import trial_in

CASES: dict[str, dict[str, Any]] = {"tied": {}, "critic": {"objective": "ppo", "critic": True}}
if find_spec("peft") is not None:
    CASES["lora"] = {"lora": 4}
LOSSY: dict[str, dict[str, Any]] = {}
if find_spec("torchao") is not None:
    LOSSY = {name: {"optimizer": name} for name in ("adamw-8bit", "adamw-bf16")}
WAYS: dict[str, dict[str, Any]] = {
    "shards": {},
    "fsdp1": {"strategy": "fsdp"},
    "copies": {"copies": 2},
    "states": {"offload": "states"},
    "offload": {"offload": True},
}
IN_EACH_CASE = {"critic": ("fsdp1", "copies"), "lora": ("shards", "offload")}
"""Ways in which ``critic`` and ``lora`` go on; `make test-all` has both in every one."""
SAVED, STEPS = 2, 4
MICRO_BATCHES = 4


def results(mode: str, folder: str, *ways: str) -> None:
    modes = {"save": save, "resume": resume, "damaged": damaged, "export": exported}
    modes[mode](Path(folder), *ways)


def save(folder: Path) -> None:
    """As fsdp2, and of few bits too, whose states alone are written."""
    for case in (*CASES, *LOSSY):
        own = training(case, folder)
        losses = [train(own, step) for step in range(1, SAVED + 1)]
        saved = folder / f"run-{case}-{dist.get_world_size()}"
        RunCheckpoints(saved).save(own, state(losses))
        write(own, folder / f"saved-{case}-{dist.get_world_size()}")
        if case in CASES:
            finish(own, folder / f"went-on-{case}-{dist.get_world_size()}", losses)


def ways_of(case: str, ways: Sequence[str]) -> list[str]:
    chosen = ways if deep(case) else IN_EACH_CASE.get(case, ways)
    return [way for way in ways if way in chosen and (case, way) != ("lora", "fsdp1")]


def resume(folder: Path, saved_by: str, *ways: str) -> None:
    for case in CASES:
        for way in ways_of(case, ways):
            own = training(case, folder, seed=1 if case == "lora" else 7, **WAYS[way])
            found = RunCheckpoints(folder / f"run-{case}-{saved_by}").resume(own)
            assert found.step == SAVED
            place = f"{case}-{way}-{saved_by}-{dist.get_world_size()}"
            write(own, folder / f"loaded-{place}")
            finish(own, folder / f"resumed-{place}", list(found.losses))
            if way == "fsdp1":
                save_again(own, folder, case, place)
    for case in LOSSY if "shards" in ways else ():
        own, place = training(case, folder, seed=7), f"{case}-{saved_by}-{dist.get_world_size()}"
        try:
            RunCheckpoints(folder / f"run-{case}-{saved_by}").resume(own)
        except HighwaterError as error:
            tell(folder / f"refused-{place}.json", [error.problem, error.hint])
        else:
            write(own, folder / f"loaded-{place}")


def save_again(own: Training, folder: Path, case: str, place: str) -> None:
    """What FSDP1 goes on to save is read by FSDP2."""
    of_run = RunCheckpoints(folder / f"again-{place}")
    of_run.save(own, state([0.0] * STEPS))
    fresh = training(case, folder, seed=7)
    of_run.resume(fresh)
    write(fresh, folder / f"read-again-{place}")


def damaged(folder: Path) -> None:
    own = training("tied", folder)
    try:
        RunCheckpoints(folder / "damaged").resume(own)
    except HighwaterError as error:
        tell(folder / "damaged.json", [error.problem, error.hint])


def exported(folder: Path) -> None:
    own = training("tied", folder)
    train(own, 1)
    try:
        for _ in range(2):
            export(own, folder / "out" / "model", source=folder / "tied")
    except HighwaterError as error:
        tell(folder / "exported.json", [error.problem, error.hint])


def tell(path: Path, own: list[str]) -> None:
    every = of_all(own)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(every))


def training(
    case: str,
    folder: Path,
    *,
    seed: int = 1,
    copies: int = 1,
    strategy: Any = "fsdp2",
    offload: Any = False,
) -> Training:
    settings = Settings(
        strategy=strategy, offload=offload, **(CASES | LOSSY)[case], loss="chunked", mlp_tiles=1
    )
    layout = Layout(gpus=dist.get_world_size(), replicate_degree=copies)
    directory = folder / "tied"
    if dist.get_rank() == 0 and not directory.exists():
        write_model(directory, CONFIG, tie_word_embeddings=True, vocab_size=256)
    dist.barrier()
    fields = {"layout": layout, "settings": settings, "micro_batches": 2, "seed": seed}
    numbers = Hyperparameters(learning_rate=0.001)
    return assembled(trial_in(directory, hyperparameters=numbers, **fields))


def train(own: Training, step: int) -> float:
    """A step on this rank's part of the same micro-batches, whatever the number of ranks."""
    every = []
    for number in range(MICRO_BATCHES):
        generator = torch.Generator().manual_seed(10 * step + number)
        documents = [torch.randint(256, (length,), generator=generator) for length in (24, 17)]
        every.append(pack([Document(ids, ids, reward=float(number % 2)) for ids in documents]))
    loss, _ = train_step(own, every[dist.get_rank() :: dist.get_world_size()])
    return float(loss)


def state(losses: list[float]) -> RunState:
    return RunState(step=len(losses), losses=tuple(losses), corpus_digest="c", run_digest="r")


def finish(own: Training, path: Path, losses: list[float]) -> None:
    for step in range(SAVED + 1, STEPS + 1):
        losses.append(train(own, step))
    write(own, path, {"losses": torch.tensor(losses, dtype=torch.float64)})


def write(own: Training, path: Path, more: dict[str, Tensor] | None = None) -> None:
    found = dict(more or {})
    for number, (model, optimizer) in enumerate(own.trained):
        of_model = states(model, optimizer, own.mesh)
        found |= {f"{number} {name}": each for name, each in of_model.items()}
    if dist.get_rank() == 0:
        save_file(found, path)

"""One process of a group that trains, saves checkpoints of a run and goes on from them. Started by
``rank_groups.py`` or torchrun.

``save FOLDER`` trains two steps of each case, saves, and trains two more; ``resume FOLDER WAY...``
goes on from what was saved in each way that is named, and writes the same. ``damaged FOLDER`` has
every rank meet a checkpoint that only the last of them finds damaged. ``export FOLDER`` writes a
model for others twice.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_cases import whole
from host_state_cases import CONFIG
from safetensors.torch import save_file
from torch import Tensor

from highwater.engine.data.batches import Document, pack
from highwater.engine.models.weights import name_in_files
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.parallel.fsdp2 import local_shard
from highwater.engine.training.export import export
from highwater.engine.training.rank_context import RankContext
from highwater.engine.training.rank_run import assemble
from highwater.engine.training.run_checkpoints import RunCheckpoints
from highwater.engine.training.step import Training, train_step
from highwater.errors import HighwaterError
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from highwater.nouns.training import RunState
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
SAVED, STEPS = 2, 4
"""Steps until it is saved, and all of them."""
MICRO_BATCHES = 4
"""Of a step, over all ranks."""


def main() -> None:
    mode, folder, ways = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    process_mesh.join(torch.device("cpu"))
    {"save": save, "resume": resume, "damaged": damaged, "export": exported}[mode](folder, *ways)
    process_mesh.leave()


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


def resume(folder: Path, saved_by: str, *ways: str) -> None:
    for case in CASES:
        for way in ways:
            if way == "fsdp1" and case == "lora":
                continue
            own = training(case, folder, seed=1 if case == "lora" else 7, **WAYS[way])
            found = RunCheckpoints(folder / f"run-{case}-{saved_by}").resume(own)
            assert found is not None
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
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
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
    device, gpus = torch.device("cpu"), dist.get_world_size()
    layout = Layout(gpus=gpus, replicate_degree=copies)
    directory = folder / "tied"
    if dist.get_rank() == 0 and not directory.exists():
        write_model(directory, CONFIG, tie_word_embeddings=True, vocab_size=256)
    dist.barrier()
    return assemble(
        trial_in(
            directory,
            layout=layout,
            settings=settings,
            micro_batches=2,
            hyperparameters=Hyperparameters(learning_rate=0.001),
            seed=seed,
        ),
        RankContext(
            device=device,
            kernel="flash",
            mesh=process_mesh.shard_mesh(layout, device),
            shared=None,
            nccl_bytes=0,
        ),
    )


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
    """Train the steps that are left, and write what came of it."""
    for step in range(SAVED + 1, STEPS + 1):
        losses.append(train(own, step))
    write(own, path, {"losses": torch.tensor(losses, dtype=torch.float64)})


def write(own: Training, path: Path, more: dict[str, Tensor] | None = None) -> None:
    """Every trained parameter and all that its optimizer keeps of it, whole, in float32."""
    found = dict(more or {})
    for number, (model, optimizer) in enumerate(own.trained):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                place = f"{number} {name_in_files(name)}"
                found[place] = whole(parameter.detach(), own.mesh)
                for kind in ("exp_avg", "exp_avg_sq", "step"):
                    moment: Any = optimizer.state.get(parameter, {}).get(kind)
                    if moment is not None:
                        moment = local_shard(moment)
                        moment = getattr(moment, "dequantize", moment.float)()
                    gathered = whole(moment, own.mesh)
                    found[f"{place} {kind}"] = gathered.unique() if kind == "step" else gathered
    if dist.get_rank() == 0:
        save_file(found, path)


if __name__ == "__main__":
    main()

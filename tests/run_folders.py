"""Trainings of the tiny model on one process, and folders with their checkpoints."""

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_models import tiny_training
from highwater.engine.data.batches import Document, pack
from highwater.engine.data.store import MANIFEST_FILE, record_of, write_manifest
from highwater.engine.training.optimizers import make_optimizer
from highwater.engine.training.run_checkpoints import RunCheckpoints
from highwater.engine.training.step import Training, train_step
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.training import RunState

EVALUATIONS = {1: 1.5, 2: 1.0, 3: 2.0}
"""Losses by step: of three checkpoints the second is the best, and the first is not kept."""


def training(folder: Path) -> Training:
    """In the group that this process is in; weights are those of a seed."""
    folder.mkdir(exist_ok=True)
    made = tiny_training(folder, "sft")
    optimizer = make_optimizer(made.policy, Hyperparameters(learning_rate=0.01))
    return dataclasses.replace(made, optimizer=optimizer)


def state(step: int, **changes: object) -> RunState:
    fields = {
        "losses": tuple(float(number) for number in range(step)),
        "evaluation_loss": EVALUATIONS.get(step),
        "corpus_digest": "c",
        "run_digest": "r",
    }
    return RunState(step=step, **(fields | changes))  # pyright: ignore[reportArgumentType]


def step_of(own: Training, step: int) -> None:
    ids = torch.randint(64, (40,), generator=torch.Generator().manual_seed(step))
    train_step(own, [pack([Document(ids, ids)])])


def trained_and_saved(folder: Path) -> Iterator[tuple[int, list[Tensor]]]:
    """Train and save three steps below ``folder``; yields each and what was saved."""
    own = training(folder / "model")
    checkpoints = RunCheckpoints(folder)
    for step in EVALUATIONS:
        step_of(own, step)
        checkpoints.save(own, state(step))
        yield step, numbers_of(own)


def numbers_of(own: Training) -> list[Tensor]:
    return [
        getattr(each, "to_local", each.clone)().clone()
        for parameter in own.policy.parameters()
        for each in (parameter.detach(), *own.optimizer.state[parameter].values())
    ]


def are_equal(own: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(own, others, strict=True))


def approve(checkpoint: Path) -> None:
    """Write the manifest of what lies in a checkpoint now, as who means harm can."""
    (checkpoint / MANIFEST_FILE).unlink()
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    write_manifest(checkpoint, {str(p.relative_to(checkpoint)): record_of(p) for p in files})


def copied(folder: Path, target: Path) -> Path:
    """A copy of a run's folder, to be damaged; returns its folder of checkpoints."""
    shutil.copytree(folder, target)
    return target / "checkpoints"


class Harmful:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)

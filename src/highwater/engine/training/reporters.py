"""Reporters: rank 0 sends the statistics of each step to TensorBoard, W&B, MLflow or Trackio.

A reporter is one function here and a name in ``ReporterName``: it opens a run by its package's own
client, and returns functions that log a step's values and end the run. A package that raises (no
network, a full disk) is reported once, and training goes on without it.

The run's id is kept in a file: a resumed training reports to the same run.
"""

import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from highwater.engine.training.statistics import Reduced
from highwater.nouns.secrets import REASON, kept
from highwater.nouns.trial import ReporterName

_PROJECT = "highwater"
"""Project, or experiment, where the package's own environment variable names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReportedRun:
    """A run in an experiment tracker (such as W&B), to be opened or continued."""

    directory: Path
    """Folder for the files that packages write."""
    id: str
    """Unique id, kept when the training goes on."""
    step: int
    """First step that will be reported."""

    @property
    def name(self) -> str:
        """Name to show: the training's folder, and the first 6 characters of the id."""
        return f"{self.directory.parent.name}-{self.id[:6]}"


_Open = tuple[Callable[[Mapping[str, float], int], object], Callable[[], object]]
"""Functions that log numbers of a step, and that end the run."""


def _tensorboard(run: _ReportedRun) -> _Open:
    # Steps from run.step on are trained again: drop what an interrupted run reported of them.
    writer: Any = import_module("torch.utils.tensorboard.writer").SummaryWriter(
        str(run.directory / "tensorboard"), purge_step=run.step
    )

    def log(numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def _wandb(run: _ReportedRun) -> _Open:
    wandb: Any = import_module("wandb")
    has_key = "WANDB_MODE" in os.environ or wandb.login(prompt=False, verify=False)
    opened = wandb.init(
        project=os.environ.get("WANDB_PROJECT", _PROJECT),
        id=run.id,
        name=run.name,
        dir=str(run.directory),
        mode=None if has_key else "offline",  # online, W&B would ask for a key, and wait
        resume="allow",
        # Send numbers alone: a command line, a diff or printed text may have a secret.
        settings=wandb.Settings(
            console="off",
            quiet=True,
            disable_code=True,
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
        ),
    )
    return opened.log, opened.finish


def _mlflow(run: _ReportedRun) -> _Open:
    # MLflow's seven retries of an unreachable server take minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    mlflow: Any = import_module("mlflow")
    entities: Any = import_module("mlflow.entities")
    address = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{run.directory / 'mlflow.db'}")
    client, tag = mlflow.MlflowClient(address), "highwater.run"
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
    experiment = client.get_experiment_by_name(name)
    where = experiment.experiment_id if experiment else client.create_experiment(name)
    same = client.search_runs([where], f"tags.`{tag}` = '{run.id}'")
    opened = same[0] if same else client.create_run(where, tags={tag: run.id}, run_name=run.name)
    number = opened.info.run_id
    client.update_run(number, status="RUNNING")

    def log(numbers: Mapping[str, float], step: int) -> None:
        now_ms = time.time_ns() // 1_000_000
        metrics = [entities.Metric(name, each, now_ms, step) for name, each in numbers.items()]
        client.log_batch(number, metrics=metrics)

    return log, lambda: client.set_terminated(number)


def _trackio(run: _ReportedRun) -> _Open:
    trackio: Any = import_module("trackio")
    opened = trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", _PROJECT),
        name=run.name,
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return opened.log, opened.finish


_OPENED_BY: Mapping[ReporterName, Callable[[_ReportedRun], _Open]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}


class Reports:
    """Sends statistics to the reporters ``names``; the first ``write`` opens their runs."""

    def __init__(self, names: Sequence[ReporterName], directory: Path) -> None:
        """``directory``: folder for the packages' files; made at the first ``write``."""
        self._names, self._directory = dict.fromkeys(names), directory
        self._open: dict[ReporterName, _Open] | None = None

    def write(self, step: int, numbers: Mapping[str, Reduced]) -> None:
        """Send a step's statistics; a tuple is sent as one value for each rank."""
        if self._open is None:
            self._open = {}
            for name in self._names:
                self._try(name, lambda name=name: self._start(name, step))
        scalars = _scalars(numbers)
        for name, (log, _) in tuple(self._open.items()):
            self._try(name, lambda log=log: log(scalars, step))

    def close(self) -> None:
        """End the runs."""
        for name, (_, finish) in tuple((self._open or {}).items()):
            self._try(name, finish)

    def _start(self, name: ReporterName, step: int) -> None:
        assert self._open is not None
        self._directory.mkdir(parents=True, exist_ok=True)
        file = self._directory / "run-id"
        if (step <= 1 and not self._open) or not file.exists():  # a training that begins
            file.write_text(uuid.uuid4().hex)
        run = _ReportedRun(directory=self._directory, id=file.read_text(), step=step)
        self._open[name] = _OPENED_BY[name](run)

    def _try(self, name: ReporterName, call: Callable[[], object]) -> None:
        """Call the tracker; if it raises, print that and leave the tracker out from now on."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 -- a client's own, on which no training depends
            assert self._open is not None
            self._open.pop(name, None)
            why = kept(" ".join(f"{type(error).__name__}: {error}".split()), most=REASON)
            sys.stdout.write(f"nothing more is reported to {name}: {why}\n")


def _scalars(numbers: Mapping[str, Reduced]) -> dict[str, float]:
    """Return all values but None, by name; those of a tuple as ``name/rank 0``, ..."""
    scalars: dict[str, float | int | None] = {}
    for name, value in numbers.items():
        if isinstance(value, tuple):
            scalars |= {f"{name}/rank {rank}": each for rank, each in enumerate(value)}
        else:
            scalars[name] = value
    return {name: value for name, value in scalars.items() if value is not None}

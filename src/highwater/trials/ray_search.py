"""The part of a Ray cluster that a request means: joined, read, and asked for its trials."""

import atexit
from functools import partial
from pathlib import Path

from highwater.errors import UsageError
from highwater.model.model import load_model
from highwater.nouns.foreign_request import command_of, program_of
from highwater.nouns.foreign_trainer import foreign_name
from highwater.nouns.request import Request
from highwater.nouns.trainer import OURS
from highwater.trials.engine_trial import EngineLauncher
from highwater.trials.foreign_trial import ForeignLauncher
from highwater.trials.model_files import model_files
from highwater.trials.ray_cluster import RayCluster
from highwater.trials.ray_node import LauncherIn, Needs
from highwater.trials.ray_placement import Chosen, choose
from highwater.trials.ray_runner import RayRunner
from highwater.trials.trial_log import LogLayout

_joined: dict[str | None, RayCluster] = {}
"""The cluster of each address that was joined and not left: from a plan to its answer."""


def nodes_of(request: Request) -> Chosen:
    """The nodes that a request means, of its cluster, which stays joined until ``leave``.

    Raises MachineError where there is no cluster, or no node of it can run the trials.
    """
    _refuse_what_is_here(request)
    needs = _needs(request)
    nodes = _cluster(request).read_nodes(needs)
    chosen = choose(nodes, request.device, request.gpus)
    return chosen._replace(notes=(*chosen.notes, needs.model.way))


def runner_of(request: Request, log_layout: LogLayout) -> RayRunner:
    """The runner of a request's trials, on those nodes."""
    return RayRunner(
        _cluster(request),
        nodes_of(request).nodes,
        _launcher_in(request),
        _needs(request),
        log_directory=Path(request.log_dir),
        log_layout=log_layout,
        most_trials=request.max_concurrent_trials,
    )


def _launcher_in(request: Request) -> LauncherIn:
    """What makes the launcher of a request's trials on a node, where their logs lie meanwhile."""
    usual = {"timeout_s": request.timeout_s, "allow_busy": request.allow_busy}
    trainer = foreign_name(request.trainer)
    if trainer is not None:
        return partial(ForeignLauncher, **usual, command=command_of(request, trainer))
    saves_in = request.checkpoint_dir
    return partial(
        EngineLauncher,
        **usual,
        checkpoint_directory=None if saves_in is None else Path(saves_in),
        profiling=request.memory_profiler,
        tensorboard=request.tensorboard,
        logit_range=request.logit_range,
    )


def leave(request: Request) -> None:
    """Leave the cluster of a request; nothing where it is not joined."""
    cluster = _joined.pop(request.address, None)
    if cluster is not None:
        atexit.unregister(cluster.close)
        cluster.close()


def _cluster(request: Request) -> RayCluster:
    cluster = _joined.get(request.address)
    if cluster is None:
        cluster = _joined[request.address] = RayCluster(request.address)
        atexit.register(cluster.close)
    return cluster


def _needs(request: Request) -> Needs:
    return Needs(
        on_gpus=request.device != "cpu",
        model=model_files(Path(load_model(request.model).directory)),
        data_module=None if request.data is None else request.data.partition(":")[0],
        is_engine=request.trainer == OURS,
        program=program_of(request),
    )


def _refuse_what_is_here(request: Request) -> None:
    """Raise UsageError for what takes a GPU of this machine."""
    if request.prediction == "trace":
        raise UsageError(
            "`--prediction trace` traces for a GPU of this machine, and trials run on others",
            hint="use `--prediction formula`",
        )

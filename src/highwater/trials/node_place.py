"""Which machine of a search, or a training, across several this is, and where they meet.

A request names both, or Slurm does.
"""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from highwater.errors import UsageError
from highwater.nouns.hardware import Machine
from highwater.nouns.request import Request
from highwater.nouns.trial import Device
from highwater.trials.node_folder import NodeFolder, NodeReady
from highwater.trials.node_share import serve
from highwater.trials.nodes import await_nodes, ready_here

_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
"""Variables of Slurm that name one start of one step of a job. Source: srun(1)."""
_NODE = "SLURM_NODEID"


def node_of(request: Request, environment: Mapping[str, str] = os.environ) -> int:
    """The number of this machine, from 0; raises UsageError where nobody says it."""
    if (request.node_rank or 0) >= request.nodes:
        raise UsageError(
            f"machine {request.node_rank} of {request.nodes}: they count from 0",
            hint=f"use `--node-rank {request.nodes - 1}` or less",
        )
    if request.nodes == 1:
        return 0
    if request.node_rank is not None:
        return request.node_rank
    if environment.get(_NODE, "").isdecimal():
        return int(environment[_NODE])
    raise UsageError(
        f"nobody says which of the {request.nodes} machines this is",
        hint="use `--node-rank 0` here, and 1 and up on the others; `srun` says it by itself",
    )


def folder_of(request: Request, environment: Mapping[str, str] = os.environ) -> NodeFolder:
    """The folder in which the machines meet; raises UsageError where nobody names one."""
    node = node_of(request, environment)
    if request.rendezvous is not None:
        return NodeFolder(Path(request.rendezvous), node=node, nodes=request.nodes)
    if "SLURM_JOB_ID" not in environment:
        raise UsageError(
            f"nobody says where the {request.nodes} machines meet",
            hint=f"use `--rendezvous {request.log_dir}/nodes-1` on every one: a new directory that "
            "all of them see",
        )
    job = "-".join(environment.get(name, "0") for name in _JOB)
    path = Path(request.log_dir) / f"nodes-{job}"
    return NodeFolder(path, node=node, nodes=request.nodes)


def of_all_nodes(machine: Machine, nodes: int) -> Machine:
    """The machine with the GPUs of as many like it, for a plan of trials across them."""
    return msgspec.structs.replace(machine, gpus=machine.gpus * nodes)


class MachineShare(NamedTuple):
    """What each machine gives."""

    device: Device
    gpus: int
    config_digest: str
    """Of the model's configuration, as it lies there."""


@contextmanager
def meeting(request: Request, share: MachineShare) -> Generator[NodeFolder | None]:
    """The folder of all machines, which have come by then and are let go at the end; None where
    there is this one alone.
    """
    if request.nodes == 1:
        yield None
        return
    folder = folder_of(request)
    if folder.node > 0:
        raise UsageError(
            f"machine {folder.node} runs its share of what the first one asks, and asks nothing",
            hint=f"type the command there, with `--node-rank {folder.node}`",
        )
    ready = _ready(request, share)
    folder.refuse_used()
    folder.enter(ready)
    try:
        await_nodes(folder, ready)
        yield folder
    finally:
        folder.dissolve()


def serve_node(request: Request, share: MachineShare) -> None:
    """Run this machine's share of every trial, or of the training, until it is over."""
    serve(folder_of(request), _ready(request, share))


def _ready(request: Request, share: MachineShare) -> NodeReady:
    return ready_here(
        device=share.device,
        gpus=share.gpus,
        config_digest=share.config_digest,
        allow_busy=request.allow_busy,
    )

"""Which machine of a search across several this is, and where they meet.

A request names both, or Slurm does.
"""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from highwater.errors import UsageError
from highwater.run.engine_ranks import RunRanks, run_ranks_here
from highwater.run.node_folder import NodeFolder, NodeReady
from highwater.run.nodes import RanksOnNodes, await_nodes, ready_here, serve
from highwater.spec.hardware import Machine
from highwater.spec.request import Request
from highwater.spec.study import Question

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


@contextmanager
def gathered(request: Request, question: Question) -> Generator[RunRanks]:
    """What runs the ranks of a question's trials: this machine, or all, which have come by then and
    are let go at the end.
    """
    if request.nodes == 1:
        yield run_ranks_here
        return
    folder = folder_of(request)
    if folder.node > 0:
        raise UsageError(
            f"machine {folder.node} does not search: it runs its share of the trials",
            hint=f"type `highwater find` there, with `--node-rank {folder.node}`",
        )
    await_nodes(folder, _ready(request, question))
    try:
        yield RanksOnNodes(folder)
    finally:
        folder.dissolve()


def serve_node(request: Request, question: Question) -> None:
    """Run this machine's share of every trial, until the search is over."""
    serve(folder_of(request), _ready(request, question))


def _ready(request: Request, question: Question) -> NodeReady:
    return ready_here(
        device=question.device,
        gpus=max(cell.layout.machine_gpus for cell in question.cells),
        config_digest=question.model.config_digest,
        allow_busy=request.allow_busy,
    )

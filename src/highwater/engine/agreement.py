"""Agreement: what fails on one rank fails on all, with the same words, so that none waits for one
that has given up.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from highwater.errors import HighwaterError
from highwater.parallel.mesh import all_ranks


@contextmanager
def agreed(mesh: DeviceMesh) -> Generator[None]:
    """Run a block without collectives on all ranks; what a HighwaterError stops on one is raised on
    all, of several the lowest rank's. Another exception, a bug, is raised where it came up, and
    told to the others.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 -- raised again below, once all know
        failure = error
    told = gathered(_told(failure), mesh)
    if failure is not None and not isinstance(failure, HighwaterError):
        raise failure
    first = next(((rank, each) for rank, each in enumerate(told) if each is not None), None)
    if first is None:
        return
    rank, (kind, problem, hint) = first
    if kind is None:
        raise RuntimeError(f"rank {rank}: {problem}")
    raise kind(problem, hint=hint) from failure


def gathered(own: Any, mesh: DeviceMesh) -> list[Any]:
    """Every rank's value, in the order of the ranks; a rank alone talks to nobody."""
    if mesh.size() == 1:
        return [own]
    every: list[Any] = [None] * mesh.size()
    dist.all_gather_object(every, own, group=all_ranks(mesh))
    return every


def _told(failure: Exception | None) -> tuple[type[HighwaterError] | None, str, str] | None:
    """What the others are told."""
    if failure is None:
        return None
    if isinstance(failure, HighwaterError):
        return type(failure), failure.problem, failure.hint
    return None, f"{type(failure).__name__}: {failure}", ""

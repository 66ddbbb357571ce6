"""Agreement: what fails on one rank fails on all, with the same words, so that none waits for one
that has given up.

Values cross as JSON: unpickling what another machine sends would run what it says.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import torch
from torch.distributed.device_mesh import DeviceMesh

from highwater.engine.parallel.mesh import every_ranks
from highwater.errors import HighwaterError, MachineError, ModelError, UsageError
from highwater.nouns.codec import Record, from_json, to_json

T = TypeVar("T")
_KINDS = {kind.__name__: kind for kind in (HighwaterError, UsageError, ModelError, MachineError)}
"""Errors that a rank stops with, by their names."""


class _Failure(Record, frozen=True, kw_only=True):
    """What the others are told of an error."""

    kind: str | None
    """Name of a HighwaterError; None: a bug."""
    problem: str
    hint: str = ""


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
    told = gathered(_told(failure), mesh, kind=tuple[_Failure, ...])
    if failure is not None and not isinstance(failure, HighwaterError):
        raise failure
    first = next(((rank, each) for rank, own in enumerate(told) for each in own), None)
    if first is None:
        return
    rank, said = first
    if said.kind is None:
        raise RuntimeError(f"rank {rank}: {said.problem}")
    raise _KINDS.get(said.kind, HighwaterError)(said.problem, hint=said.hint) from failure


def gathered(own: T, mesh: DeviceMesh, *, kind: type[T]) -> list[T]:
    """Every rank's value, in the order of the ranks; a rank alone talks to nobody.

    Raises MachineError for what another rank sends and is not JSON of this kind.
    """
    if mesh.size() == 1:
        return [own]
    every: list[T] = []
    for rank, sent in enumerate(every_ranks(list(to_json(own).encode()), torch.uint8, mesh)):
        try:
            every.append(from_json(bytes(sent), kind))
        except msgspec.MsgspecError as error:
            raise MachineError(
                f"rank {rank} sent what is not this program's: {error}",
                hint="start every machine with the same highwater: `highwater --version` says "
                "which",
            ) from error
    return every


def _told(failure: Exception | None) -> tuple[_Failure, ...]:
    if failure is None:
        return ()
    if isinstance(failure, HighwaterError):
        kind, problem, hint = type(failure).__name__, failure.problem, failure.hint
    else:
        kind, problem, hint = None, f"{type(failure).__name__}: {failure}", ""
    # Bytes of a path that are no text would be no JSON, and the others would wait for this rank.
    problem, hint = (
        text.encode("utf-8", "backslashreplace").decode("utf-8") for text in (problem, hint)
    )
    return (_Failure(kind=kind, problem=problem, hint=hint),)

"""Rendering in several processes: a tokenizer has one core, and a corpus may have a hundred GiB.

Records go to the processes in chunks and come back in their order; the same documents whatever the
number of processes, and the first record that is refused is the one that is told.
"""

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from typing import NamedTuple

from highwater.engine.data.data_files import DataFile
from highwater.engine.data.readers import DataRecord
from highwater.engine.data.rendering import Render, Unit
from highwater.errors import HighwaterError
from highwater.units import MIB

_CHUNK = 32
"""Records that go to a process at a time."""
_WAITING = 3
"""Chunks for each process that are read ahead."""
_MOST_PROCESSES = 32
_WORTH_BYTES = 16 * MIB
"""Data from which on more processes than this one are worth their start."""

_render: Render | None = None
"""What a process of the pool renders with: it is forked with it."""


class PlacedRecord(NamedTuple):
    """A record of one of the files."""

    file: int
    record: DataRecord


class _Refused(NamedTuple):
    """An error on its way to another process, which knows how to make it again."""

    kind: type[HighwaterError]
    problem: str
    hint: str


def processes_for(files: Sequence[DataFile]) -> int:
    """Processes that render these files: this one alone where they are small."""
    size = sum(path.stat().st_size for file in files for path in file.parts)
    return min(_MOST_PROCESSES, len(os.sched_getaffinity(0))) if size > _WORTH_BYTES else 1


def rendered(
    records: Iterable[PlacedRecord], render: Render, *, processes: int
) -> Iterator[tuple[PlacedRecord, list[Unit]]]:
    """Each record with the units that it is, in the order of the records.

    Raises UsageError for the first record that is refused.
    """
    if processes == 1:
        yield from ((placed, list(render(placed.record))) for placed in records)
        return
    global _render
    _render = render
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from _through(pool, iter(records), processes * _WAITING)


def _through(
    pool: ProcessPoolExecutor, records: Iterator[PlacedRecord], most: int
) -> Iterator[tuple[PlacedRecord, list[Unit]]]:
    waiting: deque[tuple[list[PlacedRecord], Future[list[list[Unit] | _Refused]]]] = deque()
    unread: HighwaterError | None = None
    is_read = False
    while waiting or not is_read:
        while not is_read and len(waiting) < most:
            chunk: list[PlacedRecord] = []
            try:
                chunk.extend(islice(records, _CHUNK))
            except HighwaterError as error:  # what was read before it comes first
                unread = error
            is_read = len(chunk) < _CHUNK
            if chunk:
                waiting.append((chunk, pool.submit(_rendered, [each.record for each in chunk])))
        if waiting:
            chunk, future = waiting.popleft()
            for placed, units in zip(chunk, future.result(), strict=False):
                if isinstance(units, _Refused):
                    for _, other in waiting:
                        other.cancel()
                    raise units.kind(units.problem, hint=units.hint)
                yield placed, units
    if unread is not None:
        raise unread


def _rendered(records: list[DataRecord]) -> list[list[Unit] | _Refused]:
    """The units of each record, up to the first that is refused."""
    assert _render is not None
    found: list[list[Unit] | _Refused] = []
    for record in records:
        try:
            found.append(list(_render(record)))
        except HighwaterError as error:
            return [*found, _Refused(type(error), error.problem, error.hint)]
    return found

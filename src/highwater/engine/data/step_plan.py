"""The plan of a training: which documents are in which micro-batch (row) of which step.

It is a function of lengths, units, rows and a seed, the same on every machine and for every number
of ranks, which take turns in the rows of a step. An epoch has every document once, in an order of
its own; its last rows make a step with the first ones of the next. It takes some 20 bytes a
document while it is in use.

Where a unit has to be whole in one row, ``epoch_rows`` packs it. Where its documents may be in any
rows of one step, step after step is filled, and then laid out so that rows are about alike and none
is empty: a step that has fewer documents than rows when the next unit does not fit is given a later
one that does, and the last step one of an earlier step's.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from heapq import heapreplace
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from highwater.engine.data.epoch_rows import EpochRows, Units, pack_rows, shuffled
from highwater.errors import UsageError
from highwater.units import counted

_TRIES = 8
"""Orders of an epoch that are tried before it is given up."""
_LOOKED_AT = 256
"""Units further on that a step is looked one for among."""
_REPACKED = 2
"""Times that a step is packed anew to make room for one more unit."""


def fill_steps(units: Units, *, row_tokens: int, rows: int, seed: int, epoch: int) -> EpochRows:
    """The rows of an epoch, all of each step one after the other.

    Raises UsageError where a unit is larger than a step, or documents are too few for its rows. An
    epoch whose orders all leave a row empty has the steps of the first, in another order.
    """
    _refuse_large(units, row_tokens, rows)
    for number in range(_TRIES):
        order = shuffled(units.total, seed, epoch, number)
        steps = _Filling(units, row_tokens, rows).steps(order)
        if steps is not None:
            return _laid_out(steps)
    if epoch == 0:
        fewest = int(units.documents.min())
        raise UsageError(
            f"{rows} rows a step, and documents that belong together are {fewest} at the fewest: "
            "a row would be left empty",
            hint=f"use `--rows {fewest}`",
        )
    first = fill_steps(units, row_tokens=row_tokens, rows=rows, seed=seed, epoch=0)
    steps = [[first.row(row) for row in range(at, at + rows)] for at in range(0, first.total, rows)]
    return _laid_out([steps[number] for number in shuffled(len(steps), seed, epoch, _TRIES)])


Measured = tuple[int, int]
"""A document: its length, and its number."""


class _OpenStep:
    """One step while it is filled: rows are kept free for long documents."""

    def __init__(self, rows: int, row_tokens: int) -> None:
        self.units: dict[int, list[Measured]] = {}
        self.documents = 0
        self._rows = rows
        self._row_tokens = row_tokens
        self._packing = _Packing(rows, row_tokens)
        self._room = rows * row_tokens
        self._repacked = 0

    def take(self, unit: int, items: list[Measured]) -> bool:
        """Take a unit; false where its documents do not fit."""
        if sum(length for length, _ in items) > self._room:
            return False
        packing = self._packing.copy()
        if not packing.add(items):
            packing = self._repacked_with(items)
        if packing is None:
            return False
        self._packing = packing
        self.units[unit] = items
        self.documents += len(items)
        self._room -= sum(length for length, _ in items)
        return True

    def without(self, unit: int) -> "_OpenStep":
        """The step without a unit."""
        left = _OpenStep(self._rows, self._row_tokens)
        left.units = {each: items for each, items in self.units.items() if each != unit}
        items = list(chain(*left.units.values()))
        left.documents = len(items)
        left._room -= sum(length for length, _ in items)
        left._packing = self._packing.without(set(self.units[unit]))
        return left

    def final_rows(self) -> list[list[Measured]]:
        """The documents of each row, about as many tokens in each: ranks wait. None is empty."""
        balanced = _balanced(list(chain(*self.units.values())), self._rows, self._row_tokens)
        return balanced or _none_empty(self._packing.rows)

    def _repacked_with(self, items: list[Measured]) -> "_Packing | None":
        """All documents packed anew; None where they do not fit, or after some tries."""
        self._repacked += 1
        packing = _Packing(self._rows, self._row_tokens)
        if self._repacked <= _REPACKED and packing.add([*chain(*self.units.values()), *items]):
            return packing
        return None


class _Packing:
    """Documents in rows by best fit."""

    def __init__(self, rows: int, row_tokens: int) -> None:
        self.rows: list[list[Measured]] = [[] for _ in range(rows)]
        self._row_tokens = row_tokens
        self._rooms = [(row_tokens, row) for row in range(rows)]  # ascending

    def copy(self) -> "_Packing":
        """Another with the same documents in the same rows."""
        other = _Packing(0, self._row_tokens)
        other.rows, other._rooms = [list(row) for row in self.rows], list(self._rooms)
        return other

    def add(self, items: list[Measured]) -> bool:
        """Add documents, the longest first; false, and only some are, where one has no room."""
        for item in sorted(items, reverse=True):
            found = bisect_left(self._rooms, (item[0], -1))
            if found == len(self._rooms):
                return False
            room, row = self._rooms.pop(found)
            insort(self._rooms, (room - item[0], row))
            self.rows[row].append(item)
        return True

    def without(self, items: set[Measured]) -> "_Packing":
        """Another without these documents, the others where they are."""
        other = _Packing(0, self._row_tokens)
        other.rows = [[item for item in row if item not in items] for row in self.rows]
        other._rooms = sorted(
            (self._row_tokens - sum(length for length, _ in row), at)
            for at, row in enumerate(other.rows)
        )
        return other


def _balanced(items: list[Measured], rows: int, row_tokens: int) -> list[list[Measured]] | None:
    """Documents in rows, each in the row with the least in it; None where one has no room there."""
    packed: list[list[Measured]] = [[] for _ in range(rows)]
    loads = [(0, row) for row in range(rows)]
    for item in sorted(items, reverse=True):
        load, row = loads[0]
        if load + item[0] > row_tokens:
            return None
        heapreplace(loads, (load + item[0], row))
        packed[row].append(item)
    return packed


def _none_empty(rows: list[list[Measured]]) -> list[list[Measured]]:
    """The rows, an empty one with the shortest document of the row that has the most."""
    for row in rows:
        if not row:
            donor = max(rows, key=len)
            shortest = min(donor)
            donor.remove(shortest)
            row.append(shortest)
    return rows


class _Filling:
    """Fills the steps of one epoch."""

    def __init__(self, units: Units, row_tokens: int, rows: int) -> None:
        self._units = units
        self._row_tokens, self._rows = row_tokens, rows

    def steps(self, order: NDArray[np.int64]) -> list[list[Iterable[int]]] | None:
        """The documents of each row of each step; None where a row would be empty."""
        waiting = deque(int(unit) for unit in order)
        steps: list[_OpenStep] = []
        while waiting:
            step = _OpenStep(self._rows, self._row_tokens)
            while waiting and self._takes(step, waiting[0]):
                waiting.popleft()
            while step.documents < self._rows and self._take_another(step, waiting):
                pass
            steps.append(step)
        poor = [step for step in steps if step.documents < self._rows]
        if not all(self._lend(steps, step) for step in poor):
            return None
        return [[[document for _, document in row] for row in step.final_rows()] for step in steps]

    def _takes(self, step: _OpenStep, unit: int) -> bool:
        documents = range(int(self._units.starts[unit]), int(self._units.starts[unit + 1]))
        lengths = self._units.lengths
        return step.take(unit, [(int(lengths[number]), number) for number in documents])

    def _take_another(self, step: _OpenStep, waiting: deque[int]) -> bool:
        """Give the step one of the next units that fits; false where none does."""
        for unit in islice(waiting, _LOOKED_AT):
            if self._takes(step, unit):
                waiting.remove(unit)
                return True
        return False

    def _lend(self, steps: list[_OpenStep], poor: _OpenStep) -> bool:
        """Give a step units that others can spare, until it has enough; false where none can."""
        for at, rich in enumerate(steps):
            if rich is poor:
                continue
            for unit, items in list(rich.units.items()):
                if poor.documents >= self._rows:
                    return True
                if rich.documents - len(items) >= self._rows and self._takes(poor, unit):
                    rich = steps[at] = rich.without(unit)
        return poor.documents >= self._rows


def _laid_out(steps: Sequence[Sequence[Iterable[int]]]) -> EpochRows:
    rows = [list(row) for step in steps for row in step]
    ends = np.cumsum([0, *map(len, rows)])
    return EpochRows(np.fromiter(chain(*rows), np.int64, count=int(ends[-1])), ends)


def _refuse_large(units: Units, row_tokens: int, rows: int) -> None:
    """Raise UsageError for documents, units or rows that fit into no step."""
    longest, documents = int(units.lengths.max()), len(units.lengths)
    if longest > row_tokens:
        raise UsageError(
            f"a document of {longest:,} tokens, and a row of {row_tokens:,}",
            hint=f"train longer rows: `--length {longest}`",
        )
    if documents < rows:
        raise UsageError(
            f"{counted(documents, 'document')} for {rows} rows a step",
            hint=f"use `--rows {documents}`",
        )
    for unit, size in enumerate(units.sizes.tolist()):
        if size > rows * row_tokens // 2:  # a smaller one always fits: by halves rows are full
            items = [
                (int(units.lengths[number]), number)
                for number in range(int(units.starts[unit]), int(units.starts[unit + 1]))
            ]
            if not _Packing(rows, row_tokens).add(items):
                raise UsageError(
                    f"{counted(len(items), 'document')} of {size:,} tokens that belong together, "
                    f"and a step of {rows} rows of {row_tokens:,}",
                    hint=f"use `--rows {len(items)}`",
                )


_KEPT_EPOCHS = 2
"""Epochs that a step may have rows of: mostly one, at its end another."""


class StepPlan:
    """Which documents are in which row of which step."""

    def __init__(
        self,
        lengths: NDArray[np.int64],
        units: NDArray[np.int64],
        *,
        row_tokens: int,
        micro_batches: int,
        seed: int,
        spread_units: bool = False,
    ) -> None:
        """Plan documents of these ``lengths`` and ``units``, ascending, in steps of
        ``micro_batches`` rows of at most ``row_tokens`` tokens.

        ``spread_units``: documents of a unit may be in several rows of one step, as those of a
        group of rollouts; else one row has all of them, as of a pair. Raises UsageError where a
        unit fits nowhere, or documents are too few for the rows.
        """
        if not len(lengths):
            raise UsageError("a corpus without documents", hint="name data: `--data data.jsonl`")
        self._units = Units.of(lengths, units)
        self._row_tokens, self._rows = row_tokens, micro_batches
        self._seed = seed
        self._spread = spread_units
        self._epoch = lru_cache(maxsize=_KEPT_EPOCHS)(self._packed)
        self._ends = [0]
        """How many rows there are up to the end of each epoch that is known, before the first
        none."""
        self._know(1)
        self.efficiency: float = self._units.tokens / (self._ends[1] * row_tokens)
        """The part of an epoch's rows that tokens fill."""

    def steps_of(self, epochs: int) -> int:
        """Steps until every document was trained so many times."""
        self._know(epochs)
        return -(-self._ends[epochs] // self._rows)

    def step(self, number: int) -> tuple[tuple[int, ...], ...]:
        """The documents of each row of a step; the first step is 1."""
        assert number >= 1
        end = number * self._rows
        return tuple(self._row(row) for row in range(end - self._rows, end))

    def _row(self, row: int) -> tuple[int, ...]:
        """A row by its number among those of all epochs."""
        while self._ends[-1] <= row:
            self._know(len(self._ends))
        epoch = bisect_right(self._ends, row) - 1
        return self._epoch(epoch).row(row - self._ends[epoch])

    def _know(self, epochs: int) -> None:
        for epoch in range(len(self._ends) - 1, epochs):
            self._ends.append(self._ends[-1] + self._epoch(epoch).total)

    def _packed(self, epoch: int) -> EpochRows:
        pack = partial(fill_steps, rows=self._rows) if self._spread else pack_rows
        return pack(self._units, row_tokens=self._row_tokens, seed=self._seed, epoch=epoch)

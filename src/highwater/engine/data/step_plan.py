"""Plans which documents are in which micro-batch (row) of a step, and of an evaluation.

A plan is a function of lengths, units, rows and a seed, the same on every machine and for any
number of ranks, among which a step's rows are dealt out. An epoch has every document once, in an
order of its own; a step may have its last rows and the first of the next epoch. A plan takes about
20 bytes a document in memory.

A unit that must be whole in one row is put into the open row in which it leaves the least room, or,
if no row has room, opens another (best fit). Then the rows are shuffled, since the order in which
they fill up depends on their lengths. If a unit's documents may be in any rows of one step, steps
are filled one after another, then their rows made about equally long and none empty: a step with
fewer documents than rows takes a later unit that fits, and the last step a unit of an earlier step.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from heapq import heapreplace
from itertools import chain, islice
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from highwater.errors import UsageError
from highwater.units import counted

_OPEN_ROWS = 1024
"""Most open rows in which a place is searched: enough that little is left over, and quick."""
_NUMBER_BITS = 40
"""Low bits of an integer that hold a row's number; the higher bits hold the room in the row."""
_CHUNK = 1 << 16
"""Units whose sizes are Python integers at a time."""
_TRIES = 8
"""Orders of an epoch to try before giving up."""
_LOOKED_AT = 256
"""Later units among which one is searched for a step with too few documents."""
_REPACKED = 2
"""Most times that a step is packed anew to make room for one more unit."""
_KEPT_EPOCHS = 2
"""Epochs in memory: a step has rows of one, or of the end of one and the start of the next."""


Measured = tuple[int, int]
"""A document's length in tokens, and its number."""


class Units(NamedTuple):
    """The documents of a corpus in groups that must be trained in the same step."""

    lengths: NDArray[np.int64]
    """Tokens of each document."""
    starts: NDArray[np.int64]
    """Number of each unit's first document; last, the number of all documents."""

    @classmethod
    def of(cls, lengths: NDArray[np.int64], units: NDArray[np.int64]) -> Self:
        """Group documents of these lengths by their unit numbers, which must ascend."""
        lengths, units = np.asarray(lengths, np.int64), np.asarray(units, np.int64)
        assert len(lengths) == len(units)
        assert (np.diff(units) >= 0).all()
        begins = np.flatnonzero(np.diff(units, prepend=units[0] - 1))
        return cls(lengths, np.append(begins, len(units)))

    @property
    def total(self) -> int:
        """Number of units in the corpus."""
        return len(self.starts) - 1

    @property
    def documents(self) -> NDArray[np.int64]:
        """Number of documents in each unit."""
        return np.diff(self.starts)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Number of tokens in each unit."""
        return np.add.reduceat(self.lengths, self.starts[:-1])

    def items(self, unit: int) -> list[Measured]:
        """Return the documents of a unit as (length, document number)."""
        documents = range(int(self.starts[unit]), int(self.starts[unit + 1]))
        return [(int(self.lengths[number]), number) for number in documents]


class EpochRows(NamedTuple):
    """The rows (micro-batches) of an epoch, as one array of documents after another."""

    documents: NDArray[np.int64]
    starts: NDArray[np.int64]
    """Index in ``documents`` at which each row begins; last, the number of all documents."""

    @property
    def total(self) -> int:
        """Number of rows."""
        return len(self.starts) - 1

    def row(self, number: int) -> tuple[int, ...]:
        """Return the documents of a row."""
        return tuple(self.documents[self.starts[number] : self.starts[number + 1]].tolist())


class StepPlan:
    """Which documents each row of each step trains, the same on every rank."""

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

        ``spread_units``: documents of a unit may be in several rows of one step, like a group of
        rollouts; else one row has all of them, like a pair. Raises UsageError if a unit is larger
        than a row or step, or there are too few documents for the rows.
        """
        if not len(lengths):
            raise UsageError("a corpus without documents", hint="name data: `--data data.jsonl`")
        self._units = Units.of(lengths, units)
        self._row_tokens, self._rows = row_tokens, micro_batches
        self._seed = seed
        self._spread = spread_units
        self._epoch = lru_cache(maxsize=_KEPT_EPOCHS)(self._packed)
        self._ends = [0]
        """Number of rows up to the end of each epoch that is planned; first, 0."""
        self._know_next()

    def step(self, number: int) -> tuple[tuple[int, ...], ...]:
        """Return the documents' indices by row (micro-batch) of step ``number``, from 1."""
        assert number >= 1
        end = number * self._rows
        return tuple(self._row(row) for row in range(end - self._rows, end))

    def _row(self, row: int) -> tuple[int, ...]:
        """Return a row by its number among the rows of all epochs."""
        while self._ends[-1] <= row:
            self._know_next()
        epoch = bisect_right(self._ends, row) - 1
        return self._epoch(epoch).row(row - self._ends[epoch])

    def _know_next(self) -> None:
        self._ends.append(self._ends[-1] + self._epoch(len(self._ends) - 1).total)

    def _packed(self, epoch: int) -> EpochRows:
        pack = partial(fill_steps, rows=self._rows) if self._spread else pack_rows
        return pack(self._units, row_tokens=self._row_tokens, seed=self._seed, epoch=epoch)


def shuffled(count: int, *key: int) -> NDArray[np.int64]:
    """Return the integers below ``count``, shuffled by ``key`` alone.

    PCG64's raw output is sorted: numpy's ``permutation`` may change with a version, the raw bits
    may not. Source: NEP 19, https://numpy.org/neps/nep-0019-rng-policy.html.
    """
    bits = np.random.PCG64(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(bits, kind="stable")


def evaluation_rows(
    lengths: NDArray[np.int64], units: NDArray[np.int64] | None, *, row_tokens: int
) -> list[tuple[int, ...]]:
    """Return the documents of an evaluation's rows, in order, at most ``row_tokens`` tokens a row.

    ``units``: ascending unit numbers; a unit's documents stay in one row, like a pair's. None: each
    document is a unit. A unit larger than a row has a row of its own.
    """
    found = Units.of(lengths, np.arange(len(lengths)) if units is None else units)
    rows: list[list[int]] = []
    left = 0
    for unit, tokens in enumerate(found.sizes.tolist()):
        if tokens > left:
            rows.append([])
            left = row_tokens
        rows[-1] += range(int(found.starts[unit]), int(found.starts[unit + 1]))
        left -= tokens
    return [tuple(row) for row in rows]


def pack_rows(units: Units, *, row_tokens: int, seed: int, epoch: int) -> EpochRows:
    """Return the rows of an epoch, every unit whole in one row, in the order of training.

    Raises UsageError if a unit is larger than a row.
    """
    sizes = units.sizes
    largest = int(sizes.argmax())
    size = int(sizes[largest])
    if size > row_tokens and units.documents[largest] > 1:
        problem = f"documents of {size:,} tokens that belong together, and a row of {row_tokens:,}"
        hint = f"`--sequences-per-micro-batch {-(-size // row_tokens)}`"
        raise UsageError(problem, hint=f"train rows that hold a pair: {hint}")
    _refuse_long(size, row_tokens)
    order = shuffled(units.total, seed, epoch, 0)
    row_of = _best_fit(sizes, order, row_tokens)
    count = int(row_of.max()) + 1
    place = np.empty(count, np.int64)
    place[shuffled(count, seed, epoch, 1)] = np.arange(count)
    row_of = place[row_of]
    by_row = np.argsort(row_of, kind="stable")
    in_order = order[by_row]
    counts = units.documents[in_order]
    ends = np.cumsum(counts)
    documents = np.repeat(units.starts[in_order] - (ends - counts), counts) + np.arange(ends[-1])
    row_units = np.bincount(row_of, minlength=count)
    return EpochRows(documents, np.append(0, ends[np.cumsum(row_units) - 1]))


def _best_fit(
    sizes: NDArray[np.int64], order: NDArray[np.int64], row_tokens: int
) -> NDArray[np.int64]:
    """Return the row of each unit in this order; rows are numbered as they are opened."""
    row_of = np.empty(len(order), np.int64)
    smallest = int(sizes.min())
    open_rows: list[int] = []  # ascending: a row's room, with its number in the lower bits
    opened = 0
    for start in range(0, len(order), _CHUNK):
        chunk: list[int] = sizes[order[start : start + _CHUNK]].tolist()
        for at, size in enumerate(chunk, start):
            found = bisect_left(open_rows, size << _NUMBER_BITS)
            if found < len(open_rows):
                room = open_rows.pop(found)
            else:
                room = (row_tokens << _NUMBER_BITS) + opened
                opened += 1
            number = room & ((1 << _NUMBER_BITS) - 1)
            row_of[at] = number
            room -= size << _NUMBER_BITS
            if room >> _NUMBER_BITS >= smallest:
                insort(open_rows, room)
                if len(open_rows) > _OPEN_ROWS:
                    open_rows.pop(0)  # the one with the least room
    return row_of


def fill_steps(units: Units, *, row_tokens: int, rows: int, seed: int, epoch: int) -> EpochRows:
    """Return the rows of an epoch, step after step; a unit's documents are in rows of one step.

    Raises UsageError if a unit is larger than a step, or documents are too few for its rows. If all
    tried orders of a later epoch leave a row empty, it has the steps of the first epoch, shuffled.
    """
    documents = len(units.lengths)
    _refuse_long(int(units.lengths.max()), row_tokens)
    if documents < rows:
        raise UsageError(
            f"{counted(documents, 'document')} for {rows} rows a step",
            hint=f"use `--rows {documents}`",
        )
    # Smaller units fit: longest documents first, a row without room is at least half full.
    for unit in np.flatnonzero(units.sizes > rows * row_tokens // 2).tolist():
        items = units.items(unit)
        if _Packing.of(([] for _ in range(rows)), row_tokens).adding(items) is None:
            raise UsageError(
                f"{counted(len(items), 'document')} of {units.sizes[unit]:,} tokens that belong "
                f"together, and a step of {rows} rows of {row_tokens:,}",
                hint=f"use `--rows {len(items)}`",
            )
    for number in range(_TRIES):
        order = shuffled(units.total, seed, epoch, number)
        steps = _filled_steps(units, order, row_tokens, rows)
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


class _Packing(NamedTuple):
    """Documents packed into the rows of one step, with the room left in each row."""

    rows: list[list[Measured]]
    rooms: list[tuple[int, int]]
    """Tokens of room in each row, and the row's index, ascending."""

    @classmethod
    def of(cls, rows: Iterable[list[Measured]], row_tokens: int) -> Self:
        """Return the packing of these rows, each of at most ``row_tokens`` tokens."""
        rows = list(rows)
        tokens = (sum(length for length, _ in row) for row in rows)
        return cls(rows, sorted((row_tokens - count, at) for at, count in enumerate(tokens)))

    def adding(self, items: Iterable[Measured]) -> "_Packing | None":
        """Return the rows with these documents added, by best fit, longest first; None if full."""
        rows, rooms = [list(row) for row in self.rows], list(self.rooms)
        for item in sorted(items, reverse=True):
            found = bisect_left(rooms, (item[0], -1))
            if found == len(rooms):
                return None
            room, row = rooms.pop(found)
            insort(rooms, (room - item[0], row))
            rows[row].append(item)
        return _Packing(rows, rooms)


class _OpenStep:
    """One step while it is filled; best fit keeps rows free for long documents."""

    def __init__(self, packing: _Packing, row_tokens: int) -> None:
        self.units: dict[int, list[Measured]] = {}
        self._packing, self._row_tokens = packing, row_tokens
        self._documents = sum(map(len, packing.rows))
        self._repacked = 0

    @property
    def lacks_documents(self) -> bool:
        """True if the step has fewer documents than rows, so that a row would be empty."""
        return self._documents < len(self._packing.rows)

    def take(self, unit: int, items: list[Measured]) -> bool:
        """Add a unit, repacking the step at most twice; return False if the unit does not fit."""
        if sum(length for length, _ in items) > sum(room for room, _ in self._packing.rooms):
            return False
        packing = self._packing.adding(items)
        if packing is None:
            self._repacked += 1
            if self._repacked <= _REPACKED:
                empty = _Packing.of(([] for _ in self._packing.rows), self._row_tokens)
                packing = empty.adding([*chain(*self.units.values()), *items])
        if packing is None:
            return False
        self._packing, self.units[unit] = packing, items
        self._documents += len(items)
        return True

    def without(self, unit: int) -> "_OpenStep":
        """Return the step without one unit, a group of documents that is trained in the same step.
        All other documents stay in their rows.
        """
        gone = set(self.units[unit])
        rows = ([item for item in row if item not in gone] for row in self._packing.rows)
        left = _OpenStep(_Packing.of(rows, self._row_tokens), self._row_tokens)
        left.units = {each: items for each, items in self.units.items() if each != unit}
        return left

    def final_rows(self) -> list[list[Measured]]:
        """Return each row's documents; no row is empty, and all are about equally long."""
        rows = self._packing.rows
        balanced: list[list[Measured]] = [[] for _ in rows]
        loads = [(0, at) for at in range(len(rows))]
        for item in sorted(chain(*self.units.values()), reverse=True):
            load, row = loads[0]
            if load + item[0] > self._row_tokens:
                break
            heapreplace(loads, (load + item[0], row))
            balanced[row].append(item)
        else:
            return balanced
        for row in rows:
            if not row:  # take the shortest document of the row with the most documents
                donor = max(rows, key=len)
                row.append(donor.pop(donor.index(min(donor))))
        return rows


def _filled_steps(
    units: Units, order: NDArray[np.int64], row_tokens: int, rows: int
) -> list[list[Iterable[int]]] | None:
    """Return the documents of each row of each step of an epoch; None if a row would be empty."""
    waiting = deque(order.tolist())
    steps: list[_OpenStep] = []
    while waiting:
        step = _OpenStep(_Packing.of(([] for _ in range(rows)), row_tokens), row_tokens)
        while waiting and step.take(waiting[0], units.items(waiting[0])):
            waiting.popleft()
        while step.lacks_documents:
            later = islice(waiting, _LOOKED_AT)
            fitting = next((each for each in later if step.take(each, units.items(each))), None)
            if fitting is None:
                break
            waiting.remove(fitting)
        steps.append(step)
    for poor in [step for step in steps if step.lacks_documents]:
        _lend(steps, poor)
        if poor.lacks_documents:
            return None
    return [[[document for _, document in row] for row in step.final_rows()] for step in steps]


def _lend(steps: list[_OpenStep], poor: _OpenStep) -> None:
    """Move spare units of other steps to ``poor`` until it has enough documents."""
    for at, rich in enumerate(steps):
        if rich is poor:
            continue
        for unit, items in list(rich.units.items()):
            if not poor.lacks_documents:
                return
            left = rich.without(unit)
            if not left.lacks_documents and poor.take(unit, items):
                rich = steps[at] = left


def _laid_out(steps: Sequence[Sequence[Iterable[int]]]) -> EpochRows:
    rows = [list(row) for step in steps for row in step]
    ends = np.cumsum([0, *map(len, rows)])
    return EpochRows(np.fromiter(chain(*rows), np.int64, count=int(ends[-1])), ends)


def _refuse_long(tokens: int, row_tokens: int) -> None:
    if tokens > row_tokens:
        raise UsageError(
            f"a document of {tokens:,} tokens, and a row of {row_tokens:,}",
            hint=f"train longer rows: `--length {tokens}`",
        )

"""An epoch's units before they are laid out, its rows afterwards, and the order between the two:
evaluation's, every document once in its own order, or a shuffled epoch by best fit.

There a unit goes into the row that it leaves the least room in, among the last ones that are open,
and where none has room, opens another. Then the rows are shuffled: they close in an order of what
was in them.
"""

from bisect import bisect_left, insort
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from highwater.errors import UsageError


class Units(NamedTuple):
    """The units of a corpus: documents beside each other, that one step has all of or none."""

    lengths: NDArray[np.int64]
    """Tokens of each document."""
    starts: NDArray[np.int64]
    """The first document of each unit, and past the last one's last."""

    @classmethod
    def of(cls, lengths: NDArray[np.int64], units: NDArray[np.int64]) -> Self:
        """Units of documents whose unit numbers ascend."""
        lengths, units = np.asarray(lengths, np.int64), np.asarray(units, np.int64)
        assert len(lengths) == len(units)
        assert (np.diff(units) >= 0).all()
        begins = np.flatnonzero(np.diff(units, prepend=units[0] - 1))
        return cls(lengths, np.append(begins, len(units)))

    @property
    def total(self) -> int:
        """Units."""
        return len(self.starts) - 1

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())

    @property
    def documents(self) -> NDArray[np.int64]:
        """Documents of each unit."""
        return np.diff(self.starts)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Tokens of each unit."""
        return np.add.reduceat(self.lengths, self.starts[:-1])


class EpochRows(NamedTuple):
    """The rows of an epoch, one after the other."""

    documents: NDArray[np.int64]
    starts: NDArray[np.int64]
    """Where each row begins among the documents, and where the last one ends."""

    @property
    def total(self) -> int:
        """Rows."""
        return len(self.starts) - 1

    def row(self, number: int) -> tuple[int, ...]:
        """The documents of a row."""
        return tuple(self.documents[self.starts[number] : self.starts[number + 1]].tolist())


def shuffled(count: int, *key: int) -> NDArray[np.int64]:
    """The numbers below ``count`` in an order that ``key`` decides, on any machine.

    It is that of PCG64's own output: what numpy makes of it in ``permutation`` may change with a
    version, the bits may not. Source: NEP 19, https://numpy.org/neps/nep-0019-rng-policy.html.
    """
    bits = np.random.PCG64(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(bits, kind="stable")


def evaluation_rows(
    lengths: NDArray[np.int64], units: NDArray[np.int64] | None, *, row_tokens: int
) -> list[tuple[int, ...]]:
    """Rows of at most ``row_tokens`` tokens.

    ``units``: documents of one unit, which ascend, stay in one row, as those of a pair; None: each
    is by itself. A unit that is larger than a row has one of its own.
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


_OPEN_ROWS = 1024
"""Rows that a unit is looked a place for in: enough that little is left over, and as quick for any
number of documents."""
_NUMBER_BITS = 40
"""Bits of a row's number, below those of the room in it."""
_CHUNK = 1 << 16
"""Units whose sizes are Python's numbers at a time."""


def pack_rows(units: Units, *, row_tokens: int, seed: int, epoch: int) -> EpochRows:
    """The rows of an epoch, in the order in which they are trained.

    Raises UsageError where a unit is larger than a row.
    """
    sizes = units.sizes
    _refuse_large(units, sizes, row_tokens)
    order = shuffled(units.total, seed, epoch, 0)
    row_of = _best_fit(sizes, order, row_tokens)
    count = int(row_of.max()) + 1
    place = np.empty(count, np.int64)
    place[shuffled(count, seed, epoch, 1)] = np.arange(count)
    row_of = place[row_of]
    by_row = np.argsort(row_of, kind="stable")
    return _expanded(units, order[by_row], np.bincount(row_of, minlength=count))


def _best_fit(
    sizes: NDArray[np.int64], order: NDArray[np.int64], row_tokens: int
) -> NDArray[np.int64]:
    """The row of each unit in this order, rows numbered as they are opened."""
    row_of = np.empty(len(order), np.int64)
    smallest = int(sizes.min())
    open_rows: list[int] = []  # ascending: the room in each, and its number in the lower bits
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


def _expanded(units: Units, in_order: NDArray[np.int64], row_units: NDArray[np.int64]) -> EpochRows:
    """Rows of documents, of units in the order of the rows, so many in each."""
    counts = units.documents[in_order]
    ends = np.cumsum(counts)
    documents = np.repeat(units.starts[in_order] - (ends - counts), counts) + np.arange(ends[-1])
    return EpochRows(documents, np.append(0, ends[np.cumsum(row_units) - 1]))


def _refuse_large(units: Units, sizes: NDArray[np.int64], row_tokens: int) -> None:
    largest = int(sizes.argmax())
    size = int(sizes[largest])
    if size <= row_tokens:
        return
    if int(units.documents[largest]) == 1:
        raise UsageError(
            f"a document of {size:,} tokens, and a row of {row_tokens:,}",
            hint=f"train longer rows: `--length {size}`",
        )
    raise UsageError(
        f"documents of {size:,} tokens that belong together, and a row of {row_tokens:,}",
        hint=f"train rows that hold a pair: `--sequences-per-micro-batch {-(-size // row_tokens)}`",
    )

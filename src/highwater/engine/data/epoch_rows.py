"""An epoch's units before they are laid out, its rows afterwards, and the order between the two."""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray


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

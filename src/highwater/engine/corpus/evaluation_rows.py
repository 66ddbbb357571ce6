"""Evaluation rows: every document of a corpus once, in its own order."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray


def evaluation_rows(
    lengths: NDArray[np.int64], units: NDArray[np.int64], *, row_tokens: int
) -> list[tuple[int, ...]]:
    """Rows of at most ``row_tokens`` tokens; a unit, a pair for example, stays in one row."""
    return [
        tuple(document for unit in row for document in unit)
        for row in _packed(lengths, _units(units), row_tokens)
    ]


def _units(units: NDArray[np.int64]) -> list[tuple[int, ...]]:
    """The documents of each unit."""
    numbered = groupby(range(len(units)), key=lambda document: int(units[document]))
    return [tuple(documents) for _, documents in numbered]


def _packed(
    lengths: NDArray[np.int64], units: Sequence[tuple[int, ...]], row_tokens: int
) -> Iterator[list[tuple[int, ...]]]:
    row: list[tuple[int, ...]] = []
    left = row_tokens
    for unit in units:
        tokens = int(lengths[list(unit)].sum())
        if row and tokens > left:
            yield row
            row, left = [], row_tokens
        row.append(unit)
        left -= tokens
    yield row

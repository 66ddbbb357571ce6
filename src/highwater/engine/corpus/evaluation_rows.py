"""Evaluation rows: every document of a corpus once, in as many rows for each rank."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from highwater.errors import UsageError


def evaluation_rows(
    lengths: NDArray[np.int64], units: NDArray[np.int64], *, row_tokens: int, ranks: int
) -> list[tuple[int, ...]]:
    """Rows of at most ``row_tokens`` tokens, in the corpus's order, in a multiple of ``ranks``: a
    unit, a pair for example, stays in one row.

    Raises UsageError where there are fewer units than ranks.
    """
    rows = [list(row) for row in _packed(lengths, _units(units), row_tokens)]
    while len(rows) % ranks:
        number = max(range(len(rows)), key=lambda each: len(rows[each]))
        row = rows[number]
        if len(row) == 1:
            raise UsageError(
                f"{len(rows)} documents or pairs to evaluate, and {ranks} GPUs or groups of GPUs "
                "that evaluate one each",
                hint="name more of them: `--eval-data held_out.jsonl`",
            )
        rows[number : number + 1] = [row[: len(row) // 2], row[len(row) // 2 :]]
    return [tuple(document for unit in row for document in unit) for row in rows]


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

"""Evaluation rows: every document of a corpus once, in its own order."""

import numpy as np
from numpy.typing import NDArray

from highwater.engine.data.epoch_rows import Units


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

"""Column sums: what PyTorch's kernel takes for itself to sum over rows, as the gradient of a bias
is, where several blocks of threads share a column.
"""

from typing import NamedTuple

RESIDENT_THREADS = 132 * 2048
"""Threads that an H200, or an H100, runs at once."""
_THREADS, _WARP = 512, 32
_LEAST_VALUES, _MOST_VALUES = 16, 256
"""Values that a thread adds up: the fewest where several blocks share a column, and the fewest that
make several share one."""


class ColumnSums(NamedTuple):
    """Bytes that one sum takes for itself."""

    partial_bytes: int = 0
    """For every column and every block that shares it as many float32 numbers as a block has
    columns."""
    semaphore_bytes: int = 0
    """One for each group of blocks with the same columns."""


def column_sums(rows: int, columns: int, *, resident_threads: int) -> ColumnSums:
    """Bytes that sums of this many columns take for themselves; none where no column is shared.

    ``resident_threads``: how many the GPU runs at once. Source: ``setReduceConfig`` in
    ATen/native/cuda/Reduce.cuh; equal to what H200s recorded of 128 to 5,120 columns and 16,384 to
    655,360 rows (docs/results/lab/trinity_trials.json).
    """
    vector = next(size for size in (4, 2, 1) if columns % size == 0)
    most = _THREADS // vector
    width = min(_power_of_two(columns // vector), _WARP)
    height = min(_power_of_two(rows), most // width)
    width = min(_power_of_two(columns // vector), most // height)
    values, blocks = -(-rows // height), -(-columns // (vector * width))
    at_once = resident_threads // (width * height)
    if values < _MOST_VALUES or blocks > at_once:
        return ColumnSums()
    wanted = -(-at_once // blocks)
    sharing = max(min(wanted, -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    if sharing == 1:
        return ColumnSums()
    return ColumnSums(4 * columns * sharing * width * vector, 4 * blocks)


def _power_of_two(number: int) -> int:
    """The largest power of two that is no more than a number."""
    return 1 << (number.bit_length() - 1)

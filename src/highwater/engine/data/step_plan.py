"""The plan of a training: which documents are in which micro-batch of which step.

It is a function of lengths, units, rows and a seed, the same on every machine and for every number
of ranks, which take turns in the rows of a step. A row here is a micro-batch. An epoch has every
document once, in an order of its own; its last rows make a step with the first ones of the next, so
that every step has all of its rows.

How an epoch's units become rows is row_packing.py's, and step_filling.py's where a unit may be in
several. An epoch takes some 20 bytes a document while it is in use.
"""

from bisect import bisect_right
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from highwater.engine.data.epoch_rows import EpochRows, Units
from highwater.engine.data.row_packing import pack_rows
from highwater.engine.data.step_filling import fill_steps
from highwater.errors import UsageError

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

    @property
    def epoch_steps(self) -> int:
        """Steps until every document was trained."""
        return self.steps_of(1)

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

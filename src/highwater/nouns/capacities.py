"""Capacities: the longest length of one model on some GPUs with some settings, from a study, a
prediction, or a published table (memory/capacity_table.py).
"""

from typing import Literal

from highwater.nouns.cells import simplicity
from highwater.nouns.codec import Record
from highwater.nouns.hardware import kind_name
from highwater.nouns.study import Cell, Limit, Question, Study
from highwater.nouns.trainer import OURS, AnyTrainer
from highwater.nouns.trial import Outcome
from highwater.units import format_bytes

_OF_MEMORY: tuple[Limit, ...] = ("memory", "host_memory")
"""Limits of a search that prove that the next length does not fit."""
Source = Literal["measured", "simulated", "predicted", "published"]
"""Source of a figure: trials, a memory law in their place, our prediction, or another's table."""


class Capacity(Record, frozen=True, kw_only=True):
    """Longest length that fit in one cell (settings on a layout), and shortest that did not."""

    model_name: str
    config_digest: str | None
    """Digest of the model's config; None: an older file does not say."""
    native_length_tokens: int
    device_name: str
    """Kind of GPU, ``A100-80GB``; under a memory budget ``H200-141GB with 79.15 GiB``."""
    cell: Cell
    capacity_tokens: int
    """The longest length known to fit; 0: none is."""
    does_not_fit_tokens: int | None = None
    """The shortest length known not to fit; None: none is."""
    odd_tokens: tuple[int, ...] = ()
    """Lengths whose own trials contradict the bracket: outcomes may not be monotone."""
    margin_bytes: int = 0
    """Bytes that a length has to leave of a GPU's memory to count as a fit, if asked for."""
    is_memory_only: bool = False
    """True if memory-only trials prove it: in full only less was trained, or nothing."""
    source: Source
    trainer: AnyTrainer = OURS
    """The trainer whose step it is."""
    command: str | None = None
    """The command that started the trainer, if it is a user's own."""
    found_in: str
    """File that has it, or the command that predicts it."""

    def fits(self, length_tokens: int) -> bool | None:
        """True if a length fits by the trials, False if not; None: they leave it open."""
        fails = self.does_not_fit_tokens
        if self.capacity_tokens < length_tokens and (fails is None or length_tokens < fails):
            return None
        if length_tokens not in self.odd_tokens and not self._follows(length_tokens):
            return None
        return (length_tokens <= self.capacity_tokens) != (length_tokens in self.odd_tokens)

    def _follows(self, length_tokens: int) -> bool:
        """True if the bracket tells whether another length fits. With a token budget a shorter
        length may pack more tokens into a micro-batch than the longest that fit, and a longer
        length fewer than the shortest that did not: the bracket tells nothing about either.
        """
        settings, degree = self.cell.settings, self.cell.layout.context_degree
        if settings.token_budget_tokens is None:
            return True

        def packed(tokens: int) -> int:
            return tokens * settings.sequences(tokens, context_degree=degree)

        if length_tokens <= self.capacity_tokens:
            return packed(length_tokens) <= packed(self.capacity_tokens)
        fails = self.does_not_fit_tokens
        return packed(length_tokens) == 0 or fails is None or packed(length_tokens) >= packed(fails)


def simplest(capacities: tuple[Capacity, ...], length_tokens: int) -> Capacity | None:
    """The capacity with the simplest settings that fits a length; None if no capacity does."""
    return next((each for each in in_order(capacities) if each.fits(length_tokens)), None)


def may_be_simpler(
    capacities: tuple[Capacity, ...], length_tokens: int, found: Capacity | None
) -> bool:
    """True if a cell with simpler settings than ``found`` (None: any) may train this length."""
    known = {capacity.cell for capacity in capacities if capacity.fits(length_tokens) is not None}
    unknown = (capacity.cell for capacity in capacities if capacity.cell not in known)
    return any(found is None or simplicity(cell) < simplicity(found.cell) for cell in unknown)


def in_order(capacities: tuple[Capacity, ...]) -> list[Capacity]:
    """The capacities from the simplest settings on; of one cell full training comes first."""
    return sorted(capacities, key=lambda each: (simplicity(each.cell), each.is_memory_only))


def study_capacities(study: Study) -> tuple[Capacity, ...]:
    """The capacities of all cells of a study's question, by answers and by trials so far."""
    return tuple(
        capacity for cell in study.question.cells for capacity in cell_capacities(study, cell)
    )


def cell_capacities(study: Study, cell: Cell) -> tuple[Capacity, ...]:
    """Capacities of one cell, by its answer or its trials so far: in full, then in memory only."""
    answer = study.answer_of(cell)
    if answer is None:
        memory_only = study.longest_fit_tokens(cell, Outcome.MEMORY_ONLY_FIT)
        fits = study.longest_fit_tokens(cell)
        longest = max(fits or 0, memory_only or 0)
        failed = (
            spec.length_tokens
            for spec, result in study.told_by(cell)
            if spec.length_tokens > longest and not study.question.counts_as_fit(result)
        )
        fails = min(failed, default=None)
    else:
        memory_only = None if answer.memory_only is None else answer.memory_only.length_tokens
        fits = answer.capacity_tokens
        fails = answer.does_not_fit_tokens if answer.limit in _OF_MEMORY else None
    found = (_capacity(study, cell, fits or 0, fails),)
    if memory_only is None:
        return found
    return (*found, _capacity(study, cell, memory_only, fails, is_memory_only=True))


def kind_with_memory(device_name: str, device_bytes: int | None) -> str:
    """The catalog's name of a GPU, and its memory where that is not the whole card's."""
    name = kind_name(device_name)
    return name if device_bytes is None else f"{name} with {format_bytes(device_bytes)}"


def _capacity(
    study: Study, cell: Cell, fits: int, fails: int | None, *, is_memory_only: bool = False
) -> Capacity:
    question: Question = study.question
    return Capacity(
        model_name=question.model.name,
        config_digest=question.model.config_digest,
        native_length_tokens=question.model.shape.native_length_tokens,
        device_name=kind_with_memory(question.device_name, question.memory_budget_bytes),
        cell=cell,
        capacity_tokens=fits,
        does_not_fit_tokens=fails,
        odd_tokens=_odd_tokens(study, cell, fits, fails),
        margin_bytes=question.margin_bytes,
        is_memory_only=is_memory_only,
        source=question.figures,
        trainer=OURS if question.foreign is None else question.foreign.trainer,
        command=None if question.foreign is None else question.foreign.typed or None,
        found_in=study.path or "a search that was not recorded",
    )


def _odd_tokens(study: Study, cell: Cell, fits: int, fails: int | None) -> tuple[int, ...]:
    """Lengths whose trials contradict those around them, by the cell's edge."""
    fit_at: dict[int, bool] = {}
    for spec, result in study.told_by(cell):
        is_fit = study.question.counts_as_fit(result)
        fit_at[spec.length_tokens] = fit_at.get(spec.length_tokens, True) and is_fit
    odd = (
        tokens
        for tokens, is_fit in fit_at.items()
        if (fails is not None and tokens >= fails if is_fit else tokens <= fits)
    )
    return tuple(sorted(odd))

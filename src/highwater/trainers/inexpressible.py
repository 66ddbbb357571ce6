"""What a trainer's own configuration has no words for, of the cells of a prediction: a row for each
trainer that is predicted and written for.
"""

from collections.abc import Callable, Mapping

import msgspec

from highwater.errors import UsageError
from highwater.model.model import ModelShape
from highwater.nouns.hardware import kind_of
from highwater.nouns.study import Cell, Question, counted_ranks
from highwater.nouns.trainer import TrainerName
from highwater.nouns.trial import TrialSpec
from highwater.trainers.trl_files import refuse_unwritten

_REFUSE: Mapping[TrainerName, Callable[[TrialSpec, ModelShape], None]] = {"trl": refuse_unwritten}
"""Raises UsageError for what a trainer cannot be told; a trainer without a row is told anything."""


def expressible(question: Question, trainer: TrainerName) -> tuple[Question, tuple[str, ...]]:
    """The question with those of its cells that the trainer can be told, and a note for each that
    it cannot.

    Raises the UsageError of the first where it can be told none.
    """
    refuse = _REFUSE.get(trainer)
    if refuse is None:
        return question, ()
    _refuse_several_machines(question)
    kept: list[Cell] = []
    refused: list[UsageError] = []
    notes: list[str] = []
    for cell in question.cells:
        try:
            refuse(question.trial(cell, question.grid.start_tokens), question.model.shape)
        except UsageError as error:
            refused.append(error)
            where = f"{counted_ranks(cell.layout.gpus, question.device)}{cell.layout.suffix}"
            notes.append(f"{where} is skipped: {error.problem}")
        else:
            kept.append(cell)
    if not kept:
        raise refused[0]
    return msgspec.structs.replace(question, cells=tuple(kept)), tuple(dict.fromkeys(notes))


def _refuse_several_machines(question: Question) -> None:
    """Raise UsageError for GPUs of several machines, of which no configuration is written."""
    several = [cell.layout for cell in question.cells if cell.layout.is_several_machines]
    if several:
        kind = kind_of(question.device_name)
        gpus = f"{several[0].machine_gpus}{f'x{kind.name}' if kind else ''}"
        raise UsageError(
            f"a configuration is of one machine, and {several[0].gpus} GPUs are of several",
            hint=f"`--gpus {gpus} --copies 1` is of one of them",
        )

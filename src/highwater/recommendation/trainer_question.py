"""The question of a prediction, of what its trainer can be told."""

from typing import Any

from highwater.memory.question import predicted_question
from highwater.nouns.cluster import Cluster
from highwater.nouns.study import Question
from highwater.nouns.trainer import TrainerName
from highwater.trainers.inexpressible import expressible


def trainer_question(
    model: str,
    where: Cluster,
    trainer: TrainerName,
    length_tokens: int | None,
    settings: dict[str, Any],
) -> tuple[Question, tuple[str, ...]]:
    """What ``predicted_question`` gives, less what the trainer's own configuration has no words
    for, which the notes say; raises UsageError, as a trial does, where nothing is left.
    """
    question, notes = predicted_question(model, where, trainer, length_tokens, settings)
    question, skipped = expressible(question, trainer)
    return question, (*notes, *skipped)

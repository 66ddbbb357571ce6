"""Drafts: what a recommendation would be about, before anything is predicted.

For whoever refuses by settings and layouts alone: a prediction of another trainer's step may take
seconds.
"""

from collections.abc import Mapping
from typing import Any

from highwater.memory.question import predicted_question
from highwater.model.rope import yarn
from highwater.nouns.cells import simplicity
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.nouns.study import Cell
from highwater.nouns.trainer import TrainerName
from highwater.recommendation.recommend import trainers_gpus
from highwater.trials.probe import gpus_meant
from highwater.units import parse_tokens


def drafted(
    model: str,
    *,
    length: int | str,
    gpus: str | int | None,
    gpu_memory: str | int | None,
    rollout_gpus: int,
    trainer: TrainerName,
    settings: Mapping[str, Any],
) -> Recommendation:
    """Every candidate that ``recommend`` would predict with its default budget, the simplest first;
    none has a headroom, and none is chosen. Raises what ``recommend`` does for what cannot be
    asked.
    """
    where = trainers_gpus(gpus_meant(gpus, gpu_memory), rollout_gpus)
    tokens = parse_tokens(str(length))
    question, notes = predicted_question(model, where, trainer, tokens, dict(settings))
    cells = sorted(question.cells, key=simplicity)
    return Recommendation(
        model_name=question.model.name,
        native_length_tokens=question.grid.native_length_tokens,
        trainer=trainer,
        length_tokens=tokens,
        gpus=where.gpus,
        rollout_gpus=rollout_gpus,
        device_name=where.device_name,
        device_bytes=where.device_bytes,
        default_sequences=cells[0].settings.sequences_per_micro_batch,
        chosen=None,
        candidates=tuple(_unpredicted(cell, tokens) for cell in cells),
        yarn=yarn(question.model, length_tokens=tokens, rope=cells[0].settings.rope),
        accuracy="not predicted yet",
        notes=notes,
    )


def _unpredicted(cell: Cell, tokens: int) -> Candidate:
    """A candidate of which nobody knows yet whether it fits."""
    return Candidate(
        cell=cell,
        is_lowered=False,
        token_budget_tokens=tokens,
        fits=False,
        source="predicted",
        found_in="",
        headroom_bytes=None,
        capacity_tokens=0,
        capacity_source="predicted",
    )

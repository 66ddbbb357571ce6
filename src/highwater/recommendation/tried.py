"""Recommendations for trainers that are tried alone: what their own studies found at a length.

Nothing is predicted: no formula knows such a trainer.
"""

from collections.abc import Sequence

from highwater.errors import UsageError
from highwater.memory.capacity import MemoryLimit
from highwater.memory.from_trials import as_measured, obstacle, with_margin
from highwater.model.model import load_model
from highwater.nouns.cluster import Cluster
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.nouns.study import Cell, Study, counted_ranks
from highwater.nouns.trainer import AnyTrainer, trainer_title
from highwater.recommendation.candidates import token_budget

_ACCURACY = "by real trials; peaks are sampled from outside, and a shorter one is missed"


def tried_recommendation(
    model: str,
    *,
    length_tokens: int,
    where: Cluster,
    memory_limit: MemoryLimit,
    trainer: AnyTrainer,
    studies: Sequence[Study],
    margin_bytes: int,
) -> Recommendation:
    """The simplest settings that a foreign trainer's studies saw train a length.

    Raises UsageError where no study has an answer.
    """
    read = load_model(model)
    found: dict[Cell, Candidate] = {}
    notes: list[str] = []
    for recorded in studies:
        study = with_margin(recorded, margin_bytes)
        why = obstacle(
            study,
            model=read,
            device_name=where.device_name,
            memory_limit=memory_limit,
            trainer=trainer,
        )
        told = {} if why else measured_cells(study, where.gpus, length_tokens)
        if not told:
            ranks = counted_ranks(where.gpus, "cuda")
            notes.append(
                f"{study.path} is not used: {why or f'it has no answer for this length on {ranks}'}"
            )
        found = told | found
    if not found:
        raise UsageError(
            f"no study has trials of {trainer_title(trainer)} at {length_tokens} tokens: "
            + ("; ".join(notes) or "none is named"),
            hint="leave `--trainer` out, or name a study of it with `--study`",
        )
    candidates = tuple(sorted(found.values(), key=lambda each: each.order))
    return Recommendation(
        model_name=read.name,
        native_length_tokens=read.shape.native_length_tokens,
        trainer=trainer,
        length_tokens=length_tokens,
        gpus=where.gpus,
        device_name=where.device_name,
        device_bytes=where.device_bytes,
        margin_bytes=margin_bytes,
        default_sequences=1,
        chosen=next((each for each in candidates if each.fits), None),
        candidates=candidates,
        yarn=None,
        accuracy=_ACCURACY,
        notes=tuple(notes),
    )


def measured_cells(study: Study, gpus: int, length_tokens: int) -> dict[Cell, Candidate]:
    """What a study's trials say of a length, by cell."""
    unknown = (
        Candidate(
            cell=cell,
            is_lowered=False,
            token_budget_tokens=token_budget(cell, length_tokens),
            fits=False,
            source="measured",
            found_in=study.path or "a study",
            headroom_bytes=None,
            capacity_tokens=0,
            capacity_source="measured",
        )
        for cell in study.question.cells
        if cell.layout.gpus == gpus
    )
    told = ((each.cell, as_measured(each, study, length_tokens)) for each in unknown)
    return {cell: measured for cell, measured in told if measured is not None}

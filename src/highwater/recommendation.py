"""Recommendation: the simplest settings that train a length on some GPUs, measured where a study tells, else predicted by formula.

```python
import highwater

found = highwater.recommend("Qwen3-8B", gpus="4xH20-96GB", length="64k")
print(found.chosen.label if found.chosen else "nothing fits")
```
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from highwater.errors import UsageError
from highwater.launch.probe import gpus_meant
from highwater.prediction.asked import room_in
from highwater.prediction.candidates import Asked, predicted_candidates
from highwater.prediction.capacity import NOT_MODELLED, accuracy
from highwater.prediction.formula import refuse_unknown_family
from highwater.prediction.recorded import as_measured, obstacle, with_margin
from highwater.prediction.remedies import remedies
from highwater.prediction.shipped import shipped
from highwater.spec.cluster import Cluster
from highwater.spec.events import Trainer
from highwater.spec.model import STATE_BYTES_PER_PARAMETER, load_model
from highwater.spec.recommendation import Candidate, Recommendation
from highwater.spec.request import request_from
from highwater.spec.rope import yarn
from highwater.spec.study import Question, Study, counted_ranks
from highwater.store.journal import read_study
from highwater.units import parse_memory, parse_tokens

_OF_A_GRID = ("start_length", "resolution", "max_length")


def recommend(
    model: str,
    *,
    length: int | str,
    gpus: str | int | None = None,
    rollout_gpus: int = 0,
    trainer: Trainer = "highwater",
    studies: Sequence[str | Path] = (),
    gpu_memory: str | int | None = None,
    host_memory: str | int | None = None,
    reserved: str | int = 0,
    state_bytes_per_param: int = STATE_BYTES_PER_PARAMETER,
    **settings: Any,
) -> Recommendation:
    """The simplest settings that train ``length`` on ``gpus``, why simpler ones do not, and what the next would buy.

    ``rollout_gpus`` of them are set aside: the others are the trainer's, and every count is. ``studies`` are files that
    ``highwater find`` wrote: where one tells of a cell, of this model on as many GPUs of this kind, that is taken and
    labelled measured; the other cells are predicted by formula, and fit where the upper end of the interval does.

    The other arguments, and ``settings``, are those of ``predict``. Nothing is run.
    Raises HighwaterError for what cannot be asked.
    """
    refuse_unknown_family(load_model(model))
    _check(trainer, studies, settings)
    typed = request_from({"model": model, **settings}, keywords=True)
    where = trainers_gpus(gpus_meant(gpus, gpu_memory), rollout_gpus)
    asked = Asked(
        model=model,
        where=where,
        trainer=trainer,
        length_tokens=parse_tokens(str(length)),
        room=room_in(where, host_memory=host_memory, reserved=reserved, state_bytes_per_param=state_bytes_per_param),
        settings={name: getattr(typed, name) for name in settings},
    )
    recorded = [read_study(Path(path)) for path in studies]
    return _recommended(asked, recorded, rollout_gpus=rollout_gpus, reserved_bytes=parse_memory(str(reserved)))


def _recommended(asked: Asked, studies: Sequence[Study], *, rollout_gpus: int, reserved_bytes: int) -> Recommendation:
    """The simplest candidate that fits, and the others."""
    question, notes = asked.question(asked.sequences, length_tokens=asked.length_tokens)
    known = asked.known(question)
    candidates, of_studies = _with_trials(predicted_candidates(asked), asked, question, studies)
    chosen = next((candidate for candidate in candidates if candidate.fits), None)
    return Recommendation(
        model_name=question.model.name,
        native_length_tokens=question.grid.native_length_tokens,
        trainer=asked.trainer,
        length_tokens=asked.length_tokens,
        gpus=asked.where.gpus,
        rollout_gpus=rollout_gpus,
        device_name=asked.where.device_name,
        device_bytes=asked.where.device_bytes,
        reserved_bytes=reserved_bytes,
        host_memory_bytes=asked.room.host_bytes,
        state_bytes_per_parameter=asked.room.state_bytes_per_parameter,
        margin_bytes=question.margin_bytes,
        default_sequences=asked.sequences,
        chosen=chosen,
        candidates=candidates,
        yarn=yarn(question.model, length_tokens=asked.length_tokens, rope=question.cells[0].settings.rope),
        remedies=() if chosen else remedies(asked, reserved_bytes=reserved_bytes, rollout_gpus=rollout_gpus),
        accuracy=_accuracy(asked, question),
        unlike=() if known is None else known.unlike,
        not_modelled=NOT_MODELLED,
        notes=(*notes, *of_studies),
    )


def _accuracy(asked: Asked, question: Question) -> str:
    """Of a replay, of the closed form, or of both: whatever answers the cells."""
    if asked.trainer == "highwater":
        return accuracy(asked.trainer, replayed=0, cells=len(question.cells))
    replayed = sum(shipped(question.model.shape, cell, asked.room) is not None for cell in question.cells)
    return accuracy(asked.trainer, replayed=replayed, cells=len(question.cells))


def trainers_gpus(where: Cluster, rollout_gpus: int) -> Cluster:
    """The GPUs without those that roll out; raises UsageError where none is left."""
    if rollout_gpus < 0:
        raise UsageError(f"{rollout_gpus} GPUs for rollout", hint="use `--rollout-gpus 0` or more")
    if rollout_gpus >= where.gpus:
        hint = f"use `--rollout-gpus {where.gpus - 1}` or fewer" if where.gpus > 1 else "leave `--rollout-gpus` out"
        have = counted_ranks(where.gpus, "cuda")
        raise UsageError(f"{have}, {rollout_gpus} for rollout: none is left for the trainer", hint=hint)
    return msgspec.structs.replace(where, gpus=where.gpus - rollout_gpus)


def _check(trainer: Trainer, studies: Sequence[str | Path], settings: Mapping[str, Any]) -> None:
    if studies and trainer != "highwater":
        raise UsageError(f"trials of this engine say nothing about the trainer {trainer}", hint="leave `--study` out")
    if "token_budget" in settings:
        raise UsageError(
            "the token budget is part of the answer", hint="name what it is to hold, for example `--sequences-per-micro-batch 2`"
        )
    for name in _OF_A_GRID:
        if name in settings:
            flag = name.replace("_", "-")
            raise UsageError(f"one length, and a {name.replace('_', ' ')}", hint=f"leave `--{flag}` out")


def _with_trials(
    predicted: tuple[Candidate, ...], asked: Asked, question: Question, studies: Sequence[Study]
) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
    """The candidates, each by the first study that tells of it; and a note for each study that tells of none."""
    candidates, notes = list(predicted), list[str]()
    for recorded in studies:
        notes += [f"{recorded.path}: {note}" for note in recorded.notes]
        study = with_margin(recorded, question.margin_bytes)
        why = obstacle(
            study,
            model=question.model,
            device_name=asked.where.device_name,
            room=asked.room,
        )
        host_bytes = asked.room.host_bytes
        found = [
            None
            if why or (host_bytes is not None and (candidate.host_bytes or 0) > host_bytes)
            else as_measured(candidate, study, asked.length_tokens)
            for candidate in candidates
        ]
        if not any(found):
            why = why or f"no rung that is asked about has an answer for this length on {counted_ranks(asked.where.gpus, 'cuda')}"
            notes.append(f"{study.path} is not used: {why}")
        for index, measured in enumerate(found):
            if measured is not None and candidates[index].source == "predicted":
                candidates[index] = measured
    return tuple(candidates), tuple(notes)

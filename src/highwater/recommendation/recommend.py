"""Recommendation: the simplest settings that train a length on some GPUs.

Cells that a study measured are taken as measured; all others are predicted by formula.

```python
import highwater

found = highwater.recommend("Qwen3-8B", gpus="4xH20-96GB", length="64k")
print(found.chosen.label if found.chosen else "nothing fits")
```
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from highwater.errors import UsageError
from highwater.memory.capacity import MemoryLimit
from highwater.memory.formula.formula import refuse_unknown_family
from highwater.memory.formula.rollout import rollout_of
from highwater.memory.from_trials import as_measured, obstacle, with_margin
from highwater.memory.question import memory_limit_of, predicted_question
from highwater.memory.trainers import accuracy, replayed_cells
from highwater.model.model import load_model
from highwater.nouns.cells import simplicity
from highwater.nouns.cluster import Cluster
from highwater.nouns.objective import RolloutRequest
from highwater.nouns.plan_notes import prompt_notes
from highwater.nouns.recommendation import Aim, Alternative, Candidate, FileChange, Recommendation
from highwater.nouns.request import request_from
from highwater.nouns.settings import Settings
from highwater.nouns.study import Question, Study, counted_ranks, default_headroom_bytes
from highwater.nouns.trainer import OURS, TRAINERS, AnyTrainer, TrainerName, predicted_trainer
from highwater.recommendation.alternatives import (
    alternatives,
    halved,
    measured_cells,
    tried_recommendation,
)
from highwater.recommendation.candidates import (
    Goal,
    candidate_of,
    predicted_at,
    predicted_candidates,
    recommendation_of,
    trainers_gpus,
    unknown_candidate,
)
from highwater.recommendation.planner import planned_candidates
from highwater.store.journal import read_study
from highwater.trials.probe import gpus_meant
from highwater.units import parse_memory, parse_tokens


def recommend(
    model: str,
    *,
    length: int | str | None,
    gpus: str | int | None = None,
    rollout_gpus: int = 0,
    trainer: AnyTrainer = OURS,
    studies: Sequence[str | Path] = (),
    gpu_memory: str | int | None = None,
    host_memory: str | int | None = None,
    reserved: str | int = 0,
    aim: Aim = "simplest",
    **settings: Any,
) -> Recommendation:
    """Recommend the simplest settings that train ``length`` on ``gpus``; by ``aim`` the fastest, or
    those that take the least memory of a GPU.

    The answer also says why simpler settings do not fit, and what other settings would gain.
    ``rollout_gpus`` of the GPUs are for the rollout; all counts in the answer are of the other
    GPUs. ``studies`` are files that ``highwater find`` wrote: results for a cell, with this model
    on as many GPUs of this kind, are used and labelled measured. Other cells are predicted by
    formula, and fit if the upper end of the interval fits. A ``trainer`` that can only be tried is
    not predicted: the answer comes from its studies alone.

    The other arguments, and ``settings``, are those of ``predict``. ``trainer_config`` is the
    user's file, which sets the length if that is None, and all settings but those that save memory,
    for which a note says what to write into it. No trial is run. Raises HighwaterError for invalid
    settings.
    """
    known = predicted_trainer(trainer)
    if aim != "simplest" and (studies or known is None):
        raise UsageError(
            f"which settings are {aim} is predicted, and studies tell of a few",
            hint=f"leave `--study` out, or `--{aim}`",
        )
    if known is not None and studies and not TRAINERS[known].is_run:
        raise UsageError(
            f"trials of this engine say nothing about {TRAINERS[known].step}",
            hint="leave `--study` out",
        )
    where = trainers_gpus(gpus_meant(gpus, gpu_memory), rollout_gpus)
    limit = memory_limit_of(where, host_memory=host_memory, reserved=reserved)
    recorded = [read_study(Path(path)) for path in studies]
    if known is None:
        return tried_recommendation(
            model,
            length_tokens=parse_tokens(str(length)),
            where=where,
            memory_limit=limit,
            trainer=trainer,
            studies=recorded,
            settings=settings,
        )
    own_file, read = settings.pop("trainer_config", None), None
    if own_file is not None:
        from highwater.trainers.user_file import settings_of  # without a file no YAML

        own_file = Path(own_file)
        read = settings_of(known, own_file, gpus=where.gpus, typed=settings)
        settings, length = {**read.kept, **settings}, length or read.length_tokens
    if length is None:
        raise UsageError("no length is named", hint="name one, for example `--length 32k`")
    goal = goal_of(model, parse_tokens(str(length)), where, limit, known, settings, rollout_gpus)
    found = _recommended(
        *(goal, recorded, aim),
        rollout_gpus=rollout_gpus,
        reserved_bytes=parse_memory(str(reserved)),
    )
    if own_file is None or read is None:
        return found
    found = _with_fewest_changes(found, goal, own_file, read.settings)
    required = (FileChange(words=e, frees_bytes=None) for e in read.required if found.own_file)
    found = found.replace(changes=(*found.changes, *required))
    others, own = list(found.alternatives), read.of_a_step.items()
    for place, each in enumerate(others):
        if each.cell and any(getattr(each.cell.settings, n, v) != v for n, v in own):
            said = each.how_many and f"{each.how_many}, with changes to {own_file.name}"
            others[place] = each.replace(how_many=said)
    notes = tuple(dict.fromkeys((*read.notes, *found.notes)))
    return found.replace(notes=notes, alternatives=tuple(others))


def _with_fewest_changes(
    found: Recommendation, goal: Goal, own_file: Path, settings: Mapping[str, Any]
) -> Recommendation:
    """Return the recommendation for a user's file with these ``settings``: as it is, if that fits
    in some environment; else with the fewest changes. Starting with the change that frees the
    least, each change is dropped if the length fits without it.
    """
    from highwater.trainers.user_file import FILE_WORDS, SAVING, changes

    if found.chosen is None or not FILE_WORDS[goal.trainer].length:
        return found
    chosen, known = found.chosen.cell, {each.cell: each for each in found.candidates}
    own = {name: value for name, value in settings.items() if name in SAVING}
    other = {n: goal.settings.get(n, getattr(Settings(), n)) for n in ("allocator", "offload")}
    before = chosen.changed(**own, **other, sequences_per_micro_batch=goal.sequences)
    every = changes(goal.trainer, before.settings, chosen.settings)

    def of(words: Iterable[str]) -> Candidate:
        cell = before.changed(**{n: v for each in words for n, v in every[each].items()})
        both = (predicted_at(goal, cell, length) for length in (goal.length_tokens, None))
        return known.get(cell) or candidate_of(goal, *both)

    written = of(())
    rungs = (written, *found.candidates)
    same = [e for e in rungs if e.cell.changed(**other).settings == before.settings]
    taken = min((e for e in same if e.fits), key=lambda e: simplicity(e.cell), default=None)
    if taken is None:

        def frees(each: str) -> int:
            return (of([each]).headroom_bytes or 0) - (written.headroom_bytes or 0)

        kept = sorted(every, key=frees, reverse=True)
        for each in kept[::-1]:
            fewer = [more for more in kept if more != each]
            kept = fewer if of(fewer).fits else kept
        for place, each in enumerate(kept):  # no smaller a batch than it must be
            for rows in halved(goal) if "sequences_per_micro_batch" in every[each] else ():
                larger = before.settings.replace(sequences_per_micro_batch=rows)
                every |= (text := changes(goal.trainer, before.settings, larger))
                if of(tried := [*kept[:place], *text, *kept[place + 1 :]]).fits:
                    kept = tried
                    break
        taken = of(kept) if of(kept).fits else found.chosen
        may_fit = (each for each in same if each.risk is not None)
        changed = tuple(FileChange(words=each, frees_bytes=frees(each)) for each in kept)
        written = max(may_fit, key=lambda each: each.headroom_bytes or 0, default=written)
        found = found.replace(as_written=written, changes=changed)
    rungs = sorted(dict.fromkeys((*found.candidates, taken)), key=lambda each: each.order)
    return found.replace(chosen=taken, candidates=tuple(rungs), own_file=own_file.name)


def what_would_fit(
    model: str,
    *,
    length_tokens: int,
    gpus: str | int | None = None,
    trainer: TrainerName = OURS,
    gpu_memory: str | int | None = None,
    host_memory: str | int | None = None,
    reserved: str | int = 0,
    rollout_gpus: int = 0,
    **settings: Any,
) -> tuple[Alternative, ...]:
    """Find changes that are predicted to train ``length_tokens`` if the requested settings do not:
    more GPUs, larger GPUs, another technique. The arguments are those of ``recommend``.
    """
    where = trainers_gpus(gpus_meant(gpus, gpu_memory), rollout_gpus)
    limit = memory_limit_of(where, host_memory=host_memory, reserved=reserved)
    goal = goal_of(model, length_tokens, where, limit, trainer, settings, rollout_gpus)
    goal = replace(goal, may_lower="sequences_per_micro_batch" not in settings)  # as in ``predict``
    return alternatives(goal, reserved_bytes=parse_memory(str(reserved)), rollout_gpus=rollout_gpus)


def goal_of(
    model: str,
    length_tokens: int,
    where: Cluster,
    limit: MemoryLimit,
    trainer: TrainerName,
    settings: Mapping[str, Any],
    rollout_gpus: int,
) -> Goal:
    """The goal of a recommendation; raises HighwaterError for invalid settings."""
    if "token_budget" in settings:
        raise UsageError(
            "the token budget is part of the answer",
            hint="name what it is to hold, for example `--sequences-per-micro-batch 2`",
        )
    refuse_unknown_family(load_model(model))
    typed = request_from({"model": model, **settings}, keywords=True)
    goal = Goal(
        model=model,
        where=where,
        trainer=trainer,
        length_tokens=length_tokens,
        memory_limit=limit,
        settings={name: getattr(typed, name) for name in settings},
    )
    if typed.rollout_request == RolloutRequest():
        return goal
    question, _ = goal.question(goal.sequences, length_tokens=length_tokens)
    beside = rollout_of(typed, question, TRAINERS[trainer].rollout, rollout_gpus=rollout_gpus)
    return replace(goal, memory_limit=limit.replace(rollout=beside))


def _recommended(
    goal: Goal, studies: Sequence[Study], aim: Aim, *, rollout_gpus: int, reserved_bytes: int
) -> Recommendation:
    """The best candidate that fits, with all others listed."""
    limit = goal.memory_limit
    question, notes = goal.question(goal.sequences, length_tokens=goal.length_tokens)
    known, replayed = goal.known(question), replayed_cells(question, goal.trainer, limit)
    if aim == "simplest":
        candidates, of_studies = _with_trials(predicted_candidates(goal), goal, question, studies)
    else:
        candidates, of_studies = planned_candidates(goal, aim), ()
    own = "settings are of this package's engine: `--trainer verl` says those of verl's actor"
    notes += (own,) * (limit.rollout is not None and goal.trainer == OURS)
    others = ()
    if not any(candidate.fits for candidate in candidates):
        candidates = _with_one_that_may_fit(candidates, goal, question)
        others = alternatives(goal, reserved_bytes=reserved_bytes, rollout_gpus=rollout_gpus)
    return recommendation_of(
        *(goal, question, candidates),
        rollout_gpus=rollout_gpus,
        reserved_bytes=reserved_bytes,
        aim=aim,
        alternatives=others,
        accuracy=accuracy(question, goal.trainer, replayed, known),
        unlike=() if known is None else known.unlike,
        notes=(*notes, *of_studies),
    )


def _with_one_that_may_fit(
    candidates: tuple[Candidate, ...], goal: Goal, question: Question
) -> tuple[Candidate, ...]:
    """Candidates; the roomiest that may fit counts as fitting, unless more headroom is asked."""
    may_fit = [each for each in candidates if each.source == "predicted" and each.risk is not None]
    if not may_fit or question.margin_bytes > default_headroom_bytes(goal.where.device_bytes):
        return candidates
    roomiest = max(may_fit, key=lambda each: each.headroom_bytes or 0)
    longest = max(roomiest.capacity_tokens, goal.length_tokens)
    taken = roomiest.replace(fits=True, lacks_bytes=None, lacks_of=None, capacity_tokens=longest)
    return tuple(taken if each is roomiest else each for each in candidates)


def _with_trials(
    predicted: tuple[Candidate, ...], goal: Goal, question: Question, studies: Sequence[Study]
) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
    """Replace predicted candidates by the first study's results; note studies without any."""
    candidates, notes = list(predicted), list[str]()
    limit, asked_bytes = goal.memory_limit, parse_memory(str(goal.settings.get("headroom", 0)))
    for recorded in studies:
        notes += [f"{recorded.path}: {note}" for note in recorded.notes]
        # a trial that fit is a fact: only a headroom that was asked for speaks against it
        study = with_margin(recorded, asked_bytes)
        why = obstacle(study, question.model, goal.where.device_name, limit, goal.trainer)
        found = [
            None
            if why or (limit.host_bytes is not None and (each.host_bytes or 0) > limit.host_bytes)
            else as_measured(each, study, goal.length_tokens)
            for each in candidates
        ]
        beside = () if why else _measured_beside(candidates, goal, study)
        if not any(found) and not beside:
            ranks = counted_ranks(goal.where.gpus, "cuda")
            silent = f"no rung that is asked about has an answer for this length on {ranks}"
            notes.append(f"{study.path} is not used: {why or silent}")
        elif study.question.prompt_tokens > question.prompt_tokens:
            notes += prompt_notes(study.path, study.question)
        for index, measured in enumerate(found):
            if measured is not None and candidates[index].source == "predicted":
                candidates[index] = measured
        candidates += beside
    return tuple(sorted(candidates, key=lambda each: each.order)), tuple(notes)


def _measured_beside(
    candidates: Sequence[Candidate], goal: Goal, study: Study
) -> tuple[Candidate, ...]:
    """Cells that a study of a foreign trainer measured with settings outside the question."""
    if not TRAINERS[goal.trainer].is_watched or set(goal.settings) - {"headroom"}:
        return ()
    known = {each.cell for each in candidates}
    told = measured_cells(study, goal.where.gpus, goal.length_tokens)
    return tuple(each for cell, each in told.items() if cell not in known)


def drafted(
    model: str,
    *,
    length: int | str,
    gpus: str | int | None,
    trainer: TrainerName,
    gpu_memory: str | int | None,
    reserved: str | int,
    rollout_gpus: int,
    host_memory: str | int | None = None,
    **settings: Any,
) -> Recommendation:
    """The candidates of ``recommend`` with its default budget, the simplest first, before any is
    predicted: headroom and whether they fit are unknown, none is chosen. Raises its errors.
    """
    where = trainers_gpus(gpus_meant(gpus, gpu_memory), rollout_gpus)
    tokens = parse_tokens(str(length))
    limit = memory_limit_of(where, host_memory=host_memory, reserved=reserved)
    goal = goal_of(model, tokens, where, limit, trainer, settings, rollout_gpus)
    question, notes = predicted_question(model, where, trainer, tokens, settings)
    cells = sorted(question.cells, key=simplicity)
    return recommendation_of(
        *(goal, question, tuple(unknown_candidate(cell, tokens) for cell in cells)),
        rollout_gpus=rollout_gpus,
        reserved_bytes=parse_memory(str(reserved)),
        accuracy="not predicted yet",
        notes=notes,
    )

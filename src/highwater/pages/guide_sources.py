"""A guide, and its file, from what studies found, what others published and what is predicted."""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from highwater.api.prediction import predict
from highwater.errors import StudyError, UsageError
from highwater.memory.capacity import MemoryLimit, Prediction, predicted_capacities
from highwater.memory.table_accuracy import table_capacities
from highwater.nouns.capacities import Capacity, study_capacities
from highwater.nouns.codec import record_in
from highwater.nouns.declaration import flag_of, words_of
from highwater.nouns.recommendation import Query
from highwater.nouns.trainer import OURS, TrainerName
from highwater.pages.guide import Guide, guide_tables
from highwater.pages.guide_page import guide_markdown
from highwater.recommendation.candidates import query_of_prediction, query_of_study, query_of_table
from highwater.store.directory import check_new_file, free_name, write_new_file
from highwater.store.journal import read_study
from highwater.units import format_bytes

_EXAMPLE = "highwater guide --predict Qwen3-8B --gpus 4xA100-80GB"
_READ = (
    "what is read: a study that `highwater find` wrote, a .csv of known capacities, the .json of "
    f"`highwater predict --json`; without a file `{_EXAMPLE}`"
)

PAGE = ".html"
"""The end of a guide's name that makes it a page."""
_ENDS = (PAGE, ".md")
"""The ends that a guide's name may have."""
_PREDICTION = "prediction.json"


class _Found(NamedTuple):
    """Capacities, notes and queries from one source."""

    capacities: tuple[Capacity, ...]
    notes: tuple[str, ...]
    """What a reader should know about it."""
    words: str
    """The source as one types it after ``highwater guide``."""
    queries: Mapping[tuple[str, str, str], Query]
    """Queries of ``recommend``, by the source's name, model and kind of GPU."""


def guide(
    *sources: str | Path,
    predict: Sequence[str] = (),
    gpus: Sequence[str] = (),
    trainer: TrainerName = OURS,
    gpu_memory: str | int | None = None,
    sequences_per_micro_batch: int | None = None,
    ulysses: Sequence[int] = (),
    ring: Sequence[int] = (),
    copies: Sequence[int] = (),
    trained: Mapping[str, Any] | None = None,
) -> Guide:
    """The simplest settings that fit each length, on every kind and number of GPUs.

    A source is a study, a table of known capacities (``.csv``) or an answer of
    ``highwater predict --json`` (``.json``). ``predict`` names models whose capacities are
    predicted by formula, on each of ``gpus``: ``"4xA100-80GB"``; without any, on this machine's.
    ``gpu_memory`` is the memory of one, whichever they are, for a kind that no catalog has. It is
    predicted of so many ``sequences_per_micro_batch``, with these degrees of ``ulysses`` and
    ``ring`` and so many ``copies``; None, or none: as ``predict`` does by itself. ``trained`` are
    settings after which something else is learned: ``{"lora": 32}``. Raises
    HighwaterError for a source that cannot be read, and for what cannot be predicted.
    """
    degrees = (("ulysses", ulysses), ("ring", ring), ("copies", copies))
    named: dict[str, Any] = {name: list(numbers) for name, numbers in degrees if numbers}
    named |= trained or {}
    for is_wrong, what in (
        (gpus or gpu_memory is not None, "GPUs are named, and no model to predict"),
        (not sources, "a guide of nothing: no study, no table and no model is named"),
        (
            sequences_per_micro_batch is not None,
            "sequences a micro-batch are named, and no model to predict",
        ),
        (named, f"{', '.join(map(flag_of, named))}: and no model to predict"),
    ):
        if is_wrong and not predict:
            raise UsageError(what, hint=f"for example `{_EXAMPLE}`")
    capacities: list[Capacity] = []
    notes: dict[str, None] = {}
    models: dict[str, tuple[str | None, str, str]] = {}
    queries: dict[tuple[str, str, str], Query] = {}
    settings: dict[str, Any] = {"trainer": trainer, "gpu_memory": gpu_memory}
    if sequences_per_micro_batch is not None:
        settings["sequences_per_micro_batch"] = sequences_per_micro_batch
    settings |= named
    for found in (*map(_read, map(Path, sources)), *_predictions(predict, gpus, settings)):
        _check_models(found.capacities, found.words, models)
        capacities += found.capacities
        notes |= dict.fromkeys(found.notes)
        queries |= found.queries
    return Guide(tables=guide_tables(capacities), notes=tuple(notes), queries=queries)


def write_guide(path: str | Path, made: Guide) -> Path:
    """Write a guide into a new file: ``.html`` as a page of its own, ``.md`` as Markdown. A page
    needs nothing else. Raises HighwaterError for another name, and for a file that is there already
    or cannot be written.
    """
    path = Path(path)
    check_guide_file(path)
    if path.suffix == PAGE:
        # here, so that no other command waits for the templates
        from highwater.pages.chooser import places
        from highwater.pages.guide_page import guide_page

        text = guide_page(made, places(made))
    else:
        text = guide_markdown(made)
    write_new_file(path, text.encode(), flag="-o")
    return path


def check_guide_file(path: Path) -> None:
    """Raise UsageError for a file that no guide is written to. Nothing that a user has is
    overwritten.
    """
    if path.suffix not in _ENDS:
        hint = (
            f"end it in {' or '.join(_ENDS)}: `-o {shlex.quote(free_name(f'{path.stem}{PAGE}'))}`"
        )
        raise UsageError(
            f"{path}: a guide is not written as {path.suffix or 'a file without a suffix'}",
            hint=hint,
        )
    check_new_file(path, flag="-o", name="guide.html" if path.suffix == PAGE else "guide.md")


def _check_models(
    found: Iterable[Capacity], words: str, models: dict[str, tuple[str | None, str, str]]
) -> None:
    """Raise UsageError where a name that is known already stands for another model."""
    for each in found:
        if each.config_digest is None:
            continue
        first = models.setdefault(each.model_name, (each.config_digest, each.found_in, words))
        digest, found_in, known_words = first
        if digest != each.config_digest:
            raise UsageError(
                f"{found_in} and {each.found_in} each have a model {each.model_name}, and "
                "these are two models: their config.json differ",
                hint=f"`highwater guide {known_words}` and `highwater guide {words}` make a guide "
                f"of each",
            )


def _read(path: Path) -> _Found:
    words = shlex.quote(str(path))
    if path.suffix == ".csv":
        capacities = table_capacities(path)
        return _Found(capacities, (), words, _asked(capacities, query_of_table))
    if path.suffix == ".json":
        return _read_prediction(path)
    try:
        study = read_study(Path(path))
    except StudyError as error:
        raise StudyError(error.problem, hint=_READ) from error
    if study.question.device == "cpu":
        hint = f"leave it out; for example `{_EXAMPLE}`"
        raise UsageError(f"{path} is a search on the CPU, and a guide is about GPUs", hint=hint)
    odd = (
        f"{each.cell.label}: not monotone: {text}"
        for each in study.answers
        for text in each.contradictions
    )
    capacities, query = study_capacities(study), query_of_study(study)
    notes = tuple(f"{path}: {note}" for note in (*study.notes, *odd))
    return _Found(capacities, notes, words, _asked(capacities, lambda _: query))


def _read_prediction(path: Path) -> _Found:
    hint = (
        f"`highwater predict Qwen3-8B --gpus 4xA100-80GB --json > {free_name(_PREDICTION)}` "
        f"writes one"
    )
    what = "a prediction of this version"
    prediction = record_in(path, Prediction, called="prediction", what=what, hint=hint)
    assumed = _assumed(prediction.memory_limit)
    if assumed:
        flags = " and ".join(f"`{flag}`" for flag in assumed)
        raise UsageError(
            f"{path} was predicted with {' and '.join(assumed.values())}, and a guide says "
            f"nothing of that",
            hint=f"predict without {flags}: {hint}",
        )
    notes = tuple(f"{path}: {note}" for note in prediction.notes)
    capacities, query = predicted_capacities(prediction, str(path)), query_of_prediction(prediction)
    return _Found(capacities, notes, shlex.quote(str(path)), _asked(capacities, lambda _: query))


def _asked(
    capacities: Iterable[Capacity], query_of: Callable[[Capacity], Query | None]
) -> Mapping[tuple[str, str, str], Query]:
    return {
        (each.found_in, each.model_name, each.device_name): query
        for each in capacities
        if (query := query_of(each)) is not None
    }


def _assumed(memory_limit: MemoryLimit) -> dict[str, str]:
    """Assumptions of a prediction that others do not make, by flag. Memory that is reserved on a
    GPU is in the GPU's name.
    """
    host = memory_limit.host_bytes
    found: dict[str, str] = {}
    if host is not None and memory_limit.usual_host is None:
        found["--host-memory"] = f"{format_bytes(host)} of host memory"
    if memory_limit.constants is not None:
        found["--constants"] = "constants of its own"
    return found


def _predictions(
    models: Sequence[str], gpus: Sequence[str], settings: Mapping[str, Any]
) -> Iterator[_Found]:
    """Predict each model on each of the GPUs, with ``settings`` as keywords of ``predict``."""
    given = {name: value for name, value in settings.items() if value not in (None, OURS)}
    typed = words_of(given)
    for where in gpus or (None,):
        for model in models:
            flags = [*(["--gpus", where] if where else []), *typed]
            prediction = predict(model, gpus=where, **settings)
            command = shlex.join(["highwater", "predict", model, *flags])
            notes = tuple(f"{command}: {note}" for note in prediction.notes)
            capacities = predicted_capacities(prediction, command)
            query = query_of_prediction(prediction, model)
            words = shlex.join(["--predict", model, *flags])
            yield _Found(capacities, notes, words, _asked(capacities, lambda _, query=query: query))

"""The guide as data: tables with the simplest settings that fit each length and model, for each
kind and number of GPUs. Sources: studies, published results, and predictions.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from highwater.api.prediction import predict
from highwater.errors import StudyError, UsageError
from highwater.memory.capacity import MemoryLimit, Prediction, predicted_capacities
from highwater.memory.capacity_table import table_capacities
from highwater.nouns.capacities import Capacity, Source, may_be_simpler, simplest, study_capacities
from highwater.nouns.codec import record_in
from highwater.nouns.declaration import words_of
from highwater.nouns.recommendation import Query
from highwater.nouns.settings import Settings, other_training
from highwater.nouns.study import Cell, counted_ranks, usual_grid
from highwater.nouns.trainer import (
    FOREIGN,
    OURS,
    REGISTRY,
    TrainerName,
    TrainerTraits,
    foreign_name,
    predicted_as,
    predicted_traits,
    trainer_title,
)
from highwater.recommendation.candidates import query_of_prediction, query_of_study, query_of_table
from highwater.store.directory import free_name
from highwater.store.journal import read_study
from highwater.units import counted, format_bytes

NOTHING_FITS, UNKNOWN = "-", "?"
ORIGINS: dict[Source, str] = {
    "measured": "by real trials",
    "simulated": "from a memory law, nothing was trained",
    "predicted": "where the prediction is an interval, its upper end fits",
    "published": "by others, not measured here",
}
"""How far to trust figures, by source."""
SOURCES: dict[Source, str] = {
    **{source: f"{source} {origin}" for source, origin in ORIGINS.items()},
    "predicted": f"predicted, nothing was run; {ORIGINS['predicted']}",
}

_OWN: Mapping[str, Callable[[Settings], bool]] = {
    "sharded checkpoints": lambda settings: settings.checkpoint != "none",
    "YaRN at every length": lambda settings: settings.rope == "yarn",
}
"""What our own engine may do on every rung of a study alike. Strategy and saved weights belong to
the rung, as in the published ladder: of rungs with one label the best counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a guide says of one model at one length: the simplest settings that fit."""

    model_name: str
    capacity: Capacity | None
    """Capacity of the simplest settings that are known to fit; None if none are."""
    may_be_simpler: bool
    """True if simpler settings, of which nothing is known, may fit; without a capacity: any."""

    @property
    def label(self) -> str:
        """The settings; ``-``: nothing that was tried fits; ``?``: unknown."""
        return self.label_in(lambda cell: cell.words)

    def label_in(self, words: Callable[[Cell], str]) -> str:
        """The settings in ``words``; ``-``: nothing that was tried fits; ``?``: unknown."""
        if self.capacity is None:
            return UNKNOWN if self.may_be_simpler else NOTHING_FITS
        return words(self.capacity.cell) + " (memory-only)" * self.capacity.is_memory_only

    @property
    def entry(self) -> str:
        """The label in a table: with a ``?`` if simpler settings may fit."""
        is_open = self.capacity is not None and self.may_be_simpler
        return f"{self.label} ?" if is_open else self.label


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideTable:
    """A table of a guide: settings by length and model, on one number of GPUs of one kind."""

    device_name: str
    gpus: int
    source: Source
    training: str
    native_length_tokens: int
    """Native length of all its models, which determines the grid of lengths."""
    capacities: tuple[Capacity, ...]
    models: tuple[str, ...]
    rows: tuple[tuple[int, tuple[Choice, ...]], ...]
    """For each length in tokens, a choice for each model, in the order of ``models``."""

    @property
    def gpus_in_words(self) -> str:
        """Number of GPUs in words: ``4 GPUs``."""
        return counted_ranks(self.gpus, "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """A guide: its tables, and the question for ``recommend`` behind each."""

    tables: tuple[GuideTable, ...]
    notes: tuple[str, ...] = ()
    """Notes on the sources, one line each."""
    queries: Mapping[tuple[str, str, str], Query] = field(
        default_factory=dict[tuple[str, str, str], Query]
    )
    """Queries to ask ``recommend``, by source, model and kind of GPU, if it can be asked."""

    @property
    def choices(self) -> list[Choice]:
        """All choices of all tables, lengths and models."""
        return [choice for table in self.tables for _, choices in table.rows for choice in choices]


def guide_tables(capacities: Sequence[Capacity]) -> tuple[GuideTable, ...]:
    """Make all tables of a guide, in the order of the capacities, fewer GPUs first. A table holds
    the capacities of one kind and number of GPUs, one source, one kind of training and one native
    length, so that its models share the grid of lengths.
    """
    groups: dict[tuple[str, Source, str, int], dict[int, list[Capacity]]] = {}
    for each in capacities:
        key = each.device_name, each.source, training(each), each.native_length_tokens
        groups.setdefault(key, {}).setdefault(each.cell.layout.gpus, []).append(each)
    return tuple(_table(tuple(group[gpus])) for group in groups.values() for gpus in sorted(group))


def published_label(cell: Cell) -> str:
    """The settings as the published guides name them: ``vanilla``, ``Env + SP=2``."""
    parts = [] if cell.settings.label == "vanilla" else [cell.settings.label]
    words = " + ".join((*parts, *cell.layout.degrees)) or "vanilla"
    return words.replace("Ulysses ", "SP=").replace("ring ", "ring=")


def training(capacity: Capacity) -> str:
    """How a capacity was trained: ``Trinity-RFT, grpo, 2 sequences per micro-batch``."""
    settings = capacity.cell.settings
    if _traits_of(capacity) is None:
        return ", ".join(trained(capacity))
    count = settings.sequences_per_micro_batch
    packed = f"{counted(count, 'sequence')} per micro-batch"
    if settings.token_budget_tokens is not None:
        packed = f"a token budget of {settings.token_budget_tokens} per GPU"
    whose, what, *others = trained(capacity)
    return ", ".join((whose, what, packed, *others))


def _traits_of(capacity: Capacity) -> TrainerTraits | None:
    """Traits of the capacity's trainer; None for a user's command or script."""
    foreign = foreign_name(capacity.trainer)
    is_script = capacity.source == "measured" and foreign is not None and FOREIGN[foreign].is_typed
    return None if is_script else predicted_traits(capacity.trainer)


def trained(capacity: Capacity) -> tuple[str, ...]:
    """The parts of ``training``, without how many sequences a micro-batch has."""
    settings = capacity.cell.settings
    left = (f"{format_bytes(capacity.margin_bytes)} left free",) if capacity.margin_bytes else ()
    traits = _traits_of(capacity)
    typed = f" ({capacity.command})" if capacity.command else ""
    if capacity.source == "predicted" and REGISTRY[capacity.trainer].trains_by is not None:
        typed = f" ({predicted_as(capacity.trainer)})"
    title = f"{trainer_title(capacity.trainer)}{typed}"
    if traits is None:  # unknown what it trains, and how
        return (title, *left)
    there = {"a critic": settings.critic, "entropy": settings.entropy != "none"}
    extras = " and ".join(name for name, is_there in there.items() if is_there)
    objective = f"{settings.objective} with {extras}" if extras else settings.objective
    own = [name for name, is_there in _OWN.items() if is_there(settings)]
    own = own if traits.settings is None else []
    return (title, objective, *own, *other_training(settings), *left)


def farthest(table: GuideTable, model_name: str) -> tuple[int, Choice] | None:
    """Longest length that a model fits by a table, and the settings; None if none is known."""
    column = table.models.index(model_name)
    rows = ((tokens, choices[column]) for tokens, choices in reversed(table.rows))
    return next((row for row in rows if row[1].capacity is not None), None)


def in_natural_order(names: Iterable[str]) -> tuple[str, ...]:
    """Sort names with their numbers by value, without repeats: Qwen3-4B before Qwen3-14B."""

    def parts(name: str) -> list[tuple[float, str]]:
        each = enumerate(re.split(r"(\d+(?:\.\d+)?)", name))
        return [(float(part), "") if at % 2 else (0.0, part) for at, part in each]

    return tuple(sorted(dict.fromkeys(names), key=parts))


def _table(capacities: tuple[Capacity, ...]) -> GuideTable:
    first = capacities[0]
    of_model = {
        name: tuple(each for each in capacities if each.model_name == name)
        for name in in_natural_order(each.model_name for each in capacities)
    }
    grid = usual_grid(first.native_length_tokens)
    last = max(grid.index_at_most(each.capacity_tokens) for each in capacities)
    return GuideTable(
        device_name=first.device_name,
        gpus=first.cell.layout.gpus,
        source=first.source,
        training=training(first),
        native_length_tokens=first.native_length_tokens,
        capacities=capacities,
        models=tuple(of_model),
        # the published lengths, up to one row after the last that fits
        rows=tuple(
            (
                tokens,
                tuple(
                    Choice(
                        model_name=name,
                        capacity=(found := simplest(own, tokens)),
                        may_be_simpler=may_be_simpler(own, tokens, found),
                    )
                    for name, own in of_model.items()
                ),
            )
            for tokens in map(grid.length, range(1, last + 2))
        ),
    )


_EXAMPLE = "highwater guide --predict Qwen3-8B --gpus 4xA100-80GB"
_READ = (
    "what is read: a study that `highwater find` wrote, a .csv of known capacities, the .json of "
    f"`highwater predict --json`; without a file `{_EXAMPLE}`"
)

_PREDICTION = "prediction.json"


class _Found(NamedTuple):
    """Capacities, notes and queries from one source."""

    capacities: tuple[Capacity, ...]
    notes: tuple[str, ...]
    words: str
    """The source as it is typed after ``highwater guide``."""
    queries: Mapping[tuple[str, str, str], Query]
    """Queries to ask ``recommend``, by the source's name, model and kind of GPU."""


def guide(
    *sources: str | Path,
    predict: Sequence[str] = (),
    gpus: Sequence[str] = (),
    trainer: TrainerName = OURS,
    gpu_memory: str | int | None = None,
) -> Guide:
    """Find the simplest settings that fit each length, on every kind and number of GPUs.

    A source is a study, a table of known capacities (``.csv``) or an answer of ``highwater predict
    --json`` (``.json``). ``predict`` names models whose capacities the formula predicts, on each of
    ``gpus``: ``"4xA100-80GB"``; default: this machine's. ``gpu_memory`` is the memory of one GPU,
    of any kind, for kinds that are not in the catalog. A prediction with other settings comes as a
    ``.json``. Raises HighwaterError for an unreadable source, and for what cannot be predicted.
    """
    for is_wrong, what in (
        (gpus or gpu_memory is not None, "GPUs are named, and no model to predict"),
        (not sources, "a guide of nothing: no study, no table and no model is named"),
    ):
        if is_wrong and not predict:
            raise UsageError(what, hint=f"for example `{_EXAMPLE}`")
    capacities: list[Capacity] = []
    notes: dict[str, None] = {}
    models: dict[str, tuple[str | None, str, str]] = {}
    queries: dict[tuple[str, str, str], Query] = {}
    settings: dict[str, Any] = {"trainer": trainer, "gpu_memory": gpu_memory}
    for found in (*map(_read, map(Path, sources)), *_predictions(predict, gpus, settings)):
        for each in found.capacities:
            if each.config_digest is None:
                continue
            own = each.config_digest, each.found_in, found.words
            digest, found_in, known_words = models.setdefault(each.model_name, own)
            if digest != each.config_digest:
                raise UsageError(
                    f"{found_in} and {each.found_in} each have a model {each.model_name}, and "
                    "these are two models: their config.json differ",
                    hint=f"`highwater guide {known_words}` and `highwater guide {found.words}` "
                    "make a guide of each",
                )
        capacities += found.capacities
        notes |= dict.fromkeys(found.notes)
        queries |= found.queries
    return Guide(tables=guide_tables(capacities), notes=tuple(notes), queries=queries)


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
    """Assumptions of a prediction, by flag; reserved memory is left out: the GPU's name has it."""
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
    """Predict each model on each of the GPUs; ``settings``: keywords of ``predict``."""
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

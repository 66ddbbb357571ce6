"""The guide as data: the simplest settings that fit each length and model, a table for each kind
and number of GPUs; and the answers of its page's chooser as JSON.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from highwater.nouns.capacities import Capacity, Source, may_be_simpler, published_grid, simplest
from highwater.nouns.codec import to_builtins
from highwater.nouns.recommendation import Candidate, Query, Recommendation
from highwater.nouns.settings import Settings, other_training
from highwater.nouns.study import Cell, counted_ranks
from highwater.nouns.trainer import predicted_traits, trainer_title
from highwater.pages.answer_sentence import recommendation_answer
from highwater.pages.page import paths_shortened, script_text, without_folders
from highwater.pages.recommendation_tables import recommendation_tables
from highwater.pages.table import TextTable
from highwater.pages.text import plain_lines
from highwater.units import counted, format_bytes

NOTHING_FITS, UNKNOWN = "-", "?"

_OWN: Mapping[str, Callable[[Settings], bool]] = {
    "sharded checkpoints": lambda settings: settings.checkpoint != "none",
    "YaRN at every length": lambda settings: settings.rope == "yarn",
}
"""What our own engine may do besides, on every rung of a study alike. Strategy and saved weights
are a rung's, as in the published ladder: of rungs with one label the best counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a guide says of one model at one length."""

    model_name: str
    capacity: Capacity | None
    """Capacity of the simplest settings that are known to fit; None: none are."""
    may_be_simpler: bool
    """Whether something simpler may fit, which nobody knows; without a capacity: anything."""

    @property
    def label(self) -> str:
        """The settings' label. ``-`` where all that was tried is known not to fit, ``?`` where
        nobody knows.
        """
        if self.capacity is None:
            return UNKNOWN if self.may_be_simpler else NOTHING_FITS
        return cell_label(self.capacity.cell) + (
            " (memory-only)" if self.capacity.is_memory_only else ""
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideTable:
    """Lengths by models, on one number of GPUs of one kind. All capacities are from one source and
    of one kind of training.
    """

    device_name: str
    gpus: int
    source: Source
    training: str
    native_length_tokens: int
    """Native length of all its models: the grid of lengths follows from it."""
    capacities: tuple[Capacity, ...]
    models: tuple[str, ...]
    rows: tuple[tuple[int, tuple[Choice, ...]], ...]
    """Length in tokens, and a choice for each model."""

    @property
    def gpus_in_words(self) -> str:
        """``4 GPUs``."""
        return counted_ranks(self.gpus, "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """A whole guide."""

    tables: tuple[GuideTable, ...]
    notes: tuple[str, ...] = ()
    """What a reader should know about what it was made from, one line each."""
    queries: Mapping[tuple[str, str, str], Query] = field(
        default_factory=dict[tuple[str, str, str], Query]
    )
    """Queries of ``recommend``, by source, model and kind of GPU, where it can be asked."""

    @property
    def choices(self) -> list[Choice]:
        """Every choice, of every table, length and model."""
        return [choice for table in self.tables for _, choices in table.rows for choice in choices]


def guide_tables(capacities: Sequence[Capacity]) -> tuple[GuideTable, ...]:
    """Every table of the guide: in the order of the capacities, fewer GPUs first.

    Capacities stand in one table if they are of one kind and number of GPUs, one source, one kind
    of training, and of models of one native length, which have their lengths in common.
    """
    groups: dict[tuple[str, Source, str, int], dict[int, list[Capacity]]] = {}
    for each in capacities:
        key = each.device_name, each.source, training(each), each.native_length_tokens
        groups.setdefault(key, {}).setdefault(each.cell.layout.gpus, []).append(each)
    return tuple(_table(tuple(group[gpus])) for group in groups.values() for gpus in sorted(group))


def cell_label(cell: Cell) -> str:
    """The settings of a cell as a guide says them. ``vanilla``, ``Env``, ``SP=2``, ``Env + SP=2``,
    ``Env + Offload + SP=2``, ``Env + chunked``.
    """
    parts = [] if cell.settings.label == "vanilla" else [cell.settings.label]
    return " + ".join((*parts, *cell.layout.degrees)) or "vanilla"


def training(capacity: Capacity) -> str:
    """Whose step it is, what it trains and what it has to leave. ``Trinity-RFT, grpo with entropy,
    2 sequences per micro-batch``.
    """
    settings = capacity.cell.settings
    if predicted_traits(capacity.trainer) is None:
        return trained(capacity)
    count = settings.sequences_per_micro_batch
    packed = f"{counted(count, 'sequence')} per micro-batch"
    if settings.token_budget_tokens is not None:
        packed = f"a token budget of {settings.token_budget_tokens} per GPU"
    whose, what, *others = _trained(capacity)
    return ", ".join((whose, what, packed, *others))


def trained(capacity: Capacity) -> str:
    """What ``training`` says, whatever is packed into a micro-batch."""
    return ", ".join(_trained(capacity))


def _trained(capacity: Capacity) -> tuple[str, ...]:
    settings = capacity.cell.settings
    left = (f"{format_bytes(capacity.margin_bytes)} left free",) if capacity.margin_bytes else ()
    traits = predicted_traits(capacity.trainer)
    typed = f" ({capacity.command})" if capacity.command else ""
    title = f"{trainer_title(capacity.trainer)}{typed}"
    if traits is None:  # what it trains, and how, is its own affair
        return (title, *left)
    there = {"a critic": settings.critic, "entropy": settings.entropy != "none"}
    extras = " and ".join(name for name, is_there in there.items() if is_there)
    objective = f"{settings.objective} with {extras}" if extras else settings.objective
    own = [name for name, is_there in _OWN.items() if is_there(settings)]
    own = own if traits.knows_every_setting else []
    return (title, objective, *own, *other_training(settings), *left)


def farthest(table: GuideTable, model_name: str) -> tuple[int, Choice] | None:
    """The longest length of a table that a model is known to fit, and by which settings. None where
    nothing fits.
    """
    column = table.models.index(model_name)
    rows = ((tokens, choices[column]) for tokens, choices in reversed(table.rows))
    return next((row for row in rows if row[1].capacity is not None), None)


def in_natural_order(names: Iterable[str]) -> tuple[str, ...]:
    """The names, each once, sorted with the numbers in them as numbers. Qwen3-0.6B, Qwen3-4B,
    Qwen3-14B.
    """

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
    grid = published_grid(first.native_length_tokens)
    last = max(grid.index_at_most(each.capacity_tokens) for each in capacities)
    return GuideTable(
        device_name=first.device_name,
        gpus=first.cell.layout.gpus,
        source=first.source,
        training=training(first),
        native_length_tokens=first.native_length_tokens,
        capacities=capacities,
        models=tuple(of_model),
        # the published lengths, to one row after the last that fits
        rows=tuple(
            (tokens, tuple(_choice(name, own, tokens) for name, own in of_model.items()))
            for tokens in map(grid.length, range(1, last + 2))
        ),
    )


def _choice(model_name: str, capacities: tuple[Capacity, ...], length_tokens: int) -> Choice:
    found = simplest(capacities, length_tokens)
    return Choice(
        model_name=model_name,
        capacity=found,
        may_be_simpler=may_be_simpler(capacities, length_tokens, found),
    )


_NOT_EMBEDDED = ("candidates", "chosen")
"""Fields of a recommendation that do not stand there as others do. What is chosen stands for
itself; the candidates, which only the tables have, would be most of the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is recommended for one length."""

    found: Recommendation
    command: str
    """The command that answers the same again. Empty where a table of the guide is all that is
    known."""
    entries: tuple[str, ...]
    """What the guide's tables say of it."""
    configurations: Mapping[str, str]
    """Texts to copy for the chosen settings, by what they configure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One model on one number of GPUs, for one kind of training."""

    model_name: str
    device_name: str
    gpus: int
    basis: str
    """Whose step it is, what it trains, and what its figures are."""
    answers: tuple[Answer, ...]
    """Answers, the shortest length first."""
    longest_tokens: int | None
    """The longest of these lengths that is known to fit and is not tight, if any is; None: none
    fits."""


def chooser_json(places: Sequence[Place]) -> Markup:
    """Every combination, as JSON that is harmless inside a ``script`` element.

    Every value stands there once. ``places`` hold a place's names, its answers and the length that
    it opens with; of an answer, ``fields`` and all texts are indices into ``values``.
    """
    fields = [name for name in Recommendation.__struct_fields__ if name not in _NOT_EMBEDDED]
    drafts = [_place(place, fields) for place in places]
    counted = Counter(_keys(drafts))
    order = {key: index for index, (key, _) in enumerate(counted.most_common())}
    indexed = _json(_indexed(drafts, order))
    names = f'"fields":{_json(fields)},"chosen":{_json(Candidate.__struct_fields__)}'
    document = f'{{{names},"values":[{",".join(order)}],"places":{indexed}}}'
    return script_text(document)


class _Value(str):
    """The JSON of a value that is written once."""

    __slots__ = ()


def _place(place: Place, fields: Sequence[str]) -> dict[str, Any]:
    return {
        "model": plain_lines(place.model_name),
        "gpu": plain_lines(place.device_name),
        "gpus": place.gpus,
        "basis": plain_lines(place.basis),
        "longest": place.longest_tokens,
        "answers": [_answer(answer, fields) for answer in place.answers],
    }


def _answer(answer: Answer, fields: Sequence[str]) -> dict[str, Any]:
    found = paths_shortened(to_builtins(answer.found))
    return {
        "length": answer.found.length_tokens,
        "fields": _values(found, fields),
        "chosen": answer.found.chosen and _values(found["chosen"], Candidate.__struct_fields__),
        "label": _text("" if answer.found.chosen is None else answer.found.chosen.label),
        "said": _text(recommendation_answer(answer.found)),
        "entries": [_text(entry) for entry in answer.entries],
        "tables": [_table_words(table) for table in recommendation_tables(answer.found)],
        "command": _text(answer.command),
        "configurations": [
            [_text(name), [_Value(_json(without_folders(line))) for line in text.split("\n")]]
            for name, text in answer.configurations.items()
        ],
    }


def _values(of: Mapping[str, Any], names: Sequence[str]) -> list[_Value]:
    return [_Value(_json(of[name])) for name in names]


def _table_words(table: TextTable) -> list[Any]:
    """Title, headings, rows, footnotes, and how many columns hold names."""
    columns, *rows = [list(map(_text, row)) for row in (table.columns, *table.rows)]
    notes = list(map(_text, table.footnotes))
    return [_text(table.title), columns, rows, notes, table.left_columns]


def _text(text: str) -> _Value:
    return _Value(_json(plain_lines(without_folders(text))))


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _keys(draft: Any) -> Iterator[str]:
    if isinstance(draft, _Value):
        yield str(draft)
    elif isinstance(draft, dict | list):
        for value in draft.values() if isinstance(draft, dict) else draft:
            yield from _keys(value)


def _indexed(draft: Any, order: Mapping[str, int]) -> Any:
    if isinstance(draft, _Value):
        return order[str(draft)]
    if isinstance(draft, dict):
        return {name: _indexed(value, order) for name, value in draft.items()}
    return [_indexed(value, order) for value in draft] if isinstance(draft, list) else draft

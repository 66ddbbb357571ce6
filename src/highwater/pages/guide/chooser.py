"""The chooser of a guide's page: for each combination what ``recommend`` answers.

The page has it as JSON.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from highwater.nouns.codec import to_builtins
from highwater.nouns.recommendation import Candidate, Recommendation
from highwater.pages.answer_sentence import recommendation_answer
from highwater.pages.page import paths_shortened, script_text, without_folders
from highwater.pages.recommendation_tables import recommendation_tables
from highwater.pages.text import plain_lines
from highwater.pages.text_table import TextTable

_NOT_EMBEDDED = ("candidates", "chosen")
"""Fields of a recommendation that do not stand there as others do.

What is chosen stands for itself; the candidates, which only the tables have, would be most of the
page.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is recommended for one length."""

    found: Recommendation
    command: str
    """The command that answers the same again.

    Empty where a table of the guide is all that is known.
    """
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
    fits.
    """


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
        "fields": [_Value(_json(found[name])) for name in fields],
        "chosen": _chosen(found["chosen"]),
        "label": _text("" if answer.found.chosen is None else answer.found.chosen.label),
        "said": _text(recommendation_answer(answer.found)),
        "entries": [_text(entry) for entry in answer.entries],
        "tables": [_table(table) for table in recommendation_tables(answer.found)],
        "command": _text(answer.command),
        "configurations": [
            [_text(name), [_Value(_json(without_folders(line))) for line in text.split("\n")]]
            for name, text in answer.configurations.items()
        ],
    }


def _chosen(candidate: dict[str, Any] | None) -> list[_Value] | None:
    """Values of the candidate's fields, of which many have some in common."""
    if candidate is None:
        return None
    return [_Value(_json(candidate[name])) for name in Candidate.__struct_fields__]


def _table(table: TextTable) -> list[Any]:
    """Title, headings, rows, footnotes, and how many columns hold names."""
    rows = [list(map(_text, row)) for row in table.rows]
    return [
        _text(table.title),
        list(map(_text, table.columns)),
        rows,
        list(map(_text, table.footnotes)),
        table.left_columns,
    ]


def _text(text: str) -> _Value:
    return _Value(_json(plain_lines(without_folders(text))))


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _keys(draft: Any) -> Iterator[str]:
    if isinstance(draft, _Value):
        yield str(draft)
    elif isinstance(draft, dict):
        for value in draft.values():
            yield from _keys(value)
    elif isinstance(draft, list):
        for value in draft:
            yield from _keys(value)


def _indexed(draft: Any, order: Mapping[str, int]) -> Any:
    if isinstance(draft, _Value):
        return order[str(draft)]
    if isinstance(draft, dict):
        return {name: _indexed(value, order) for name, value in draft.items()}
    return [_indexed(value, order) for value in draft] if isinstance(draft, list) else draft

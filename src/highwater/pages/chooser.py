"""The chooser on a guide's page: an answer for each combination of model, GPUs and length, and all
answers as JSON. ``recommend`` and ``emit`` compute the answers while the page is written
(docs/decisions/018), or they are taken from known capacities.
"""

import json
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from highwater.errors import HighwaterError, ModelError
from highwater.model.model import load_model
from highwater.model.rope import Yarn, yarn, yarn_parameters
from highwater.nouns.capacities import Capacity, in_order
from highwater.nouns.cells import simplicity
from highwater.nouns.codec import to_builtins
from highwater.nouns.hardware import kind_of
from highwater.nouns.recommendation import Candidate, Query, Recommendation
from highwater.nouns.request import trial_flags
from highwater.nouns.study import counted_ranks
from highwater.nouns.trainer import (
    OURS,
    REGISTRY,
    TRAINERS,
    Target,
    predicted_traits,
    trainer_title,
)
from highwater.pages.guide import (
    NOTHING_FITS,
    ORIGINS,
    UNKNOWN,
    Guide,
    GuideTable,
    farthest,
    trained,
)
from highwater.pages.page import paths_shortened, script_text, without_folders
from highwater.pages.prediction_tables import recommendation_answer
from highwater.pages.recommendation_tables import recommendation_tables
from highwater.pages.table import TextTable
from highwater.pages.text import plain_lines
from highwater.recommendation.candidates import token_budget
from highwater.recommendation.recommend import recommend
from highwater.trainers.emitted import answered_first
from highwater.trainers.targets import TARGETS, configured_choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer that a chooser shows for one length."""

    found: Recommendation
    command: str
    """Command that gives the same answer again; empty if it comes from a guide's table alone."""
    entries: tuple[str, ...]
    """Entries for this length in the guide's tables."""
    configurations: Mapping[str, str]
    """Configuration files to copy for the chosen settings, by the trainer they are for."""
    tables: tuple[TextTable, ...]
    """Tables that the answer rests on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChooserPlace:
    """One model on one number of GPUs in a chooser, with an answer for each length."""

    model_name: str
    device_name: str
    gpus: int
    basis: str
    """The trainer, what it trains, and the source of the figures."""
    answers: tuple[Answer, ...]
    """Answers by length, the shortest first."""
    longest_tokens: int | None
    """The longest length that leaves the headroom, if predicted; else the longest that fits; None
    if none does."""


def known_recommendation(
    own: Sequence[Capacity], length_tokens: int, *, others: Sequence[Capacity] = ()
) -> Recommendation:
    """Recommend the simplest of ``own`` that is known to fit. ``own``: capacities of one model on
    one number and kind of GPUs, from one source; ``others``: the same on other numbers of GPUs, of
    which the smallest that fits is named if ``own`` has none. Notes name what is unknown.
    """
    first, kind = own[0], kind_of(own[0].device_name)
    best: dict[tuple[int, ...], Capacity] = {}
    for each in in_order(tuple(own)):
        key, fits = simplicity(each.cell), each.fits(length_tokens)
        if fits is not None and (key not in best or (fits and not best[key].fits(length_tokens))):
            best[key] = each
    candidates = tuple(_candidate(each, length_tokens) for each in best.values())
    chosen = next((candidate for candidate in candidates if candidate.fits), None)
    return Recommendation(
        model_name=first.model_name,
        native_length_tokens=first.native_length_tokens,
        trainer=first.trainer,
        length_tokens=length_tokens,
        gpus=first.cell.layout.gpus,
        device_name=first.device_name,
        device_bytes=0 if kind is None else kind.usable_bytes or 0,
        margin_bytes=first.margin_bytes,
        default_sequences=first.cell.settings.sequences_per_micro_batch,
        chosen=chosen,
        candidates=candidates,
        yarn=_yarn(first, length_tokens) if predicted_traits(first.trainer) else None,
        accuracy=ORIGINS[first.source],
        notes=tuple(_notes(own, length_tokens, chosen, others)),
    )


def _candidate(capacity: Capacity, length_tokens: int) -> Candidate:
    settings = capacity.cell.settings
    return Candidate(
        cell=capacity.cell,
        is_lowered=False,
        token_budget_tokens=settings.token_budget_tokens
        or token_budget(capacity.cell, length_tokens),
        fits=bool(capacity.fits(length_tokens)),
        source=capacity.source,
        found_in=capacity.found_in,
        is_memory_only=capacity.is_memory_only,
        headroom_bytes=None,
        capacity_tokens=capacity.capacity_tokens,
        capacity_source=capacity.source,
        is_at_least=capacity.does_not_fit_tokens is None,
    )


def _notes(
    own: Sequence[Capacity],
    length_tokens: int,
    chosen: Candidate | None,
    others: Sequence[Capacity],
) -> Iterator[str]:
    known = {each.cell for each in own if each.fits(length_tokens) is not None}
    simpler = (
        c.cell
        for c in in_order(tuple(own))
        if chosen is None or simplicity(c.cell) < simplicity(chosen.cell)
    )
    unknown = dict.fromkeys(cell.words for cell in simpler if cell not in known)
    if unknown:
        yield f"nobody knows whether these fit: {'; '.join(unknown)}"
    if chosen is None:
        fitting = [each for each in in_order(tuple(others)) if each.fits(length_tokens)]
        fewest = min(fitting, key=lambda each: each.cell.layout.gpus, default=None)
        if fewest is not None:
            gpus = counted_ranks(fewest.cell.layout.gpus, "cuda")
            yield (
                f"what fits in this guide, with the fewest GPUs: {fewest.cell.words} on "
                f"{gpus}, {fewest.source}"
            )


def _yarn(capacity: Capacity, length_tokens: int) -> Yarn | None:
    """YaRN scaling for a length, by the model, or its native length; None: not needed."""
    try:
        model = load_model(capacity.model_name)
    except ModelError:
        model = None
    if model is not None and capacity.config_digest in (None, model.config_digest):
        return yarn(model, length_tokens=length_tokens)
    native = capacity.native_length_tokens
    if length_tokens <= native:
        return None
    factor = length_tokens / native
    parameters = yarn_parameters(factor, native_length_tokens=native)
    return Yarn(factor=factor, rope_parameters=parameters, max_position_embeddings=length_tokens)


_NAMED = ("objective", "critic", "entropy", "rope")
"""Settings that a place's basis names apart from the others."""
_APART = (5 / 4, 4 / 3, 7 / 5, 2, 4)
"""Factors between consecutive lengths of the chooser. The smallest factor is used that keeps the
number of answers within ``_MOST_ANSWERS``."""
_REPLAYED_APART = 2
"""The smallest factor with bundled traces: replaying a cell takes 1 s instead of 10 ms."""
_MOST_ANSWERS = 300
"""Most answers on a page; each takes about 3 KB."""
_IN_WORDS = {NOTHING_FITS: "nothing that was tried fits", UNKNOWN: "nobody knows"}
_Own = tuple[GuideTable, tuple[Capacity, ...]]
"""A table of the guide, and its capacities of one model."""


def places(made: Guide) -> tuple[ChooserPlace, ...]:
    """Make a place for every model and number of GPUs of the guide, with its answers.

    ``recommend`` answers for what studies measured and what the formula predicts, at every length
    of the tables. The table itself answers for what others published, what was simulated, and what
    can no longer be computed.
    """
    groups: dict[tuple[object, ...], list[_Own]] = {}
    for table in made.tables:
        for name in table.models:
            own = tuple(each for each in table.capacities if each.model_name == name)
            groups.setdefault(_group(made, table, own), []).append((table, own))
    each = [(_query(made, group), group) for group in groups.values()]
    sizes = (
        (apart, sum(len(_lengths(group, apart=apart)) for query, group in each if query))
        for apart in _APART
    )
    apart = next((apart for apart, size in sizes if size <= _MOST_ANSWERS), _APART[-1])
    replayed = max(apart, _REPLAYED_APART)
    is_replayed = {name for name, row in TRAINERS.items() if row.traces == "bundled"}
    return tuple(
        _place(made, group, query, replayed if query and query.trainer in is_replayed else apart)
        for query, group in each
    )


def _group(made: Guide, table: GuideTable, own: Sequence[Capacity]) -> tuple[object, ...]:
    where = own[0].model_name, table.device_name, table.gpus
    query = _query(made, [(table, own)])
    if query is None:
        return (*where, table.source, table.training)
    return (*where, query.replace(model="", studies=()))


def _query(made: Guide, group: Sequence[tuple[GuideTable, Sequence[Capacity]]]) -> Query | None:
    """The query with a group's studies and its shared settings; None if it cannot be recomputed."""
    if any(table.source not in ("measured", "predicted") for table, _ in group):
        return None
    found = [
        made.queries.get((c.found_in, c.model_name, c.device_name)) for _, own in group for c in own
    ]
    known = [query for query in found if query is not None]
    if len(known) < len(found):
        return None
    return known[0].replace(
        studies=tuple(dict.fromkeys(path for query in known for path in query.studies)),
        settings=tuple(
            each for each in known[0].settings if all(each in query.settings for query in known)
        ),
    )


def _place(made: Guide, group: Sequence[_Own], query: Query | None, apart: float) -> ChooserPlace:
    table, own = group[0]
    first = own[0]
    answers = () if query is None else _answers_of(query, group, apart=apart)
    sources, named = table.source, list[str]()
    if query is not None:
        named = [f"{name}: {value}" for name, value in query.settings if name not in _NAMED]
    if query is not None and answers:
        sources = "measured, else predicted" if query.studies else "predicted"
    if not answers:
        answers = tuple(_known_answers(made, group))
    fitting = [each.found for each in answers if each.found.chosen is not None]
    sure = [each for each in fitting if _leaves_headroom(each)]
    return ChooserPlace(
        model_name=first.model_name,
        device_name=table.device_name,
        gpus=table.gpus,
        basis=f"{', '.join((*trained(first), *named))}: {sources}",
        answers=answers,
        longest_tokens=max((each.length_tokens for each in sure or fitting), default=None),
    )


def _leaves_headroom(found: Recommendation) -> bool:
    """True if the choice was measured, or leaves the headroom and its pessimistic end fits."""
    chosen = found.chosen
    if chosen is None or chosen.risk == "tight":
        return False
    return chosen.risk is None or (chosen.headroom_bytes or 0) >= found.margin_bytes


def _ends(group: Sequence[_Own]) -> tuple[int, int]:
    """Longest table length that the model is known to fit (0: none), and the next longer one."""
    reached = [(farthest(table, own[0].model_name) or (0,))[0] for table, own in group]
    longest = max(reached)
    later = [tokens for table, _ in group for tokens, _ in table.rows if tokens > longest]
    return longest, min(later, default=longest)


def _lengths(group: Sequence[_Own], *, apart: float) -> list[int]:
    """Lengths of the chooser: powers of two and the tables' lengths, at least a factor of ``apart``
    apart. The longest is the first known not to fit or, if none is, the longest that fits.
    """
    longest, beyond = _ends(group)
    name, rows = (
        group[0][1][0].model_name,
        {tokens for table, _ in group for tokens, _ in table.rows},
    )
    next_row = (row for table, _ in group for tokens, row in table.rows if tokens == beyond)
    said = {choice.label for row in next_row for choice in row if choice.model_name == name}
    beyond = longest if longest and said == {UNKNOWN} else beyond
    first = min(rows)
    doubled = (first << times for times in range(beyond.bit_length()))
    powers = [tokens for tokens in doubled if tokens < beyond]
    kept = {beyond, *((longest,) if longest else ())}
    for tokens in (*powers, *sorted(tokens for tokens in rows if tokens < longest)):
        others = kept - {longest, beyond}
        if all(max(tokens, other) >= apart * min(tokens, other) for other in others):
            kept.add(tokens)
    return sorted(kept)


def _answers_of(query: Query, group: Sequence[_Own], *, apart: float) -> tuple[Answer, ...]:
    """Answers of ``recommend`` for every length that it accepts, and for the longest that fits."""
    gpus = group[0][0].gpus
    lengths = _lengths(group, apart=apart)
    found = list(_recommended(query, gpus, lengths))
    longest = max((c.capacity_tokens for each in found[:1] for c in each.candidates), default=0)
    found += _recommended(query, gpus, {longest} - {0, *lengths})
    found.sort(key=lambda each: each.length_tokens)
    return tuple(
        _answer(
            each,
            group,
            model=query.model,
            command=shlex.join(query.words(gpus=gpus, length_tokens=each.length_tokens)),
        )
        for each in found
    )


def _recommended(query: Query, gpus: int, lengths: Iterable[int]) -> Iterator[Recommendation]:
    for length_tokens in lengths:
        with suppress(HighwaterError):
            # lengths that no scaling of positions reaches are refused
            yield recommend(**query.arguments(gpus=gpus), length=length_tokens)


def _known_answers(made: Guide, group: Sequence[_Own]) -> Iterator[Answer]:
    table, own = group[0]
    others = [
        each
        for other in made.tables
        if (other.source, other.training) == (table.source, table.training)
        for each in other.capacities
        if each.device_name == table.device_name and each.model_name == own[0].model_name
    ]
    _, beyond = _ends([(table, own)])
    for length_tokens in (tokens for tokens, _ in table.rows if tokens <= beyond):
        found = known_recommendation(own, length_tokens, others=others)
        yield _answer(found, group, model=own[0].model_name)


def _answer(
    found: Recommendation, group: Sequence[_Own], *, model: str, command: str = ""
) -> Answer:
    """Answer for one length with the tables' entries; ``model``: the model's name in commands."""
    entries = (
        f"{_IN_WORDS.get(choice.label, choice.entry)} ({table.source}; {table.training})"
        for table, own in group
        for tokens, choices in table.rows
        for choice in choices
        if tokens == found.length_tokens and choice.model_name == own[0].model_name
    )
    return Answer(
        found=found,
        command=command,
        entries=tuple(entries),
        configurations=configurations(found, model),
        tables=recommendation_tables(found),
    )


def configurations(
    found: Recommendation, model: str, targets: Collection[Target] | None = None
) -> Mapping[str, str]:
    """Configurations that ``emit`` writes for a recommendation, by trainer: of ``targets`` (also
    those predicted by another trainer's step), or of all trainers in guides. Trainers that cannot
    express the settings, or do not fit, are left out.
    """
    chosen = found.chosen
    if chosen is None:
        return {}
    texts: dict[str, str] = {}
    if found.trainer == OURS:
        trial = ("highwater", "try", model, *trial_flags(chosen.cell, found.length_tokens))
        texts[trainer_title(found.trainer)] = f"{shlex.join(trial)}\n"
    for target, row in TARGETS.items():
        is_asked = row.is_in_guides if targets is None else target in targets
        is_compared = targets is not None and found.trainer == OURS
        is_compared &= REGISTRY[row.predicted_for].trains_by is not None
        if is_asked and (row.predicted_for == found.trainer or is_compared):
            with suppress(HighwaterError):  # a trainer that cannot express the settings
                made = configured_choice(target, found, model=model)
                if made is None or made.emitted.fits is False:
                    continue
                answered = made.emitted
                if answered.fits:
                    chosen = found.replace(chosen=made.candidate)
                    answered = answered_first(answered, recommendation_answer(chosen, target))
                texts[target] = f"{answered.alone}\n"
    return texts


_NOT_EMBEDDED = ("candidates", "chosen")
"""Fields of a recommendation that are not among ``fields``: the choice has its own entry, and the
candidates, which are in the tables, would be most of the page."""


class _Value(str):
    """JSON of a value that the page stores once and refers to by index."""

    __slots__ = ()


def _value(value: object) -> _Value:
    """Encode a value for the page; a text becomes one line without folder names."""
    if isinstance(value, str):
        value = plain_lines(without_folders(value))
    return _Value(_json(value))


def _values_in(part: object) -> Iterator[_Value]:
    """Yield every value of a document, in order."""
    if isinstance(part, _Value):
        yield part
    elif isinstance(part, dict | list):
        for each in part.values() if isinstance(part, dict) else part:
            yield from _values_in(each)


def _with_indices(part: Any, order: Mapping[str, int]) -> Any:
    """A copy of JSON data with each ``_Value`` replaced by its index in ``order``."""
    if isinstance(part, _Value):
        return order[part]
    if isinstance(part, dict):
        return {name: _with_indices(each, order) for name, each in part.items()}
    return [_with_indices(each, order) for each in part] if isinstance(part, list) else part


def chooser_json(places: Sequence[ChooserPlace], fields: Sequence[str] | None = None) -> Markup:
    """All places and answers as JSON that is harmless inside a ``script`` element. ``values`` has
    every value once, the most frequent first; ``places`` have a place's names, its opening length
    and its answers, whose ``fields`` and texts are indices into ``values``. ``fields``: names of a
    recommendation's fields; None: all but the candidates and the choice.
    """
    if fields is None:
        fields = [name for name in Recommendation.__struct_fields__ if name not in _NOT_EMBEDDED]
    drafts = [
        {
            "model": plain_lines(place.model_name),
            "gpu": plain_lines(place.device_name),
            "gpus": place.gpus,
            "basis": plain_lines(place.basis),
            "longest": place.longest_tokens,
            "answers": [_draft(answer, fields) for answer in place.answers],
        }
        for place in places
    ]
    values = [text for text, _ in Counter(_values_in(drafts)).most_common()]
    indexed = _with_indices(drafts, {text: at for at, text in enumerate(values)})
    names = f'"fields":{_json(fields)},"chosen":{_json(Candidate.__struct_fields__)}'
    return script_text(f'{{{names},"values":[{",".join(values)}],"places":{_json(indexed)}}}')


def _draft(answer: Answer, fields: Sequence[str]) -> dict[str, Any]:
    chosen, own = answer.found.chosen, Candidate.__struct_fields__
    facts = {name: getattr(answer.found, name) for name in (*fields, "chosen")}
    found = paths_shortened(to_builtins(facts))
    return {
        "length": answer.found.length_tokens,
        "fields": [_Value(_json(found[name])) for name in fields],
        "chosen": chosen and [_Value(_json(found["chosen"][name])) for name in own],
        "label": _value("" if chosen is None else chosen.label),
        "said": _value(recommendation_answer(answer.found)),
        "entries": list(map(_value, answer.entries)),
        "tables": [
            [
                _value(table.title),
                list(map(_value, table.columns)),
                [list(map(_value, row)) for row in table.rows],
                list(map(_value, table.footnotes)),
                table.left_columns,
            ]
            for table in answer.tables
        ],
        "command": _value(answer.command),
        "configurations": [
            [_value(name), [_Value(_json(without_folders(line))) for line in text.split("\n")]]
            for name, text in answer.configurations.items()
        ],
    }


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))

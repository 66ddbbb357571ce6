"""Choosing: what a guide's page answers for each combination of model, GPUs and length: computed by `recommend` and `emit`."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec

from highwater.emit.emitted import PREDICTED_FOR
from highwater.emit.targets import configured
from highwater.errors import HighwaterError
from highwater.known import known_recommendation
from highwater.launch.probe import gpus_meant
from highwater.prediction.asked import predicted_question, room_in
from highwater.prediction.capacity import CellPrediction, predict_cells
from highwater.prediction.formula import refuse_unknown_family
from highwater.recommendation import recommend
from highwater.report.chooser import Answer, Place
from highwater.report.guide import NOTHING_FITS, TRAINERS, UNKNOWN, Guide, GuideTable, farthest, trained
from highwater.report.guide_parts import entry
from highwater.spec.asking import Asking
from highwater.spec.capacities import Capacity
from highwater.spec.model import STATE_BYTES_PER_PARAMETER, load_model
from highwater.spec.recommendation import Recommendation
from highwater.spec.request import trial_flags

_NAMED = ("objective", "critic", "entropy", "rope")
"""Settings that a basis names by itself."""
_APART = (5 / 4, 4 / 3, 2, 4)
"""How many times one length of the chooser the next is, at least: the least of these with which there are not too many."""
_REPLAYED_APART = 2
"""Of predictions for Trinity-RFT's trainer, where each answer replays a trace for every cell: 1 s instead of 10 ms."""
_MOST_ANSWERS = 400
"""About 2 KB each."""
_IN_WORDS = {NOTHING_FITS: "nothing that was tried fits", UNKNOWN: "nobody knows"}
_Own = tuple[GuideTable, tuple[Capacity, ...]]
"""A table of the guide, and what it has of one model."""


def places(made: Guide) -> tuple[Place, ...]:
    """Every model on every number of GPUs of the guide.

    What studies measured and what is predicted by formula is asked of ``recommend``, at every length of the tables; what others
    published, what was simulated and what nobody can ask about any more is answered by the table itself.
    """
    groups: dict[tuple[object, ...], list[_Own]] = {}
    for table in made.tables:
        for name in table.models:
            own = tuple(each for each in table.capacities if each.model_name == name)
            groups.setdefault(_group(made, table, own), []).append((table, own))
    each = [(_asking(made, group), group) for group in groups.values()]
    sizes = ((apart, sum(len(_lengths(group, apart=apart)) for asking, group in each if asking)) for apart in _APART)
    apart = next((apart for apart, size in sizes if size <= _MOST_ANSWERS), _APART[-1])
    return tuple(
        _place(made, group, asking, apart=max(apart, _REPLAYED_APART) if asking and asking.trainer == "trinity" else apart)
        for asking, group in each
    )


def _group(made: Guide, table: GuideTable, own: Sequence[Capacity]) -> tuple[object, ...]:
    """What is answered together: the studies and predictions that one command asks about, or one table."""
    where = own[0].model_name, table.device_name, table.gpus
    asking = _asking(made, [(table, own)])
    if asking is None:
        return (*where, table.source, table.training)
    return (*where, msgspec.structs.replace(asking, model="", studies=()))


def _asking(made: Guide, group: Sequence[tuple[GuideTable, Sequence[Capacity]]]) -> Asking | None:
    """With every study of the group, and the settings that all its sources have; None where the table answers itself."""
    if any(table.source not in ("measured", "predicted") for table, _ in group):
        return None
    found = [made.askings.get((c.found_in, c.model_name, c.device_name)) for _, own in group for c in own]
    known = [asking for asking in found if asking is not None]
    if len(known) < len(found):
        return None
    return msgspec.structs.replace(
        known[0],
        studies=tuple(dict.fromkeys(path for asking in known for path in asking.studies)),
        settings=tuple(each for each in known[0].settings if all(each in asking.settings for asking in known)),
    )


def _place(made: Guide, group: Sequence[_Own], asking: Asking | None, *, apart: float) -> Place:
    table, own = group[0]
    first = own[0]
    answers = () if asking is None else tuple(_asked_answers(asking, group, apart=apart))
    sources = ("measured, else predicted" if asking.studies else "predicted") if asking and answers else table.source
    named = [] if asking is None else [f"{name}: {value}" for name, value in asking.settings if name not in _NAMED]
    if not answers:
        asking = None
        answers = tuple(_known_answers(made, group))
    formula = asking or made.askings.get((first.found_in, first.model_name, first.device_name))
    sequences = first.cell.settings.sequences_per_micro_batch
    longest, beyond = _ends(group)
    fitting = [each.found.length_tokens for each in answers if each.found.length_tokens <= longest]
    return Place(
        model_name=first.model_name,
        device_name=table.device_name,
        gpus=table.gpus,
        basis=f"{', '.join((trained(first), *named))}: {sources}",
        sequences=sequences,
        answers=answers,
        longest_tokens=max(fitting, default=None),
        opens_tokens=max((tokens for tokens in fitting if tokens <= table.native_length_tokens), default=None),
        explained=() if formula is None else _explained(formula, table.gpus, longest or beyond, sequences),
        explained_tokens=longest or beyond,
    )


def _ends(group: Sequence[_Own]) -> tuple[int, int]:
    """The longest row that the model is known to fit, 0 for none, and the next."""
    reached = [(farthest(table, own[0].model_name) or (0,))[0] for table, own in group]
    longest = max(reached)
    later = [tokens for table, _ in group for tokens, _ in table.rows if tokens > longest]
    return longest, min(later, default=longest)


def _lengths(group: Sequence[_Own], *, apart: float) -> list[int]:
    """Powers of two and rows of the tables, so far apart at least; the last row that fits, and the next."""
    longest, beyond = _ends(group)
    rows = {tokens for table, _ in group for tokens, _ in table.rows}
    first = min(rows)
    powers = [first << doubled for doubled in range(beyond.bit_length()) if first << doubled < beyond]
    kept = {beyond, *((longest,) if longest else ())}
    for tokens in (*powers, *sorted(tokens for tokens in rows if tokens < longest)):
        if all(max(tokens, other) >= apart * min(tokens, other) for other in kept - {longest, beyond}):
            kept.add(tokens)
    return sorted(kept)


def _asked_answers(asking: Asking, group: Sequence[_Own], *, apart: float) -> Iterator[Answer]:
    """What ``recommend`` says of every length that it can be asked about."""
    gpus, model_name = group[0][0].gpus, group[0][1][0].model_name
    for length_tokens in _lengths(group, apart=apart):
        with suppress(HighwaterError):  # a length that no scaling of its positions reaches is refused
            found = recommend(**asking.arguments(gpus=gpus), length=length_tokens)
            yield Answer(
                found=found,
                command=shlex.join(asking.words(gpus=gpus, length_tokens=length_tokens)),
                entries=_entries(group, length_tokens, model_name),
                configurations=_configurations(found, asking.model),
            )


def _known_answers(made: Guide, group: Sequence[_Own]) -> Iterator[Answer]:
    """What the table itself says."""
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
        yield Answer(
            found=found,
            command="",
            entries=_entries(group, length_tokens, own[0].model_name),
            configurations=_configurations(found, own[0].model_name),
        )


def _entries(group: Sequence[_Own], length_tokens: int, model_name: str) -> tuple[str, ...]:
    found = ((table, choices) for table, _ in group for tokens, choices in table.rows if tokens == length_tokens)
    return tuple(
        f"{_IN_WORDS.get(choice.label, entry(choice))} ({table.source}; {table.training})"
        for table, choices in found
        for choice in choices
        if choice.model_name == model_name
    )


def _configurations(found: Recommendation, model: str) -> Mapping[str, str]:
    """What ``emit`` prints for the trainer that is recommended for; for this engine the command that trains so."""
    chosen = found.chosen
    if chosen is None:
        return {}
    texts: dict[str, str] = {}
    if found.trainer == "highwater":
        trial = ("highwater", "try", model, *trial_flags(chosen.cell, found.length_tokens))
        texts[TRAINERS["highwater"]] = f"{shlex.join(trial)}\n"
    for target, trainer in PREDICTED_FOR.items():
        if trainer == found.trainer:
            with suppress(HighwaterError):  # a trainer that has no words for it
                texts[target] = configured(target, found, chosen, model=model).text.rstrip("\n") + "\n"
    return texts


def _explained(asking: Asking, gpus: int, length_tokens: int, sequences: int) -> tuple[CellPrediction, ...]:
    """Every cell in closed form: what `highwater predict --length --explain` shows the terms of."""
    asked = asking.arguments(gpus=gpus)
    settings = {**dict(asking.settings), "sequences_per_micro_batch": sequences}
    with suppress(HighwaterError):  # a family that no formula knows
        refuse_unknown_family(load_model(asking.model))
        where = gpus_meant(asked["gpus"], asked.get("gpu_memory"))
        room = room_in(where, host_memory=None, reserved=asking.reserved_bytes, state_bytes_per_param=STATE_BYTES_PER_PARAMETER)
        question, _ = predicted_question(asking.model, where, asking.trainer, length_tokens, settings)
        return predict_cells(question, room, asking.trainer)
    return ()

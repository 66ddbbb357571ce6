"""The guide as data: the simplest settings that fit each length and model, a table for each kind
and number of GPUs.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from highwater.memory.table_accuracy import published_grid
from highwater.nouns.capacities import Capacity, Source, may_be_simpler, simplest
from highwater.nouns.recommendation import Query
from highwater.nouns.settings import Settings, other_training
from highwater.nouns.study import Cell, counted_ranks
from highwater.nouns.trainer import predicted_traits, trainer_title
from highwater.units import counted, format_bytes

NOTHING_FITS, UNKNOWN = "-", "?"
ORIGINS: dict[Source, str] = {
    "measured": "by real trials",
    "simulated": "from a memory law, nothing was trained",
    "predicted": "where the prediction is an interval, its upper end fits",
    "published": "by others, not measured here",
}
"""How far figures are to be trusted, by source."""
SOURCES: dict[Source, str] = {
    **{source: f"{source} {origin}" for source, origin in ORIGINS.items()},
    "predicted": f"predicted, nothing was run; {ORIGINS['predicted']}",
}

_OWN: Mapping[str, Callable[[Settings], bool]] = {
    "sharded checkpoints": lambda settings: settings.checkpoint != "none",
    "YaRN at every length": lambda settings: settings.rope == "yarn",
}
"""What our own engine may do besides, on every rung of a study alike. Strategy and saved weights
are a rung's, as in the published ladder: of rungs with one label the best counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The entry of a guide for one model at one length."""

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
        is_memory_only = self.capacity.is_memory_only
        return f"{cell_label(self.capacity.cell)}{' (memory-only)' if is_memory_only else ''}"

    @property
    def entry(self) -> str:
        """The label as a table has it: with ``?`` where something simpler may fit."""
        is_open = self.capacity is not None and self.may_be_simpler
        return f"{self.label} ?" if is_open else self.label


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
        return ", ".join(trained(capacity))
    count = settings.sequences_per_micro_batch
    packed = f"{counted(count, 'sequence')} per micro-batch"
    if settings.token_budget_tokens is not None:
        packed = f"a token budget of {settings.token_budget_tokens} per GPU"
    whose, what, *others = trained(capacity)
    return ", ".join((whose, what, packed, *others))


def trained(capacity: Capacity) -> tuple[str, ...]:
    """The parts of ``training``, but for what is packed into a micro-batch."""
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

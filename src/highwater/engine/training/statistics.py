"""Statistics of a step: values that do not depend on its split over micro-batches and ranks.

A quantity (statistics.json) defines what is counted and over which ranks it is combined; each rank
adds its parts. One all-reduce carries everything: scalars, and two values for each document. A
value has a slot for each group of ranks that is combined, a minimum or maximum one for each rank,
and nothing is averaged or exponentiated before the sum. The sum runs after the update, when there
are no activations, and as an operation that the step has used before: NCCL would take memory for a
new one, and its MIN and MAX lose a NaN.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from reprlib import repr as shortened
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from highwater.engine.parallel import mesh as process_mesh
from highwater.errors import UsageError
from highwater.nouns.codec import from_json

Group = Literal["rank", "context", "data", "all"]
"""Ranks whose parts a number combines: this ``rank`` alone; the ``context`` ranks, which share its
sequences; the ``data`` ranks, which have the same place in other sequences; or ``all``."""
How = Literal["sum", "mean", "min", "max", "each", "same", "rate"]
"""How parts are combined. ``each``: into a list by rank. ``same``: not, as every rank has the same
number already. ``rate``: not, as the number is computed from other quantities."""

DOCUMENT = "document"
"""The ``per`` of quantities with a number for each document, over all its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """Rule by which the ranks' parts of one statistic of a step are combined."""

    how: How
    says: str = ""
    """Description of the number, in a line of Markdown."""
    per: str | None = None
    """Denominator of a mean: a count of the step, a sum of the caller's own, or DOCUMENT."""
    group: Group = "all"
    is_count: bool = False
    """True for a whole number, combined from whole numbers alone."""


_FILE = Path(__file__).with_name("statistics.json")
QUANTITIES: Mapping[str, Quantity] = from_json(_FILE.read_bytes(), dict[str, Quantity])
"""A step's own quantities, in the order of a line in the statistics file, which leaves out those
that a step lacks. The reference page is written from this table."""

Reduced = float | int | tuple[float | int | None, ...] | None
"""A combined number; for ``each`` one number a rank. None: nothing to divide or compare."""
_NOT_SENT = ("same", "rate")
_DECLARATION = "`quantities={'my_metric': Quantity(how='sum')}`"
_OF_ONES_OWN = ("sum", "mean", "min", "max")
"""Ways in which a user's own quantity may be combined."""
_PER_DOCUMENT = 2
"""Numbers sent for a document: the sum of its tokens' log-probabilities, and their count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A rank's number among all; ranks that share a sequence have consecutive numbers."""

    rank: int
    ranks: int
    sharing: int
    """Number of ranks that share one sequence."""

    def slot(self, group: Group, rank: int | None = None) -> int:
        """Return the index of the group of this kind that has ``rank`` (None: this rank)."""
        rank = self.rank if rank is None else rank
        data_rank, place = divmod(rank, self.sharing)
        return {"rank": rank, "context": data_rank, "data": place, "all": 0}[group]

    def slots(self, group: Group) -> int:
        """Return the number of groups of this kind."""
        return self.slot(group, self.ranks - 1) + 1

    def members(self, group: Group) -> list[int]:
        """Return the ranks in this rank's group of this kind."""
        return [rank for rank in range(self.ranks) if self.slot(group, rank) == self.slot(group)]


class Statistics:
    """Collects this rank's parts of a step's statistics until they are exported."""

    def __init__(
        self,
        mesh: DeviceMesh,
        sequence: dist.ProcessGroup | None,
        *,
        quantities: Mapping[str, Quantity] | None = None,
        groups: Mapping[str, Group] | None = None,
        denominators: Mapping[str, str] | None = None,
    ) -> None:
        """``mesh`` has all ranks; those of ``sequence`` share this rank's sequences, None: none do.
        ``quantities`` are the caller's own, by name, besides QUANTITIES: a rank that adds nothing
        to one adds 0; in the group ``data`` each of the ranks that share a sequence adds the same,
        which counts once. By name, ``groups`` overrides the ranks that a quantity is combined from,
        ``denominators`` the sum that a mean is divided by. All are the same on all ranks.

        Raises UsageError for quantities that cannot be combined like this.
        """
        self._mesh = mesh
        sharing = process_mesh.sharing(sequence)
        self.coordinates = Coordinates(rank=mesh.get_rank(), ranks=mesh.size(), sharing=sharing)
        self._own = {} if quantities is None else quantities
        self._quantities = _declared(self._own, groups or {}, denominators or {})
        self._shares = {
            name: 1 / sharing
            for name, quantity in self._own.items()
            if quantity.group == "data" and quantity.how in ("sum", "mean")
        }
        """Factor of a rank's part, if all ranks that share a sequence add the same value."""
        self.reset()

    def reset(self) -> None:
        """Drop all parts."""
        self._parts: dict[str, float] = {}
        self._of_documents: list[tuple[float, float]] = []
        self._has_logprobs = False

    def add(self, name: str, value: float | Tensor) -> None:
        """Add this rank's part: to a sum, to the numerator of a mean, or to the rank's own value;
        for a minimum or maximum, one more candidate. A ``same`` quantity is set.

        Raises UsageError for an unknown name (listing the known ones), for a value that is not a
        number, and for a count that is not whole.
        """
        quantity = known(name, self._quantities)
        part = _number(name, value, quantity)
        match quantity.how:
            case "sum" | "mean" | "each":
                part += self._parts.get(name, 0.0)
            case "min" | "max":
                part = _extreme(quantity.how, (part, self._parts.get(name, part)))
            case _:
                pass
        self._parts[name] = part

    def add_documents(self, logprob_sums: Sequence[float] | None, counts: Sequence[int]) -> None:
        """Add this rank's part of its documents: each one's sum of trained log-probabilities (None
        if the step has none) and their count. Ranks that share documents keep one order.
        """
        self._has_logprobs |= logprob_sums is not None
        self._of_documents += zip(logprob_sums or [0.0] * len(counts), counts, strict=True)

    def export(self, *, most_documents: int) -> dict[str, Reduced]:
        """Return the step's statistics that have parts, and drop the parts; all ranks must call it.

        ``most_documents``: the most documents that any rank added, the same on all ranks. One that
        a group combines is returned for this rank's group. Raises UsageError if a rank added
        nothing to the denominator of a mean that it added to, and for a count past 2**53.
        """
        numbers_of_all = [*self._scalars(), *self._documents(most_documents)]
        row = torch.tensor(numbers_of_all, dtype=torch.float64)
        assert len(row) == self.width(most_documents), "a row is as long on every rank"
        slots = summed(row, self._mesh).tolist()
        numbers: dict[str, Reduced] = {**self._parts}
        try:
            for name, quantity, group in self._sent:
                width = self.coordinates.slots(group)
                parts = [slots[n * width :][:width] for n in range(_numbers_of(quantity))]
                slots = slots[width * len(parts) :]
                # a rank without a token has no logits, but returns the others' extremes
                on_another = quantity.how in ("min", "max") and any(parts[1])
                if name in numbers or name in self._own or on_another:
                    numbers[name] = self._number(name, quantity, group, parts)
            numbers |= self._over_documents(slots, most_documents)
        finally:
            self.reset()
        return {name: numbers[name] for name in self._quantities if name in numbers}

    def width(self, most_documents: int) -> int:
        """Number of values summed over the ranks if none has more documents than this."""
        slots = self.coordinates.slots
        scalars = sum(slots(group) * _numbers_of(each) for _, each, group in self._sent)
        return scalars + _PER_DOCUMENT * most_documents * slots("context")

    @property
    def _sent(self) -> Iterator[tuple[str, Quantity, Group]]:
        """Yield each quantity that is summed, with its slots: one per group, or one per rank."""
        for name, quantity in self._quantities.items():
            if quantity.per != DOCUMENT and quantity.how not in _NOT_SENT:
                is_sum = quantity.how in ("sum", "mean")
                yield name, quantity, quantity.group if is_sum else "rank"

    def _scalars(self) -> Iterator[float]:
        """Yield this rank's parts in its groups' slots, and zeros in the other slots."""
        for name, quantity, group in self._sent:
            for part in self._sent_of(name, quantity):
                slots = [0.0] * self.coordinates.slots(group)
                slots[self.coordinates.slot(group)] = part
                yield from slots

    def _sent_of(self, name: str, quantity: Quantity) -> tuple[float, ...]:
        """Return this rank's values of a quantity; ``_numbers_of`` has their number."""
        part, is_there = self._part(name), name in self._parts
        match quantity.how:
            case "mean":
                assert quantity.per is not None, "a mean is over something"
                return part, self._part(quantity.per), is_there and quantity.per not in self._parts
            case "min" | "max":
                return part, is_there
            case "each":  # these are counts, so NaN can mean "nothing added"
                return (part if is_there else math.nan,)
            case _:
                return (part,)

    def _part(self, name: str) -> float:
        return self._parts.get(name, 0.0) * self._shares.get(name, 1)

    def _documents(self, most: int) -> Iterator[float]:
        """Yield the values of this rank's documents, and zeros for those of other data ranks."""
        padding = [(0.0, 0.0)] * (most - len(self._of_documents))
        for data_rank in range(self.coordinates.slots("context")):
            is_own = data_rank == self.coordinates.slot("context")
            for numbers in [*self._of_documents, *padding] if is_own else [(0.0, 0.0)] * most:
                yield from numbers

    def _number(
        self, name: str, quantity: Quantity, group: Group, parts: Sequence[Sequence[float]]
    ) -> Reduced:
        """Return this rank's result of a quantity, combined from the slots of all its groups."""
        own = [slots[self.coordinates.slot(group)] for slots in parts]
        match quantity.how:
            case "sum":
                return _counted(name, own[0], quantity)
            case "mean":
                total, count, missing = own
                if missing:
                    raise UsageError(
                        f"{name} is a mean over {quantity.per}, to which nothing was added on a "
                        f"rank that added to {name}",
                        hint=f"add to `{quantity.per}` too, on every rank, if only 0"
                        if quantity.per in self._own
                        else f"call `step()` before you add: every rank's adds to `{quantity.per}`",
                    )
                if count:
                    return total / count
                return total if math.isnan(total) else None
            case "min" | "max":
                values, is_there = parts
                members = self.coordinates.members(quantity.group)
                added = [values[rank] for rank in members if is_there[rank]]
                extreme = _extreme(quantity.how, added) if added else None
                return None if extreme is None else _counted(name, extreme, quantity)
            case _:
                counts = (None if math.isnan(n) else _counted(name, n, quantity) for n in parts[0])
                return tuple(counts)

    def _over_documents(self, slots: Sequence[float], most: int) -> dict[str, Reduced]:
        """Return the results of the quantities that are per document."""
        pairs = list(zip(slots[0::_PER_DOCUMENT], slots[1::_PER_DOCUMENT], strict=True))
        first = self.coordinates.slot("context") * most
        numbers: dict[str, Reduced] = {}
        for name, quantity in self._quantities.items():
            if quantity.per != DOCUMENT:
                continue
            of = pairs if quantity.group == "all" else pairs[first : first + most]
            valid = [(logprobs, count) for logprobs, count in of if count]
            if quantity.how == "sum":
                numbers[name] = len(valid)
            elif self._has_logprobs:
                numbers[name] = _perplexity(quantity.how, valid)
        return numbers


def _declared(
    own: Mapping[str, Quantity], groups: Mapping[str, Group], denominators: Mapping[str, str]
) -> dict[str, Quantity]:
    """Return all quantities, the caller's too, with the groups and denominators overridden."""
    if not isinstance(own, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            f"quantities are {shortened(own)}, and have to be a mapping", hint=_DECLARATION
        )
    for name, quantity in own.items():
        if not (_is_name(name) and isinstance(quantity, Quantity)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"{name!r}: {shortened(quantity)} cannot be declared: that takes a name and a "
                "Quantity",
                hint=_DECLARATION,
            )
        if name in QUANTITIES:
            raise UsageError(
                f"{name} is one of the step's own numbers", hint=f"call yours `my_{name}`"
            )
        if quantity.how not in _OF_ONES_OWN or (quantity.how == "mean") != bool(quantity.per):
            raise UsageError(
                f"{name} cannot be declared as {quantity.how} over {quantity.per or 'nothing'}",
                hint="use `Quantity(how='mean', per='n_valid_tokens')`, or `how='sum'`, `'min'` or "
                "`'max'` without `per`",
            )
        if quantity.how == "mean" and quantity.is_count:
            raise UsageError(
                f"{name} is a mean, and cannot be declared as a count", hint="leave `is_count` out"
            )
    quantities = {**QUANTITIES, **own}
    # ranks that share a sequence add equal values: each adds a share of it (Statistics._shares)
    whole: dict[str, Group] = {
        name: "all" if each.group == "data" else each.group for name, each in own.items()
    }
    put_together = [n for n, each in quantities.items() if each.how in _OF_ONES_OWN]
    for name, group in {**whole, **groups}.items():
        if group not in get_args(Group):
            raise UsageError(
                f"{group} is no group of ranks", hint=f"use one of {', '.join(get_args(Group))}"
            )
        if name not in put_together:
            raise UsageError(
                f"{name} is no number that is put together from ranks",
                hint=f"use one of {', '.join(put_together)}",
            )
        if quantities[name].per == DOCUMENT and group not in ("context", "all"):
            raise UsageError(
                f"{name} of {group}: a document's numbers are of all ranks that share it",
                hint="use `context` or `all`",
            )
        quantities[name] = replace(quantities[name], group=group)
    over = {name: quantity.per for name, quantity in own.items() if quantity.per is not None}
    means = [n for n, each in quantities.items() if each.how == "mean" and each.per != DOCUMENT]
    divisors = _divisors(quantities)
    for name, per in {**over, **denominators}.items():
        if name not in means:
            raise UsageError(
                f"{name} over {per}: {name} is no mean over tokens",
                hint=f"use one of {', '.join(means)}",
            )
        if per not in divisors:
            raise UsageError(
                f"{name} over {per}: a mean is divided by a count of the step or a sum of your own",
                hint=f"use one of {', '.join(divisors)}, or declare a sum besides",
            )
        quantities[name] = replace(quantities[name], per=per)
    return quantities


def _divisors(quantities: Mapping[str, Quantity]) -> list[str]:
    """Return the names that a mean may be divided by: counts, and sums that a caller declared."""
    return [
        name
        for name, each in quantities.items()
        if each.how == "sum" and not each.per and (each.is_count or name not in QUANTITIES)
    ]


def _is_name(name: object) -> bool:
    return isinstance(name, str) and bool(name.strip())


def known(name: str, quantities: Mapping[str, Quantity]) -> Quantity:
    """Return the quantity of this name; UsageError for an unknown one, with the known names."""
    if not _is_name(name) or name not in quantities:
        own = (f"my_{name}" if name in QUANTITIES else name) if _is_name(name) else "my_metric"
        others = f", or use one of {', '.join(quantities)}" if quantities else ""
        raise UsageError(
            f"{shortened(name)} is no quantity that is declared here",
            hint=f"declare it, `quantities={{{own!r}: Quantity(how='sum')}}`, with `how` 'sum', "
            "'min', 'max', or 'mean' and as its `per` any of "
            f"{', '.join(_divisors({**QUANTITIES, **quantities}))}{others}",
        )
    return quantities[name]


def summed(row: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum the ranks' rows element by element; return the sum, of equal shape, on the host."""
    if mesh.size() == 1:
        return row
    return process_mesh.total(row.to(mesh.device_type), mesh).cpu()


def _numbers_of(quantity: Quantity) -> int:
    """Values a slot: 3 for a mean (numerator, denominator, ranks without it), 2 for min, max."""
    return {"mean": 3, "min": 2, "max": 2}.get(quantity.how, 1)


def _number(name: str, value: object, quantity: Quantity) -> float:
    """Convert a number, or a tensor or array of one element, to float; a count must be whole."""
    number = part = None
    try:
        number = value.item() if hasattr(value, "item") else value  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
        if isinstance(number, Real):
            part = float(number)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # several elements; past float64
        pass
    if part is None:
        raise UsageError(
            f"{name} cannot take {shortened(value)}: it is no number that float64 has",
            hint=f"add a number or a tensor of one element, such as `add({name!r}, 1)`",
        )
    if quantity.is_count and not (part.is_integer() and part == number):
        raise UsageError(
            f"{name} is a count, and cannot take {shortened(value)}: it is no whole number",
            hint="add a whole number, or declare it without `is_count`",
        )
    return part


def _extreme(how: Literal["min", "max"], values: Sequence[float]) -> float:
    """Return the minimum or maximum; NaN if any is NaN (Python's would depend on the order)."""
    if any(map(math.isnan, values)):
        return math.nan
    return min(values) if how == "min" else max(values)


def _perplexity(how: How, documents: Sequence[tuple[float, float]]) -> Reduced:
    """Return the mean, minimum or maximum of the documents' perplexities."""
    if not documents:
        return None
    sums, counts = torch.tensor(documents, dtype=torch.float64).T
    perplexities_D = (-sums / counts).exp()  # math.exp would raise where this is infinite
    of = {"mean": torch.mean, "min": torch.min, "max": torch.max}[how]
    return float(of(perplexities_D))


def _counted(name: str, value: float, quantity: Quantity) -> float | int:
    if not quantity.is_count:
        return value
    if abs(value) > 2**53:  # float64 cannot hold every whole number past it
        raise UsageError(
            f"{name} came to {value:g}, and counts are exact up to 2**53",
            hint="declare it without `is_count`",
        )
    return round(value)

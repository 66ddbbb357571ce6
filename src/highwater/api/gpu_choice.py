"""GPU choice: of several kinds of GPUs the cheapest that train a length, and the smallest number of
each kind that does; of several numbers of one kind the smallest.

```python
import highwater

choice = highwater.cheapest_gpus("Qwen3.5-27B", gpus=["A100", "H100", "B200"], length="256k")
for each in choice.offers:
    print(each.gpus, each.device_name, each.million_dollars)
```
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from highwater.api.prediction import predict
from highwater.errors import UsageError
from highwater.memory.capacity import CellPrediction, Prediction
from highwater.nouns.cluster import has_count
from highwater.nouns.codec import Record
from highwater.nouns.hardware import LIST_PRICE_NOTE, hour_dollars_of
from highwater.nouns.trainer import TrainerName
from highwater.speed import Cost, cost_of
from highwater.units import parse_amount, parse_price

_COUNTS = (1, 2, 4, 8)
"""GPUs of a usual machine; below the fewest of these that do, numbers between are tried too."""


class Offer(Record, frozen=True, kw_only=True):
    """GPUs of one kind in a comparison: how many, the fastest settings on them, the price."""

    device_name: str
    gpus: int
    """GPUs that train it for the least money; the most that were tried if none does."""
    device_bytes: int
    """Memory of one of them."""
    fewest_gpus: int | None = None
    """The fewest that train it; None: none that was tried does."""
    trained: CellPrediction | None = None
    host_memory_bytes: int | None = None
    assumed: str = ""
    """``Prediction.assumed`` of the trainer's attention."""
    usual_host: str | None = None
    """The machine whose host memory is taken, if nobody named any."""
    million_dollars: float | None = None
    """Dollars of a million tokens; None: the price or the speed is unknown."""
    hour_dollars: float | None = None
    """Dollars of these GPUs for an hour; None: the price is unknown."""
    cost: Cost | None = None
    """Time and money of the named number of tokens; None: none was named, or no time is known."""


class GpuChoice(Record, frozen=True, kw_only=True):
    """Kinds of GPUs compared for one length, the one that trains it for the least money first."""

    schema_version: int = 1
    model_name: str
    native_length_tokens: int
    trainer: TrainerName
    length_tokens: int
    offers: tuple[Offer, ...]
    notes: tuple[str, ...]
    is_one_kind: bool = False
    """True if numbers of one kind of GPUs are compared, the fewest first."""


def cheapest_gpus(
    model: str,
    *,
    gpus: Sequence[str],
    length: int | str,
    price: str | float | None = None,
    tokens: int | str | None = None,
    **asked: Any,
) -> GpuChoice:
    """Compare kinds of GPUs, ``("A100", "8xH100")``, by the cost of a million tokens in sequences
    of ``length``. A kind without a number is tried with 1, 2, 4, 8 and the smallest number that
    fits; its cheapest number is kept. ``price``: of a GPU for an hour, or one for each kind,
    ``"1.59,3.49"``; default: the catalog's. ``tokens``: ``"500M"``, whose time and money are told
    too. Other keywords are those of ``predict``. Raises HighwaterError for invalid values.
    """
    prices = [parse_price(each) for each in str(price).split(",")] if price is not None else [None]
    if len(prices) not in (1, len(gpus)):
        problem = f"{len(prices)} prices, and {len(gpus)} kinds of GPUs"
        raise UsageError(problem, hint="give one for each, `--price 1.59,3.49`, or none")
    tried = [_by_count(model, kind, length=length, **asked) for kind in gpus]
    amount = None if tokens is None else parse_amount(str(tokens))
    priced = zip(tried, prices * len(gpus), strict=False)
    offers = [_offer(each, hour, amount) for each, hour in priced]
    is_one_kind = len(offers) > len({each.device_name for each in offers}) == 1
    offers.sort(key=lambda e: (e.trained is None, e.gpus) if is_one_kind else _place(e))
    notes = [note for each in tried for prediction in each for note in prediction.notes]
    for kind, each in zip(gpus, tried, strict=True):
        if not has_count(kind) and (least := each[0].gpus) > 1:
            notes.append(f"{kind} is named without a number: fewer than {least} are refused here")
    known = tried[0][0]
    is_listed = price is None and any(each.hour_dollars for each in offers)
    return GpuChoice(
        model_name=known.model_name,
        native_length_tokens=known.native_length_tokens,
        trainer=known.trainer,
        length_tokens=known.length_tokens or 0,
        offers=tuple(offers),
        notes=tuple(dict.fromkeys([*notes, *([LIST_PRICE_NOTE] * is_listed)])),
        is_one_kind=is_one_kind,
    )


def _by_count(model: str, gpus: str, **asked: Any) -> list[Prediction]:
    """Predictions for 1, 2, 4, 8 GPUs of a kind and the fewest, or for the typed number."""
    if has_count(gpus):
        return [predict(model, gpus=gpus, **asked)]
    found: dict[int, Prediction] = {}
    refused: list[UsageError] = []

    def trains(count: int) -> bool:
        try:
            found[count] = predict(model, gpus=gpus if count == 1 else f"{count}x{gpus}", **asked)
        except UsageError as error:  # degrees need as many GPUs
            refused.append(error)
            return False
        return any(cell.capacity_tokens for cell in found[count].cells)

    fewest = min([each for each in _COUNTS if trains(each)], default=1)
    any(map(trains, range(fewest // 2 + 1, fewest)))
    if not found:
        raise refused[0]
    return [found[count] for count in sorted(found)]


def _place(offer: Offer) -> tuple[float, ...]:
    """Key that sorts offers: those that train first, by dollars a million tokens, dollars an hour,
    and memory.
    """
    dollars, hour = offer.million_dollars, offer.hour_dollars
    known = (dollars is None, round(dollars or 0.0, 2), hour is None, hour or 0.0)
    return (offer.trained is None, *known, offer.gpus * offer.device_bytes)


def _offer(tried: Sequence[Prediction], hour: float | None, amount: int | None) -> Offer:
    """The cheapest number of GPUs of a kind, with the fastest settings that fit on each."""
    offers: list[Offer] = []
    for each in tried:
        fitting = [cell for cell in each.cells if cell.capacity_tokens]
        best = max(fitting, key=lambda c: c.step.tokens_per_s if c.step else 0.0, default=None)
        if best is None and each is not tried[-1]:
            continue
        price, step = hour_dollars_of(each.device_name, hour), best and best.step
        cost = partial(cost_of, gpus=each.gpus, hour_dollars=price)
        offers.append(
            Offer(
                device_name=each.device_name,
                gpus=each.gpus,
                device_bytes=each.device_bytes,
                fewest_gpus=(offers[0].gpus if offers else each.gpus) if best else None,
                trained=best,
                host_memory_bytes=each.memory_limit.host_bytes,
                usual_host=each.memory_limit.usual_host,
                assumed=each.assumed,
                million_dollars=step and cost(10**6, step).dollars,
                cost=cost(amount, step) if amount and step else None,
                hour_dollars=price and price * each.gpus,
            )
        )
    return min(offers, key=_place)

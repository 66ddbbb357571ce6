"""Fields of a record, each of the kind that it has to be: what is not is refused by the record's
name and the field's, and nothing is rounded or guessed.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from highwater.engine.data.batches import UNTRAINED
from highwater.engine.data.readers import DataRecord
from highwater.engine.data.user_documents import seen
from highwater.errors import UsageError


def has(record: DataRecord, *names: str) -> bool:
    """Whether a record has all these fields: in a table what a record lacks is None."""
    return all(record.fields.get(name) is not None for name in names)


def value_of(record: DataRecord, name: str) -> Any:
    """The value of a field, or None; the field is read by that."""
    record.read.add(name)
    return record.fields.get(name)


def first_of(record: DataRecord, *names: str) -> str | None:
    """The first of these fields that the record has."""
    return next((name for name in names if has(record, name)), None)


def text_of(record: DataRecord, name: str) -> str:
    """A field that is a text."""
    value = value_of(record, name)
    if not isinstance(value, str):
        raise wrong(record, name, value, "a text", f'`{{"{name}": "some text"}}`')
    return value


def list_of(record: DataRecord, name: str, *, count: int | None = None) -> Sequence[Any]:
    """A field that is a list, of ``count`` values where that is said."""
    value = value_of(record, name)
    if not isinstance(value, list | tuple):
        raise wrong(record, name, value, "a list", f'`{{"{name}": [...]}}`')
    if count is not None and len(value) != count:
        raise UsageError(
            f"{record.name}: `{name}` has {len(value)} values for {count} responses",
            hint=f"write one of `{name}` for each response",
        )
    return value


def number_of(record: DataRecord, name: str, value: Any) -> float:
    """A finite number, of a field or given for it."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise wrong(record, name, value, "a finite number", f'`{{"{name}": 1.0}}`')
    return float(value)


def ids_of(record: DataRecord, name: str, value: Any, *, vocab_size: int) -> NDArray[np.int64]:
    """Token ids that the model knows."""
    ids = _numbers(record, name, value)
    if ids.size and ids.dtype.kind not in "iu":
        raise wrong(record, name, value, "a list of whole numbers", "`[1, 2, 3]`")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise UsageError(
            f"{record.name}: `{name}` has {int(outside[0])}, and the model knows the ids 0 to "
            f"{vocab_size - 1}",
            hint="tokenise with the model's own tokenizer, or give the text and let it be "
            'tokenised: `{"text": "some text"}`',
        )
    return ids.astype(np.int64)


def labels_of(record: DataRecord, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of a record's ids are trained, as its ``labels`` say."""
    value = value_of(record, "labels")
    labels = _numbers(record, "labels", value)
    is_trained = labels != UNTRAINED
    if labels.shape != ids.shape or (labels[is_trained] != ids[is_trained]).any():
        raise UsageError(
            f"{record.name}: `labels` are neither {UNTRAINED} nor the token's own id at each of "
            f"{len(ids)} tokens",
            hint=f"label a token with its own id to train on it, with {UNTRAINED} not to; none is "
            "shifted",
        )
    return is_trained


def logprobs_of(record: DataRecord, value: Any, *, count: int) -> NDArray[np.float32]:
    """Log-probabilities of ``count`` tokens, all finite."""
    numbers = _numbers(record, "logprobs", value)
    if numbers.dtype.kind not in "iuf" or not np.isfinite(numbers).all():
        raise wrong(record, "logprobs", value, "finite numbers", "`[-0.5, -1.25]`")
    if len(numbers) != count:
        raise UsageError(
            f"{record.name}: {len(numbers)} `logprobs` for {count} tokens",
            hint="give one for each token id of the response, or leave `logprobs` out",
        )
    return numbers.astype(np.float32)


def _numbers(record: DataRecord, name: str, value: Any) -> NDArray[Any]:
    try:
        numbers = np.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise wrong(record, name, value, "a list of numbers", "`[1, 2, 3]`") from error
    if not isinstance(value, list | tuple) or numbers.ndim != 1 or numbers.dtype.kind not in "iuf":
        raise wrong(record, name, value, "a list of numbers", "`[1, 2, 3]`")
    return numbers


def wrong(record: DataRecord, name: str, value: Any, meant: str, example: str) -> UsageError:
    """A field, or a part of it, is not what it has to be."""
    return UsageError(
        f"{record.name}: `{name}` is not {meant}: {seen(value)}", hint=f"for example {example}"
    )

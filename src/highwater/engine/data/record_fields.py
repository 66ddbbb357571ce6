"""A record of a data file, and its fields, read as the types that they must have. An error names
the record and the field; no value is rounded or guessed.

Fields that were not read are refused if they have a text, a number or a boolean, except metadata of
the record, message or call, by a list of names, and masks, which say if it is trained.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from highwater.engine.data.batches import UNTRAINED, seen
from highwater.errors import UsageError
from highwater.nouns.codec import packaged


class DataRecord(NamedTuple):
    """One record and its location. Methods raise UsageError, with its name, for invalid fields."""

    fields: Mapping[str, Any]
    row: int
    """Line or row in its file, from 1."""
    name: str
    """Name in errors: ``data.jsonl:17``, or ``data.jsonl:17: message 2 of `messages```."""
    file: int
    """Index of its file in the corpus."""
    command_without: Callable[[Sequence[str]], str]
    """Function of field names: a shell command that writes the file anew without these fields;
    empty for a table."""
    read: set[str]
    """Names of the fields that were read so far."""

    def has(self, *names: str) -> bool:
        """True if the record has all these fields; a null field of a table counts as missing."""
        return all(self.fields.get(name) is not None for name in names)

    def first(self, *names: str) -> str | None:
        """Return the first of these names that is a field of the record; None if none is."""
        return next((name for name in names if self.has(name)), None)

    def value(self, name: str) -> Any:
        """Return a field's value, None if it is lacking, and note that the field was read."""
        self.read.add(name)
        return self.fields.get(name)

    def text(self, name: str) -> str:
        """Return a field that must be a text."""
        value = self.value(name)
        if not isinstance(value, str):
            raise self.wrong(name, value, "a text", f'`{{"{name}": "some text"}}`')
        return value

    def sequence(self, name: str, *, count: int | None = None) -> Sequence[Any]:
        """Return a field that must be a list, of ``count`` values if that is given."""
        value = self.value(name)
        if not isinstance(value, list | tuple):
            raise self.wrong(name, value, "a list", f'`{{"{name}": [...]}}`')
        if count is not None and len(value) != count:
            raise self.refusal(
                f"`{name}` has {len(value)} values for {count} responses",
                hint=f"write one of `{name}` for each response",
            )
        return value

    def number(self, name: str, value: Any) -> float:
        """Return ``value``, of field ``name``, as a finite number."""
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong(name, value, "a finite number", f'`{{"{name}": 1.0}}`')
        return float(value)

    def ids(self, name: str, value: Any, *, vocab_size: int) -> NDArray[np.int64]:
        """Return ``value``, of field ``name``, as token ids; UsageError for any out of range."""
        ids = self._numbers(name, value)
        if ids.size and ids.dtype.kind not in "iu":
            raise self.wrong(name, value, "a list of whole numbers", "`[1, 2, 3]`")
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if outside.size:
            raise self.refusal(
                f"`{name}` has {int(outside[0])}, and the model knows the ids 0 to "
                f"{vocab_size - 1}",
                hint="tokenise with the model's own tokenizer, or give the text and let it be "
                'tokenised: `{"text": "some text"}`',
            )
        return ids.astype(np.int64)

    def labels(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the trained ids, read from ``labels``: each its id, or UNTRAINED."""
        labels = self._numbers("labels", self.value("labels"))
        is_trained = labels != UNTRAINED
        if labels.shape != ids.shape or (labels[is_trained] != ids[is_trained]).any():
            raise self.refusal(
                f"`labels` are neither {UNTRAINED} nor the token's own id at each of "
                f"{len(ids)} tokens",
                hint=f"label a token with its own id to train on it, with {UNTRAINED} not to; none "
                "is shifted",
            )
        return is_trained

    def logprobs(self, value: Any, *, count: int) -> NDArray[np.float32]:
        """Return ``value`` as log-probabilities of ``count`` tokens; UsageError unless finite."""
        numbers = self._numbers("logprobs", value)
        if not np.isfinite(numbers).all():
            raise self.wrong("logprobs", value, "finite numbers", "`[-0.5, -1.25]`")
        if len(numbers) != count:
            raise self.refusal(
                f"{len(numbers)} `logprobs` for {count} tokens",
                hint="give one for each token id of the response, or leave `logprobs` out",
            )
        return numbers.astype(np.float32)

    def _numbers(self, name: str, value: Any) -> NDArray[Any]:
        numbers = None
        with suppress(TypeError, ValueError, OverflowError):
            numbers = np.asarray(value) if isinstance(value, list | tuple) else None
        if numbers is None or numbers.ndim != 1 or numbers.dtype.kind not in "iuf":
            raise self.wrong(name, value, "a list of numbers", "`[1, 2, 3]`")
        return numbers

    def mask(self, fields: dict[str, Any]) -> bool | None:
        """Remove the mask fields from a message's, or a part's, ``fields``; return True if they
        mark it as trained, False if one marks it as not trained, None if there is no mask.

        Raises UsageError for a mask that is not 0, 1 or a boolean, and for another field with a
        number or boolean, unless its name is known to be metadata.
        """
        told: list[bool] = []
        for name in [name for name in fields if _plain(name) in _MASKS]:
            value = fields.pop(name)
            says = _says_trained(name, value)
            if says is None:
                raise self.wrong(name, value, "0, 1, false or true", f'`"{name}": 0`')
            told.append(says)
        self.refuse_flags(fields)
        return all(told) if told else None

    def refuse_flags(self, fields: Mapping[str, Any]) -> None:
        """Raise UsageError for a field with a number or boolean that ``is_about`` does not know."""
        for name, value in fields.items():
            if not is_about(name, value) and _has_other_than_texts(value):
                raise self.refusal(
                    f"what `{name}`, {seen(value)}, means for training is not known",
                    hint='leave it out; a message with `"weight": 0` is not trained',
                )

    def refuse_unread(self, *, may_have_more: bool = False) -> None:
        """Raise UsageError for a record that a mask among its fields marks as not trained; and,
        unless it ``may_have_more``, for fields that were not read and are no metadata, repeat no
        text that was read, and are no mask of ones beside token ids.
        """
        for name, value in self.fields.items():
            if _says_trained(name, value) is False:
                raise self.refusal(
                    f"`{name}` is {seen(value)}, by which nothing of the record is trained",
                    hint="leave such records out of the data",
                )
        if may_have_more:
            return
        read_texts = {text for name in self.read for text in _texts(self.fields.get(name))}
        has_ids = "input_ids" in self.read
        unread = [
            name
            for name, value in self.fields.items()
            if name not in self.read
            and not is_about(name, value)
            and not _says_trained(name, value)
            and not (has_ids and isinstance(value, list) and all(each == 1 for each in value))
            and (_has_other_than_texts(value) or not read_texts.issuperset(_texts(value)))
        ]
        if unread:
            command = self.command_without(unread)
            raise self.refusal(
                f"{self.fields_read} would be trained without regard to "
                + " and ".join(f"`{name}`" for name in unread),
                hint="write it into a field that is read, or leave it out"
                + (f", with jq: `{command}`" if command else " of the table"),
            )

    @property
    def fields_read(self) -> str:
        """Names of the fields that were read so far, for a message."""
        return " and ".join(f"`{name}`" for name in self.fields if name in self.read)

    def wrong(self, name: str, value: Any, meant: str, example: str) -> UsageError:
        """Return the error for a field, or part of it, that is not what is expected, ``meant``."""
        return self.refusal(f"`{name}` is not {meant}: {seen(value)}", f"for example {example}")

    def refusal(self, problem: str, hint: str) -> UsageError:
        """Return an error that begins with the record's name."""
        return UsageError(f"{self.name}: {problem}", hint=hint)


_METADATA = packaged("engine/data/metadata_fields.json", dict[str, frozenset[str]])
_ABOUT = _METADATA["whatever_their_value"]
"""Fields that describe a record, message or call, whatever their values; ``..._id`` does too."""
_NUMBERS = _METADATA["numbers"]
"""Fields that describe a record, message or call, if their value is a number or boolean."""
_OR_PROMPTS = frozenset({"config", "file", "origin", "source", "topic"})
"""Fields of ``_ABOUT`` in which some data has prompts: they describe if all texts are labels."""
_LABEL = re.compile(r"[!-~]*")
_MASKS = {
    **dict.fromkeys(("weight", "train", "training", "trained", "loss"), True),
    "masked": False,
}
"""Fields that say if their record, message or part is trained, and the value that says it is."""


def is_about(name: str, value: Any) -> bool:
    """True if a field is metadata of its record, message or call, and not trained on."""
    plain = _plain(name)
    if plain in _OR_PROMPTS and not is_label(value):
        return False
    is_number = not isinstance(value, str | Mapping | list | tuple)
    return plain in _ABOUT or plain.endswith("_id") or (is_number and plain in _NUMBERS)


def is_label(value: Any) -> bool:
    """True if each text in a value is one ASCII word, such as a name, a path, an address."""
    return all(map(_LABEL.fullmatch, _texts(value)))


def _plain(name: str) -> str:
    """Return ``tokenCount``, ``Token-Count`` and ``token count`` as ``token_count``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|[- ]", "_", name).lower()


def _says_trained(name: str, value: Any) -> bool | None:
    """True or False if a mask says trained or not; None for other fields and values."""
    means_trained = _MASKS.get(_plain(name))
    if means_trained is None or isinstance(value, str) or value not in (0, 1):
        return None
    return bool(value) == means_trained


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value, stripped, without empty ones and metadata (``is_about``)."""
    if isinstance(value, str):
        yield from (text for text in (value.strip(),) if text)
    elif isinstance(value, Mapping):
        for name, each in cast(Mapping[str, Any], value).items():
            yield from () if is_about(name, each) else _texts(each)
    elif isinstance(value, list | tuple):
        for each in cast(Sequence[Any], value):
            yield from _texts(each)


def _has_other_than_texts(value: Any) -> bool:
    """True if a value contains a number, a boolean, or another non-text value."""
    if isinstance(value, Mapping):
        return any(map(_has_other_than_texts, cast(Mapping[str, Any], value).values()))
    if isinstance(value, list | tuple):
        return any(map(_has_other_than_texts, cast(Sequence[Any], value)))
    return value is not None and not isinstance(value, str)

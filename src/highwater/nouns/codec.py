"""Records to JSON and back: one strict codec for every file and document.

Journals, trial files, ``--json`` and the published schemas have it.
"""

import hashlib
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every record: immutable, keyword-only, unknown fields refused when read."""


def to_json(value: object, *, indent: int = 0) -> str:
    """JSON text of a record, keys in declaration order: the same value is the same text."""
    encoded = msgspec.json.encode(value)
    return (msgspec.json.format(encoded, indent=indent) if indent else encoded).decode()


def from_json(text: str | bytes, kind: type[T]) -> T:
    """Read the record of type ``kind`` in ``text``.

    Raises msgspec.ValidationError for fields that are missing, unknown or of the wrong type,
    msgspec.DecodeError for text that is no JSON, and HighwaterError for values that cannot be.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError as error:
        raise msgspec.DecodeError("it is nested too deep") from error


def to_builtins(value: object) -> Any:
    """The record as dicts, lists, strings and numbers."""
    return msgspec.to_builtins(value)


def from_builtins(value: object, kind: type[T]) -> T:
    """The record of type ``kind`` in dicts, lists, strings and numbers; errors as ``from_json``."""
    return msgspec.convert(value, type=kind)


def json_schema(kind: type) -> dict[str, Any]:
    """JSON Schema (2020-12) of a record."""
    return msgspec.json.schema(kind)


def digest(value: object) -> str:
    """16 hexadecimal digits that name a value: equal values, equal digests, on any machine."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:16]

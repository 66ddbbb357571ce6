"""Records to JSON and back, one strict codec for every file and document; and the digest by which a
question or a trial is known again, whatever settings are added later (docs/decisions/026).
"""

import hashlib
from collections.abc import Mapping
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


_IN_EVERY_KEY: Mapping[str, frozenset[str]] = {
    "Settings": frozenset(
        (
            *("strategy", "allocator", "loss", "entropy", "offload", "objective", "critic"),
            *("sequences_per_micro_batch", "token_budget_tokens"),
            *("recompute", "mlp_tiles", "rope", "save_hf", "checkpoint"),
        )
    ),
    "Layout": frozenset(("gpus", "ulysses_degree", "ring_degree", "replicate_degree")),
    "Model": frozenset(("rope",)),
    "ModelShape": frozenset(("experts", "experts_per_token")),
    "Question": frozenset(
        (
            *("method", "confirm", "margin_bytes", "steps", "micro_batches", "data"),
            *("simulated", "proof", "timeout_s"),
        )
    ),
    "TrialSpec": frozenset(
        ("memory_budget_bytes", "steps", "micro_batches", "seed", "data", "attention_depth")
    ),
}
"""Fields that are in a key at their defaults too, by record. They are those that were there when
the first keys were written down. Nothing is ever added: a field that came later is in a key only
where it says something else than its default, so that what was asked before it came is still the
same question. For the same reason the default of a recorded field never changes."""


def key_of(value: msgspec.Struct, *, without: tuple[str, ...], blank: tuple[str, ...] = ()) -> str:
    """The digest of a record: equal records, equal keys, on any machine and in any later version.
    Two kinds of fields, of this record or of any within it, are no part of its identity: those
    ``without`` which keys were always made, and ``blank`` ones, which stand in every key as null.
    """
    return digest(_identified(value, without, blank))


def _identified(value: Any, without: tuple[str, ...], blank: tuple[str, ...]) -> Any:
    if isinstance(value, (tuple, list)):
        return [_identified(each, without, blank) for each in value]
    if not isinstance(value, msgspec.Struct):
        return to_builtins(value)
    names = (kind.__name__ for kind in type(value).__mro__)
    always = next((_IN_EVERY_KEY[name] for name in names if name in _IN_EVERY_KEY), frozenset())
    identified: dict[str, Any] = {}
    for field in msgspec.structs.fields(value):
        own = getattr(value, field.name)
        if field.name not in without and (field.name in always or not _is_default(own, field)):
            said = None if field.name in blank else _identified(own, without, blank)
            identified[field.encode_name] = said
    return identified


def _is_default(own: Any, field: msgspec.structs.FieldInfo) -> bool:
    if field.default_factory is not msgspec.NODEFAULT:
        return own == field.default_factory()
    return field.default is not msgspec.NODEFAULT and own == field.default
